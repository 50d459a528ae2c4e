"""The array types that the kernels' signatures use, and in what precision products are taken."""

from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
"""A float32 array; of NumPy, or of a place whose arrays behave alike."""

Labels = NDArray[np.int64]
"""Class indices."""

Wide = NDArray[np.float64]
"""A float64 array, as the references use."""

AnyArray = NDArray[Any]

Kept = tuple[Any, ...]
"""What a forward pass hands to its backward pass; only an operation's own bodies look inside."""


class Precision(StrEnum):
    """What a kernel rounds both factors of a product to; sums are float32. The host knows FP32."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
