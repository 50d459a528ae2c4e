"""Embedding on the host."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace


def gather(table: Array, ids: NDArray[Any], work: Workspace) -> Array:
    y = work.take("y", (len(ids), table.shape[1]))
    known = (ids >= 0) & (ids < len(table))
    y[known] = table[ids[known]]
    y[~known] = 0.0
    return y


def segment_sums(dy: Array, order: NDArray[Any], starts: NDArray[Any], work: Workspace) -> Array:
    sums = work.take("sums", (len(starts) - 1, dy.shape[1]))
    if len(sums):
        np.add.reduceat(dy[order], starts[:-1], axis=0, out=sums)
    return sums
