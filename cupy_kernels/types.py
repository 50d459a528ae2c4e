"""The array types that the kernels' signatures use."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
"""A float32 array."""

Labels = NDArray[np.int64]
"""Class indices."""

Wide = NDArray[np.float64]
"""A float64 array, as the references use."""

AnyArray = NDArray[Any]
