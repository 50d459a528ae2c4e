"""Embedding in kernels."""

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.launch import launch
from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace


def gather(table: Array, ids: NDArray[np.int64], work: Workspace) -> Array:
    rows, width = table.shape
    y = work.take("y", (len(ids), width), table)
    launch("embedding_gather", table=table, ids=ids, y=y, rows=rows, count=len(ids), width=width)
    return y


def gather_backward(dy: Array, ids: NDArray[np.int64], out: Array, work: Workspace) -> None:
    (count, width), rows = dy.shape, len(out)
    order = work.take_as("order", (count,), np.int64, dy)
    starts = work.take_as("starts", (rows + 1,), np.int64, dy)
    launch("stable_order", ids=ids, order=order, count=count)
    launch("segment_starts", ids=ids, order=order, starts=starts, count=count, rows=rows)
    sizes = {"count": count, "rows": rows, "width": width}
    launch("segment_sums", dy=dy, order=order, starts=starts, sums=out, **sizes)
