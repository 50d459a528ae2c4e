"""Rows of `convolution.cu`: convolution and inner product, and the sums that end their gradients.

Arithmetic bounds these kernels; `bytes_each` is one read or write of one output element. The
references of the tf32 and bf16 kernels round both operands as the kernels say they do.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from cupy_kernels import reference
from cupy_kernels.kernel import (
    Dim3,
    Geometry,
    Kernel,
    Parameter,
    Sizes,
    Tolerance,
    over,
    reads,
    scalar,
    writes,
)
from cupy_kernels.types import Wide

SHAPE = (
    *("n", "h", "w", "c", "o", "kh", "kw", "sh", "sw"),
    *("ph", "pw", "dh", "dw", "oh", "ow", "groups"),
)
TILE = 64
SIGNIFICANT_BITS = {"tf32": 11, "bf16": 8}

# Sums of up to a few hundred products, accumulated in float32.
SUMMED = Tolerance(2e-5, 5e-5)

Round = Callable[[Wide], Wide]


def rounded(x: Wide, kind: str) -> Wide:
    """x with tf32's or bf16's significand: ties away from zero, or to even."""
    if kind == "fp32":
        return x
    fraction, exponent = np.frexp(x)
    scaled = np.ldexp(fraction, SIGNIFICANT_BITS[kind])
    away = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled)
    whole = away if kind == "tf32" else np.rint(scaled)
    return np.asarray(np.ldexp(whole, exponent - SIGNIFICANT_BITS[kind]))


def _first(x: Wide, shape: Any, channels: str) -> Wide:
    """Channels-last as the reference's channels-first."""
    height, width = ("oh", "ow") if channels == "o" else ("h", "w")
    images = x.reshape(shape["n"], shape[height], shape[width], shape[channels])
    return images.transpose(0, 3, 1, 2)


def _filters(weight: Wide, shape: Any) -> Wide:
    return weight.reshape(shape["o"], -1, shape["kh"], shape["kw"])


def _rules(s: Any) -> tuple[Any, ...]:
    return (s["sh"], s["sw"]), (s["ph"], s["pw"]), (s["dh"], s["dw"]), s["groups"]


def _forward(kind: str) -> Callable[..., dict[str, Any]]:
    def expected(x: Wide, weight: Wide, bias: Any, relu: int, **shape: Any) -> dict[str, Any]:
        images, filters = rounded(x, kind), _filters(rounded(weight, kind), shape)
        y = reference.convolution(_first(images, shape, "c"), filters, bias, *_rules(shape))
        y = y.transpose(0, 2, 3, 1)
        return {"y": np.maximum(y, 0) if relu else y}

    return expected


def _data(kind: str) -> Callable[..., dict[str, Any]]:
    def expected(dy: Wide, weight: Wide, mask: Any, **shape: Any) -> dict[str, Any]:
        images = np.zeros((shape["n"], shape["c"], shape["h"], shape["w"]))
        filters = _filters(rounded(weight, kind), shape)
        gradient = _first(rounded(dy, kind), shape, "o")
        dx, _, _ = reference.convolution_backward(gradient, images, filters, *_rules(shape))
        dx = dx.transpose(0, 2, 3, 1)
        return {"dx": dx if mask is None else dx * (mask.reshape(dx.shape) > 0)}

    return expected


def _weight(kind: str) -> Callable[..., dict[str, Any]]:
    """The partial sums are the kernel's own affair but for their number: pixels in equal parts."""

    def expected(x: Wide, dy: Wide, splits: int, **shape: Any) -> dict[str, Any]:
        images = _first(rounded(x, kind), shape, "c")
        gradient = rounded(dy, kind).reshape(-1, shape["o"])
        each = -(-len(gradient) // (16 * splits)) * 16
        filters = np.zeros((shape["o"], shape["c"] // shape["groups"], shape["kh"], shape["kw"]))
        parts = []
        for split in range(splits):
            part = np.zeros_like(gradient)
            chosen = slice(split * each, (split + 1) * each)
            part[chosen] = gradient[chosen]
            dy_part = _first(part, shape, "o")
            parts.append(
                reference.convolution_backward(dy_part, images, filters, *_rules(shape))[1]
            )
        return {"parts": np.stack(parts)}

    return expected


def _sum_splits(parts: Wide, n: int, splits: int, **_: Any) -> dict[str, Any]:
    return {"y": parts.reshape(-1)[: n * splits].reshape(splits, n).sum(axis=0)}


def _column_sums(x: Wide, rows: int, columns: int, splits: int, **_: Any) -> dict[str, Any]:
    each = -(-rows // splits)
    wide = x.reshape(rows, columns)
    sums = [wide[s * each : (s + 1) * each].sum(axis=0) for s in range(splits)]
    return {"parts": np.stack(sums)}


def weight_size(sizes: Sizes) -> int:
    """Elements of a weight tensor in Caffe's order."""
    return sizes["o"] * (sizes["c"] // sizes["groups"]) * sizes["kh"] * sizes["kw"]


def _tiles(count: int) -> int:
    return -(-count // TILE)


def _forward_grid(s: Sizes) -> Dim3:
    return _tiles(s["n"] * s["oh"] * s["ow"]), _tiles(s["o"] // s["groups"]), s["groups"]


def _data_grid(s: Sizes) -> Dim3:
    return _tiles(s["n"] * s["h"] * s["w"]), _tiles(s["c"] // s["groups"]), s["groups"]


def _weight_grid(s: Sizes) -> Dim3:
    columns = s["c"] // s["groups"] * s["kh"] * s["kw"]
    return _tiles(s["o"] // s["groups"]), _tiles(columns), s["groups"] * s["splits"]


def _row(
    name: str,
    arrays: tuple[Parameter, ...],
    last: tuple[str, ...],
    grid: Callable[[Sizes], Dim3],
    expected: Callable[..., dict[str, Any]],
) -> Kernel:
    scalars = tuple(scalar(one, "i4") for one in SHAPE + last)
    return Kernel(
        name,
        "convolution.cu",
        (*arrays, *scalars),
        Geometry((128, 1, 1), grid),
        expected,
        bytes_each=4,
        tolerance=SUMMED,
    )


def _rows(kind: str) -> tuple[Kernel, ...]:
    weight = reads("weight", weight_size)
    x, dy = reads("x", "n*h*w*c"), reads("dy", "n*oh*ow*o")
    bias, mask = reads("bias", "o", optional=True), reads("mask", "n*h*w*c", optional=True)
    y, dx = writes("y", "n*oh*ow*o"), writes("dx", "n*h*w*c")
    parts = writes("parts", lambda s: s["splits"] * weight_size(s))
    forward, data, weights = _forward(kind), _data(kind), _weight(kind)
    return (
        _row(f"conv_forward_{kind}", (x, weight, bias, y), ("relu",), _forward_grid, forward),
        _row(f"conv_data_{kind}", (dy, weight, mask, dx), (), _data_grid, data),
        _row(f"conv_weight_{kind}", (x, dy, parts), ("splits",), _weight_grid, weights),
    )


ROWS = (
    *_rows("fp32"),
    *_rows("tf32"),
    *_rows("bf16"),
    Kernel(
        "sum_splits",
        "convolution.cu",
        (reads("parts", "splits*n"), writes("y", "n"), scalar("n"), scalar("splits")),
        over("n"),
        _sum_splits,
        bytes_each=8,
    ),
    Kernel(
        "column_sums",
        "convolution.cu",
        (
            reads("x", "rows*columns"),
            writes("parts", "splits*columns"),
            scalar("rows"),
            scalar("columns"),
            scalar("splits"),
        ),
        Geometry((256, 1, 1), lambda s: (-(-s["columns"] // 256), s["splits"], 1)),
        _column_sums,
        bytes_each=4,
        tolerance=SUMMED,
    ),
)
