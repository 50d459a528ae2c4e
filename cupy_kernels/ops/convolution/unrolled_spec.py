"""Rows of `convolution_unrolled.cu`: windows as a matrix and back, and a plain matrix product."""

from itertools import product
from typing import Any

import numpy as np

from cupy_kernels.kernel_spec import Geometry, Kernel, Sizes, Tolerance, over, reads, scalar, writes
from cupy_kernels.kernel_spec import changes as partly_writes
from cupy_kernels.types import Wide

SHAPE = (*("n", "h", "w", "c", "kh", "kw", "sh", "sw"), *("ph", "pw", "dh", "dw", "oh", "ow"))
STRIDES = ("a_row", "a_step", "b_step", "b_column", "y_row")
SIDE = 16


def _pad(x: Wide, s: Any) -> Wide:
    """The images, padded so that every tap of every window is within them."""
    images = x.reshape(s["n"], s["h"], s["w"], s["c"])
    return np.pad(images, ((0, 0), (s["ph"],) * 2, (s["pw"],) * 2, (0, 0)))


def _taps(s: Any) -> Any:
    """(i, j) and the slices of the padded images that this tap of every window reads."""
    for i, j in product(range(s["kh"]), range(s["kw"])):
        top, x_start = i * s["dh"], j * s["dw"]
        down = slice(top, top + s["sh"] * (s["oh"] - 1) + 1, s["sh"])
        right = slice(x_start, x_start + s["sw"] * (s["ow"] - 1) + 1, s["sw"])
        yield i, j, (slice(None), down, right)


def im2col(x: Wide, **s: Any) -> dict[str, Any]:
    padded = _pad(x, s)
    columns = np.zeros((s["n"], s["oh"], s["ow"], s["c"], s["kh"], s["kw"]))
    for i, j, cells in _taps(s):
        columns[..., i, j] = padded[cells]
    return {"columns": columns}


def col2im(columns: Wide, **s: Any) -> dict[str, Any]:
    windows = columns.reshape(s["n"], s["oh"], s["ow"], s["c"], s["kh"], s["kw"])
    padded = _pad(np.zeros(s["n"] * s["h"] * s["w"] * s["c"]), s)
    for i, j, cells in _taps(s):
        padded[cells] += windows[..., i, j]
    return {"dx": padded[:, s["ph"] : s["ph"] + s["h"], s["pw"] : s["pw"] + s["w"]]}


def multiply_strided(a: Wide, b: Wide, y: Wide, **s: int) -> dict[str, Any]:
    i, j, k = (np.arange(s[name]) for name in ("rows", "columns", "depth"))
    factors = a.reshape(-1)[i[:, None] * s["a_row"] + k * s["a_step"]]
    right = b.reshape(-1)[k[:, None] * s["b_step"] + j * s["b_column"]]
    result = y.reshape(-1).copy()
    result[i[:, None] * s["y_row"] + j] = factors @ right
    return {"y": result}


def _reach(outer: str, outer_step: str, inner: str, inner_step: str) -> Any:
    """The number of elements up to the last one that a strided matrix uses."""

    def size(s: Sizes) -> int:
        if not s[outer] or not s[inner]:
            return 0
        step = s.get(inner_step, 1)
        return (s[outer] - 1) * s[outer_step] + (s[inner] - 1) * step + 1

    return size


_WINDOWS = "n*oh*ow*c*kh*kw"
_SCALARS = tuple(scalar(name, "i4") for name in SHAPE)

ROWS = (
    Kernel(
        "im2col",
        "convolution_unrolled.cu",
        (reads("x", "n*h*w*c"), writes("columns", _WINDOWS), *_SCALARS),
        over(_WINDOWS),
        im2col,
        bytes_each=4,
    ),
    Kernel(
        "col2im",
        "convolution_unrolled.cu",
        (reads("columns", _WINDOWS), writes("dx", "n*h*w*c"), *_SCALARS),
        over("n*h*w*c"),
        col2im,
        bytes_each=4,
    ),
    Kernel(
        "strided_product",
        "convolution_unrolled.cu",
        (
            reads("a", _reach("rows", "a_row", "depth", "a_step")),
            reads("b", _reach("depth", "b_step", "columns", "b_column")),
            partly_writes("y", _reach("rows", "y_row", "columns", "")),
            *(scalar(name) for name in ("rows", "columns", "depth", *STRIDES)),
        ),
        Geometry((SIDE, SIDE, 1), lambda s: (-(-s["columns"] // SIDE), -(-s["rows"] // SIDE), 1)),
        multiply_strided,
        bytes_each=4,
        tolerance=Tolerance(2e-5, 2e-5),
    ),
)
