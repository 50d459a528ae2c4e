"""Rows of `lrn.cu`, `batch_norm.cu` and `mvn.cu`."""

from typing import Any

import numpy as np

from cupy_kernels.kernel_spec import (
    MOST_BLOCKS,
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


def tile_pixels(channels: int) -> int:
    """Pixels of one tile; the function of this name in lrn.cu."""
    return max(1, 2048 // channels)


def _tiles(arrays: int) -> Geometry:
    def grid(sizes: Sizes) -> Dim3:
        return min(-(-sizes["pixels"] // tile_pixels(sizes["channels"])), MOST_BLOCKS), 1, 1

    def shared_bytes(sizes: Sizes) -> int:
        return 4 * arrays * tile_pixels(sizes["channels"]) * sizes["channels"]

    return Geometry((256, 1, 1), grid, shared_bytes)


def _windows(values: Wide, size: int, axes: tuple[int, ...]) -> Wide:
    """The sum over the `size` elements around each, along each axis; zero outside."""
    for axis in axes:
        pad = [(size // 2, size // 2) if k == axis else (0, 0) for k in range(values.ndim)]
        slid = np.lib.stride_tricks.sliding_window_view(np.pad(values, pad), size, axis)
        values = slid.sum(axis=-1)
    return values


def _lrn(x: Wide, axes: tuple[int, ...], a: dict[str, Any]) -> tuple[Wide, Wide]:
    """(scale, y) of a blob with windows along `axes`."""
    scale = float(a.get("k", 1)) + float(a["share"]) * _windows(x**2, a["size"], axes)
    return scale, x * scale ** -float(a["beta"])


def _lrn_gradient(dy: Wide, x: Wide, scale: Wide, axes: tuple[int, ...], a: dict[str, Any]) -> Wide:
    share, beta = float(a["share"]), float(a["beta"])
    ratio = dy * x * scale ** (-beta - 1)
    return dy * scale**-beta - 2 * share * beta * x * _windows(ratio, a["size"], axes)


def _across_forward(x: Wide, channels: int, **a: Any) -> dict[str, Any]:
    return {"y": _lrn(x.reshape(-1, channels), (1,), a)[1]}


def _across_backward(dy: Wide, x: Wide, channels: int, **a: Any) -> dict[str, Any]:
    x = x.reshape(-1, channels)
    scale, _ = _lrn(x, (1,), a)
    return {"dx": _lrn_gradient(dy.reshape(x.shape), x, scale, (1,), a)}


def _within_forward(x: Wide, **a: Any) -> dict[str, Any]:
    scale, y = _lrn(x.reshape(a["n"], a["h"], a["w"], a["channels"]), (1, 2), a)
    return {"scale": scale, "y": y}


def _within_backward(dy: Wide, x: Wide, scale: Wide, **a: Any) -> dict[str, Any]:
    shape = (a["n"], a["h"], a["w"], a["channels"])
    dy, x, scale = (array.reshape(shape) for array in (dy, x, scale))
    return {"dx": _lrn_gradient(dy, x, scale, (1, 2), a)}


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


_BLOB, _MATRIX = "pixels*channels", "rows*channels"
_IMAGE = "n*h*w*channels"
_ACROSS = (
    scalar("pixels"),
    scalar("channels", "i4"),
    scalar("size", "i4"),
    scalar("share", "f4"),
    scalar("beta", "f4"),
    scalar("k", "f4"),
)
_WITHIN = (
    scalar("n"),
    *(scalar(name, "i4") for name in ("h", "w", "channels", "size")),
    scalar("share", "f4"),
    scalar("beta", "f4"),
)
_SHAPE = (scalar("rows"), scalar("channels", "i4"))
_CLOSE = Tolerance(1e-5, 2e-6)
_SUMMED = Tolerance(1e-5, 2e-5)


def _partials(sizes: Sizes) -> int:
    return 2 * chunks(sizes["rows"]) * sizes["channels"]


def _chunk_grid(sizes: Sizes) -> Dim3:
    return -(-sizes["channels"] // 32), chunks(sizes["rows"]), 1


LRN = (
    Kernel(
        "lrn_across_forward",
        "lrn.cu",
        (reads("x", _BLOB, align=16), writes("y", _BLOB, align=16), *_ACROSS),
        _tiles(1),
        _across_forward,
        bytes_each=8,
        tolerance=_CLOSE,
    ),
    Kernel(
        "lrn_across_backward",
        "lrn.cu",
        (
            reads("dy", _BLOB, align=16),
            reads("x", _BLOB, align=16),
            writes("dx", _BLOB, align=16),
            *_ACROSS,
        ),
        _tiles(3),
        _across_backward,
        bytes_each=12,
        tolerance=_CLOSE,
    ),
    Kernel(
        "lrn_within_forward",
        "lrn.cu",
        (reads("x", _IMAGE), writes("scale", _IMAGE), writes("y", _IMAGE), *_WITHIN),
        over(_IMAGE),
        _within_forward,
        bytes_each=12,
        tolerance=_CLOSE,
    ),
    Kernel(
        "lrn_within_backward",
        "lrn.cu",
        (
            reads("dy", _IMAGE),
            reads("x", _IMAGE),
            reads("scale", _IMAGE),
            writes("dx", _IMAGE),
            *_WITHIN,
        ),
        over(_IMAGE),
        _within_backward,
        bytes_each=16,
        tolerance=_CLOSE,
    ),
)

BATCH_NORM = (
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


MVN = (
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

ROWS = (*LRN, *BATCH_NORM, *MVN)
