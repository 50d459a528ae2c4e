"""Rows of `batch_norm.cu`."""

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
from cupy_kernels.ops.reduction.column_sums_spec import chunks
from cupy_kernels.types import Wide


def _sums(terms: tuple[Wide, Wide], rows: int) -> Wide:
    """The partial sums, an array [2][chunk][channel]."""
    chunk_rows = -(-rows // chunks(rows))
    return np.array(
        [
            [t[k * chunk_rows : (k + 1) * chunk_rows].sum(axis=0) for k in range(chunks(rows))]
            for t in terms
        ]
    )


def _moments(x: Wide, rows: int, channels: int, **_: Any) -> dict[str, Any]:
    x = x.reshape(rows, channels)
    d = x - x[0] if rows else x
    return {"partials": _sums((d, d**2), rows)}


def _statistics(x: Wide, partials: Wide, rows: int, channels: int, **a: Any) -> dict[str, Any]:
    shifted, squares = partials.reshape(2, a["chunks"], channels).sum(axis=1) / rows
    mean, variance = x[:channels] + shifted, np.maximum(squares - shifted**2, 0)
    outputs = {"mean": mean, "deviate": 1 / np.sqrt(variance + float(a["epsilon"]))}
    if a["running_mean"] is None:
        return outputs
    keep, unbiased = float(a["fraction"]), rows / max(rows - 1, 1)
    return outputs | {
        "running_mean": keep * a["running_mean"] + mean,
        "running_variance": keep * a["running_variance"] + unbiased * variance,
        "running_factor": keep * a["running_factor"] + 1,
    }


def _running(
    running_mean: Wide, running_variance: Wide, running_factor: Wide, epsilon: Any, **_: Any
) -> dict[str, Any]:
    factor = 0 if running_factor[0] == 0 else 1 / running_factor[0]
    return {
        "mean": factor * running_mean,
        "deviate": 1 / np.sqrt(factor * running_variance + float(epsilon)),
    }


def _forward(
    x: Wide, mean: Wide, deviate: Wide, scale: Any, shift: Any, channels: int, **_: Any
) -> dict[str, Any]:
    y = (x.reshape(-1, channels) - mean) * deviate
    y = y if scale is None else y * scale
    return {"y": y if shift is None else y + shift}


def _gradients(
    dy: Wide, x: Wide, mean: Wide, deviate: Wide, rows: int, channels: int, **_: Any
) -> dict[str, Any]:
    dy, x = dy.reshape(rows, channels), x.reshape(rows, channels)
    return {"partials": _sums((dy, dy * (x - mean) * deviate), rows)}


def _backward(dy: Wide, x: Wide, rows: int, channels: int, **a: Any) -> dict[str, Any]:
    dy, xhat = dy.reshape(-1, channels), (x.reshape(-1, channels) - a["mean"]) * a["deviate"]
    scale = 1 if a["scale"] is None else a["scale"]
    means = (a["shift_sum"] + xhat * a["scale_sum"]) / max(rows, 1)
    return {"dx": scale * a["deviate"] * (dy - means)}


_MATRIX = "rows*channels"
_SHAPE = (scalar("rows"), scalar("channels", "i4"))
_CLOSE = Tolerance(1e-5, 2e-6)
_SUMMED = Tolerance(1e-5, 2e-5)


def _partials(sizes: Sizes) -> int:
    return 2 * chunks(sizes["rows"]) * sizes["channels"]


def _chunk_grid(sizes: Sizes) -> Dim3:
    return -(-sizes["channels"] // 32), chunks(sizes["rows"]), 1


ROWS = (
    Kernel(
        "batch_norm_moments",
        "batch_norm.cu",
        (reads("x", _MATRIX), writes("partials", _partials), *_SHAPE),
        Geometry((32, 8, 1), _chunk_grid),
        _moments,
        bytes_each=4,
        tolerance=_SUMMED,
    ),
    Kernel(
        "batch_norm_statistics",
        "batch_norm.cu",
        (
            reads("x", "channels"),
            reads("partials", "2*chunks*channels"),
            writes("mean", "channels"),
            writes("deviate", "channels"),
            changes("running_mean", "channels", optional=True),
            changes("running_variance", "channels", optional=True),
            changes("running_factor", "1", optional=True),
            scalar("fraction", "f4"),
            scalar("epsilon", "f4"),
            scalar("rows"),
            scalar("chunks", "i4"),
            scalar("channels", "i4"),
        ),
        over("channels"),
        _statistics,
        bytes_each=8,
        tolerance=_CLOSE,
    ),
    Kernel(
        "batch_norm_running",
        "batch_norm.cu",
        (
            reads("running_mean", "channels"),
            reads("running_variance", "channels"),
            reads("running_factor", "1"),
            writes("mean", "channels"),
            writes("deviate", "channels"),
            scalar("epsilon", "f4"),
            scalar("channels", "i4"),
        ),
        over("channels"),
        _running,
        bytes_each=16,
        tolerance=_CLOSE,
    ),
    Kernel(
        "batch_norm_forward",
        "batch_norm.cu",
        (
            reads("x", _MATRIX),
            reads("mean", "channels"),
            reads("deviate", "channels"),
            reads("scale", "channels", optional=True),
            reads("shift", "channels", optional=True),
            writes("y", _MATRIX),
            *_SHAPE,
        ),
        over(_MATRIX),
        _forward,
        bytes_each=8,
        tolerance=_CLOSE,
        in_place=(("x", "y"),),
    ),
    Kernel(
        "batch_norm_gradients",
        "batch_norm.cu",
        (
            reads("dy", _MATRIX),
            reads("x", _MATRIX),
            reads("mean", "channels"),
            reads("deviate", "channels"),
            writes("partials", _partials),
            *_SHAPE,
        ),
        Geometry((32, 8, 1), _chunk_grid),
        _gradients,
        bytes_each=8,
        tolerance=_SUMMED,
    ),
    Kernel(
        "batch_norm_backward",
        "batch_norm.cu",
        (
            reads("dy", _MATRIX),
            reads("x", _MATRIX),
            reads("mean", "channels"),
            reads("deviate", "channels"),
            reads("scale", "channels", optional=True),
            reads("shift_sum", "channels"),
            reads("scale_sum", "channels"),
            writes("dx", _MATRIX),
            *_SHAPE,
        ),
        over(_MATRIX),
        _backward,
        bytes_each=12,
        tolerance=_SUMMED,
        in_place=(("dy", "dx"),),
    ),
)
