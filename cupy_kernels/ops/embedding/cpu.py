"""Embedding on the host."""

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace


def gather(table: Array, ids: NDArray[np.int64], work: Workspace) -> Array:
    """y (count, width) with y[i] = table[ids[i]]; zeros if an id is not a row of the table."""
    y = work.take("y", (len(ids), table.shape[1]))
    known = (ids >= 0) & (ids < len(table))
    y[known] = table[ids[known]]
    y[~known] = 0.0
    return y


def gather_backward(
    dy: Array,
    ids: NDArray[np.int64],
    out: Array,
    work: Workspace,  # noqa: ARG001  # as kernels take it
) -> None:
    """Write the gradient by the table into `out` (rows, width): for each row the sum of its dy."""
    out.fill(0.0)
    known = np.flatnonzero((ids >= 0) & (ids < len(out)))
    if not known.size:
        return
    order = known[np.argsort(ids[known], kind="stable")]
    rows, first = np.unique(ids[order], return_index=True)
    out[rows] = np.add.reduceat(dy[order], first, axis=0)
