"""The array types of the kernels' signatures, the precision of products, and an update's block."""

from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
"""A float32 array of NumPy, or of another backend with arrays that behave alike."""

Labels = NDArray[np.int64]
"""Class indices."""

Wide = NDArray[np.float64]
"""A float64 array, as in the references."""

AnyArray = NDArray[Any]

BLOCK = 8192
"""The floats that an update on the host takes at a time: temporaries this short stay in the
first-level caches."""

Kept = tuple[Any, ...]
"""The values that a forward pass keeps for its backward pass, opaque to callers."""


class Precision(StrEnum):
    """The type that a kernel rounds both factors of a product to; sums are float32.

    The host supports only FP32.
    """

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
