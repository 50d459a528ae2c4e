"""The array types of the kernels' signatures, the precision of products, and an update's block."""

from enum import StrEnum
from typing import Any, NamedTuple

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

ROW_COUNT, ROW_SLOT = 1, 2
"""The words of the meta of a sparse table's row that hold its number of updates, and the one float
of a rule that keeps one a row (shards/sparse_part.py)."""

Kept = tuple[Any, ...]
"""The values that a forward pass keeps for its backward pass, opaque to callers."""


class Precision(StrEnum):
    """The type that a kernel rounds both factors of a product to; sums are float32.

    The host supports only FP32.
    """

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"


def freeze(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only view, like received frames, so that numba compiles a loop for one type only."""
    view = array.view()
    view.flags.writeable = False
    return view


class RowUpdate(NamedTuple):
    """The update of some rows: a rule by name, and its numbers.

    `rate` is float64. `constants` are the formula's; for Adam its two betas as float64 come first,
    with which each row's rate is corrected by the row's own number of updates. The decay is L2, or
    `l1`.
    """

    rule: str
    rate: float
    decay: np.float32
    l1: bool
    constants: tuple[Any, ...]
