"""Rows of `embedding.cu`: gather, and its gradient by sorted segment sums."""

from typing import Any

import numpy as np

from cupy_kernels.kernel_spec import EXACT, Kernel, over, reads, scalar, writes
from cupy_kernels.types import Wide


def embedding_gather(
    table: Wide, ids: Any, rows: int, count: int, width: int, **_: Any
) -> dict[str, Any]:
    y = np.zeros((count, width))
    for place, chosen in enumerate(ids[:count]):
        if 0 <= chosen < rows:
            y[place] = table.reshape(-1, width)[chosen]
    return {"y": y}


def segment_sums(
    dy: Wide, order: Any, starts: Any, segments: int, width: int, **_: Any
) -> dict[str, Any]:
    gradient = dy.reshape(-1, width)
    parts = [order[starts[s] : starts[s + 1]] for s in range(segments)]
    return {"sums": np.array([gradient[part].sum(axis=0) for part in parts])}


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
        "segment_sums",
        "embedding.cu",
        (
            reads("dy", "count*width"),
            reads("order", "count", "i8"),
            reads("starts", lambda sizes: sizes["segments"] + 1, "i8"),
            writes("sums", "segments*width"),
            scalar("count"),
            scalar("segments"),
            scalar("width"),
        ),
        over("segments*width"),
        segment_sums,
        bytes_each=8,
    ),
)
