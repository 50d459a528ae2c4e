"""Embedding: rows of a table by id, and their gradient as sums over equal ids.

It uses neither atomics nor scatter: a batch's positions are sorted by id, equal ids in batch order,
and each row's gradient is one sum in that order, with the same bits in every run.
"""

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.backends import pick
from cupy_kernels.ops.embedding import cpu, gpu
from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace

Ids = NDArray[np.int64]


def gather(table: Array, ids: Ids, work: Workspace) -> Array:
    """y (count, width) with y[i] = table[ids[i]]; zeros if an id is not a row of the table."""
    return pick(table, cpu.gather, gpu.gather)(table, ids, work)


def gather_backward(dy: Array, ids: Ids, out: Array, work: Workspace) -> None:
    """Write the gradient by the table into `out` (rows, width): for each row the sum of its dy."""
    pick(dy, cpu.gather_backward, gpu.gather_backward)(dy, ids, out, work)
