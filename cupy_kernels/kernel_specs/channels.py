"""Rows of `channels.cu`: scale and bias, sums over all axes but the channels, copied columns."""

from typing import Any

import numpy as np

from cupy_kernels.kernel_spec import (
    EXACT,
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


def _scale_forward(
    x: Wide, scale: Wide | None, bias: Wide | None, columns: int, **_: Any
) -> dict[str, Any]:
    y = x.reshape(-1, columns) * (1 if scale is None else scale)
    return {"y": y + (0 if bias is None else bias)}


def _scale_backward(dy: Wide, scale: Wide, columns: int, **_: Any) -> dict[str, Any]:
    return {"dx": dy.reshape(-1, columns) * scale}


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


def _copy_columns(
    x: Any, y: Any, width: int, x_columns: int, x_first: int, y_columns: int, y_first: int, **_: Any
) -> dict[str, Any]:
    new = y.reshape(-1, y_columns).copy()
    new[:, y_first : y_first + width] = x.reshape(-1, x_columns)[:, x_first : x_first + width]
    return {"y": new}


ROWS = (
    Kernel(
        "scale_forward",
        "channels.cu",
        (
            reads("x", "rows*columns"),
            reads("scale", "columns", optional=True),
            reads("bias", "columns", optional=True),
            writes("y", "rows*columns"),
            scalar("rows"),
            scalar("columns", "i4"),
        ),
        over("rows*columns"),
        _scale_forward,
        bytes_each=8,
        in_place=(("x", "y"),),
    ),
    Kernel(
        "scale_backward",
        "channels.cu",
        (
            reads("dy", "rows*columns"),
            reads("scale", "columns"),
            writes("dx", "rows*columns"),
            scalar("rows"),
            scalar("columns", "i4"),
        ),
        over("rows*columns"),
        _scale_backward,
        bytes_each=8,
        in_place=(("dy", "dx"),),
    ),
    Kernel(
        "column_partials",
        "channels.cu",
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
        "channels.cu",
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
    Kernel(
        "copy_columns",
        "channels.cu",
        (
            reads("x", "rows*x_columns"),
            changes("y", "rows*y_columns"),
            scalar("rows"),
            scalar("width", "i4"),
            scalar("x_columns", "i4"),
            scalar("x_first", "i4"),
            scalar("y_columns", "i4"),
            scalar("y_first", "i4"),
        ),
        over("rows*width"),
        _copy_columns,
        bytes_each=8,
        tolerance=EXACT,
    ),
)
