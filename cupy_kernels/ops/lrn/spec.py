"""Rows of `lrn.cu`: local response normalisation across channels and within one."""

from typing import Any

import numpy as np

from cupy_kernels.kernel_spec import (
    MOST_BLOCKS,
    Dim3,
    Geometry,
    Kernel,
    Sizes,
    Tolerance,
    over,
    reads,
    scalar,
    writes,
)
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


_BLOB = "pixels*channels"
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
_CLOSE = Tolerance(1e-5, 2e-6)


ROWS = (
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
