"""Rows of `column_sums.cu`: sums of columns, in two stages."""

from typing import Any

import numpy as np

from cupy_kernels.kernel_spec import (
    Dim3,
    Geometry,
    Kernel,
    Sizes,
    Tolerance,
    changes,
    over,
    reads,
    scalar,
    writes,
)
from cupy_kernels.types import Wide

MOST_CHUNKS = 128


def chunks(rows: int) -> int:
    """The number of chunks for sums over `rows` rows; it depends on the size alone."""
    return max(1, min(MOST_CHUNKS, -(-rows // 64)))


def column_grid(sizes: Sizes) -> Dim3:
    """Blocks of 32 columns, and the chunks of rows."""
    return -(-sizes["columns"] // 32), chunks(sizes["rows"]), 1


def _column_partials(a: Wide, b: Wide | None, rows: int, columns: int, **_: Any) -> dict[str, Any]:
    terms = (a if b is None else a * b)[: rows * columns].reshape(rows, columns)
    chunk_rows = -(-rows // chunks(rows))
    parts = [terms[k * chunk_rows : (k + 1) * chunk_rows].sum(axis=0) for k in range(chunks(rows))]
    return {"partials": np.array(parts)}


def _column_totals(
    partials: Wide, sums: Wide, factor: Any, add: int, chunks: int, columns: int
) -> dict[str, Any]:
    total = float(factor) * partials.reshape(-1, columns)[:chunks].sum(axis=0)
    return {"sums": total + (sums if add else 0)}


ROWS = (
    Kernel(
        "column_partials",
        "column_sums.cu",
        (
            reads("a", "rows*columns"),
            reads("b", "rows*columns", optional=True),
            writes("partials", lambda sizes: chunks(sizes["rows"]) * sizes["columns"]),
            scalar("rows"),
            scalar("columns", "i4"),
        ),
        Geometry((32, 8, 1), column_grid),
        _column_partials,
        bytes_each=8,
        tolerance=Tolerance(1e-5, 1e-5),
    ),
    Kernel(
        "column_totals",
        "column_sums.cu",
        (
            reads("partials", "chunks*columns"),
            changes("sums", "columns"),
            scalar("factor", "f4"),
            scalar("add", "i4"),
            scalar("chunks", "i4"),
            scalar("columns", "i4"),
        ),
        over("columns"),
        _column_totals,
        bytes_each=4,
        tolerance=Tolerance(1e-5, 1e-5),
    ),
)
