"""Rows of `channels.cu`: scale and bias by channel, and copied columns."""

from typing import Any

from cupy_kernels.kernel_spec import (
    EXACT,
    Kernel,
    changes,
    over,
    reads,
    scalar,
    writes,
)
from cupy_kernels.types import Wide


def _scale_forward(
    x: Wide, scale: Wide | None, bias: Wide | None, columns: int, **_: Any
) -> dict[str, Any]:
    y = x.reshape(-1, columns) * (1 if scale is None else scale)
    return {"y": y + (0 if bias is None else bias)}


def _scale_backward(dy: Wide, scale: Wide, columns: int, **_: Any) -> dict[str, Any]:
    return {"dx": dy.reshape(-1, columns) * scale}


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
