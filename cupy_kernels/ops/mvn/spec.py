"""Rows of `mvn.cu`: mean-variance normalisation of rows."""

from typing import Any

import numpy as np

from cupy_kernels.kernel_spec import (
    Kernel,
    over,
    reads,
    scalar,
    writes,
)
from cupy_kernels.types import Wide


def _mvn_forward(
    x: Wide, mean: Wide | None, variance: Wide | None, epsilon: Any, rows: int, width: int, **_: Any
) -> dict[str, Any]:
    y = x.reshape(rows, width) - (0 if mean is None else mean[:, None])
    return {"y": y / (1 if variance is None else np.sqrt(variance[:, None]) + float(epsilon))}


def _mvn_backward(
    dy: Wide, y: Wide, mean: Wide, inner: Wide, variance: Wide, epsilon: Any, width: int, **_: Any
) -> dict[str, Any]:
    deviation = np.repeat(np.sqrt(variance), width)
    along = np.divide(y * np.repeat(inner, width), deviation, where=deviation > 0, out=0 * y)
    return {"dx": (dy - np.repeat(mean, width)) / (deviation + float(epsilon)) - along}


ROWS = (
    Kernel(
        "mvn_forward",
        "mvn.cu",
        (
            reads("x", "rows*width"),
            reads("mean", "rows", optional=True),
            reads("variance", "rows", optional=True),
            writes("y", "rows*width"),
            scalar("epsilon", "f4"),
            scalar("rows"),
            scalar("width"),
        ),
        over("rows*width"),
        _mvn_forward,
        bytes_each=8,
        in_place=(("x", "y"),),
    ),
    Kernel(
        "mvn_backward",
        "mvn.cu",
        (
            reads("dy", "rows*width"),
            reads("y", "rows*width"),
            reads("mean", "rows"),
            reads("inner", "rows"),
            reads("variance", "rows"),
            writes("dx", "rows*width"),
            scalar("epsilon", "f4"),
            scalar("rows"),
            scalar("width"),
        ),
        over("rows*width"),
        _mvn_backward,
        bytes_each=12,
        in_place=(("dy", "dx"),),
    ),
)
