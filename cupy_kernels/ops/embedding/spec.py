"""Rows of `embedding.cu`: gather, and its gradient by sums over sorted ids."""

from typing import Any

import numpy as np

from cupy_kernels.kernel_spec import EXACT, Kernel, Sizes, over, reads, scalar, writes
from cupy_kernels.types import Wide


def embedding_gather(
    table: Wide, ids: Any, rows: int, count: int, width: int, **_: Any
) -> dict[str, Any]:
    y = np.zeros((count, width))
    for row, chosen in enumerate(ids[:count]):
        if 0 <= chosen < rows:
            y[row] = table.reshape(-1, width)[chosen]
    return {"y": y}


def stable_order(ids: Any, count: int, **_: Any) -> dict[str, Any]:
    return {"order": np.argsort(ids[:count], kind="stable")}


def segment_starts(ids: Any, count: int, rows: int, **_: Any) -> dict[str, Any]:
    return {"starts": [np.count_nonzero(ids[:count] < row) for row in range(rows + 1)]}


def segment_sums(
    dy: Wide, order: Any, starts: Any, rows: int, width: int, **_: Any
) -> dict[str, Any]:
    gradient = dy.reshape(-1, width)
    parts = [order[starts[row] : starts[row + 1]] for row in range(rows)]
    return {"sums": np.array([gradient[part].sum(axis=0) for part in parts])}


def _edges(sizes: Sizes) -> int:
    return sizes["rows"] + 1


ROWS = (
    Kernel(
        "embedding_gather",
        "embedding.cu",
        (
            reads("table", "rows*width"),
            reads("ids", "count", "i8"),
            writes("y", "count*width"),
            scalar("rows"),
            scalar("count"),
            scalar("width"),
        ),
        over("count*width"),
        embedding_gather,
        bytes_each=8,
        tolerance=EXACT,
    ),
    Kernel(
        "stable_order",
        "embedding.cu",
        (reads("ids", "count", "i8"), writes("order", "count", "i8"), scalar("count")),
        over("count"),
        stable_order,
        bytes_each=16,
        tolerance=EXACT,
    ),
    Kernel(
        "segment_starts",
        "embedding.cu",
        (
            reads("ids", "count", "i8"),
            reads("order", "count", "i8"),
            writes("starts", _edges, "i8"),
            scalar("count"),
            scalar("rows"),
        ),
        over(_edges),
        segment_starts,
        bytes_each=8,
        tolerance=EXACT,
    ),
    Kernel(
        "segment_sums",
        "embedding.cu",
        (
            reads("dy", "count*width"),
            reads("order", "count", "i8"),
            reads("starts", _edges, "i8"),
            writes("sums", "rows*width"),
            scalar("count"),
            scalar("rows"),
            scalar("width"),
        ),
        over("rows*width"),
        segment_sums,
        bytes_each=8,
    ),
)
