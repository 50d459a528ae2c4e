"""Embedding in kernels."""

from typing import Any

from numpy.typing import NDArray

from cupy_kernels.launch import launch
from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace


def gather(table: Array, ids: NDArray[Any], work: Workspace) -> Array:
    rows, width = table.shape
    y = work.take("y", (len(ids), width), table)
    launch("embedding_gather", table=table, ids=ids, y=y, rows=rows, count=len(ids), width=width)
    return y


def segment_sums(dy: Array, order: NDArray[Any], starts: NDArray[Any], work: Workspace) -> Array:
    (count, width), found = dy.shape, len(starts) - 1
    sums = work.take("sums", (found, width), dy)
    launch(
        "segment_sums",
        dy=dy,
        order=order,
        starts=starts,
        sums=sums,
        count=count,
        segments=found,
        width=width,
    )
    return sums
