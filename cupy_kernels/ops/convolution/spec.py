"""Rows of `convolution.cu`: convolution and inner product, and the sums that end their gradients.

Arithmetic limits these kernels; `bytes_each` is one read or write of one output element. The
references of the tf32 and bf16 kernels round both operands as documented in the kernels.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from cupy_kernels.kernel_spec import (
    EXACT,
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
from cupy_kernels.ops.convolution import reference
from cupy_kernels.types import Wide

SHAPE = (
    *("n", "h", "w", "c", "o", "kh", "kw", "sh", "sw"),
    *("ph", "pw", "dh", "dw", "oh", "ow", "groups"),
)
TILE = 64
"""Rows and columns of a tile of medium size."""

THREADS, DEPTH = 256, 32
STAGES = {128: 3, 64: 4, 32: 4}
INDEX_BYTES = 128 * 16 + 128
ENOUGH_BLOCKS = 96
SIGNIFICANT_BITS = {"tf32": 11, "bf16": 8}

# Sums of up to a few hundred products, accumulated in float32.
SUMMED = Tolerance(2e-5, 5e-5)

Round = Callable[[Wide], Wide]


def round_to(x: Wide, kind: str) -> Wide:
    """x rounded to tf32 (ties away from zero) or bf16 (ties to even)."""
    if kind == "fp32":
        return x
    fraction, exponent = np.frexp(x)
    scaled = np.ldexp(fraction, SIGNIFICANT_BITS[kind])
    away = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled)
    whole = away if kind == "tf32" else np.rint(scaled)
    return np.asarray(np.ldexp(whole, exponent - SIGNIFICANT_BITS[kind]))


def _first(x: Wide, shape: Any, channels: str) -> Wide:
    """A channels-last blob as channels-first, for the reference."""
    height, width = ("oh", "ow") if channels == "o" else ("h", "w")
    images = x.reshape(shape["n"], shape[height], shape[width], shape[channels])
    return images.transpose(0, 3, 1, 2)


def _filters(weight: Wide, shape: Any) -> Wide:
    """The weights as (o, c / groups, kh, kw), from that order or from the packed one."""
    if shape["packed"]:
        return weight.reshape(shape["o"], shape["kh"], shape["kw"], -1).transpose(0, 3, 1, 2)
    return weight.reshape(shape["o"], -1, shape["kh"], shape["kw"])


def _rules(s: Any) -> tuple[Any, ...]:
    return (s["sh"], s["sw"]), (s["ph"], s["pw"]), (s["dh"], s["dw"]), s["groups"]


def _make_forward(kind: str) -> Callable[..., dict[str, Any]]:
    def evaluate(
        x: Wide, weight: Wide, bias: Any, relu: int, residual: Any, **shape: Any
    ) -> dict[str, Any]:
        images, filters = round_to(x, kind), _filters(round_to(weight, kind), shape)
        y = reference.convolution(_first(images, shape, "c"), filters, bias, *_rules(shape))
        y = y.transpose(0, 2, 3, 1)
        if residual is not None:
            y = y + residual.reshape(y.shape)
        return {"y": np.where(y <= 0, 0, y) if relu else y}

    return evaluate


def _make_data(kind: str) -> Callable[..., dict[str, Any]]:
    def evaluate(dy: Wide, weight: Wide, mask: Any, **shape: Any) -> dict[str, Any]:
        images = np.zeros((shape["n"], shape["c"], shape["h"], shape["w"]))
        filters = _filters(round_to(weight, kind), shape)
        gradient = _first(round_to(dy, kind), shape, "o")
        dx, _, _ = reference.convolution_backward(gradient, images, filters, *_rules(shape))
        dx = dx.transpose(0, 2, 3, 1)
        return {"dx": dx if mask is None else dx * (mask.reshape(dx.shape) > 0)}

    return evaluate


def _make_weight(kind: str) -> Callable[..., dict[str, Any]]:
    """The expected partial sums of the weight's gradient, over equal parts of the pixels."""

    def evaluate(x: Wide, dy: Wide, splits: int, **shape: Any) -> dict[str, Any]:
        images = _first(round_to(x, kind), shape, "c")
        gradient = round_to(dy, kind).reshape(-1, shape["o"])
        pixels_each = -(-len(gradient) // (DEPTH * splits)) * DEPTH
        filters = np.zeros((shape["o"], shape["c"] // shape["groups"], shape["kh"], shape["kw"]))
        parts = []
        for split in range(splits):
            part = np.zeros_like(gradient)
            chosen = slice(split * pixels_each, (split + 1) * pixels_each)
            part[chosen] = gradient[chosen]
            dy_part = _first(part, shape, "o")
            parts.append(
                reference.convolution_backward(dy_part, images, filters, *_rules(shape))[1]
            )
        filters = np.stack(parts)
        return {"parts": filters.transpose(0, 1, 3, 4, 2) if shape["packed"] else filters}

    return evaluate


def _sum_splits(
    parts: Wide, n: int, splits: int, channels: int, window: int, **_: Any
) -> dict[str, Any]:
    total = parts.reshape(-1)[: n * splits].reshape(splits, n).sum(axis=0)
    return {"y": total.reshape(-1, window, channels).transpose(0, 2, 1)}


def _pack_weights(weight: Wide, n: int, channels: int, window: int, **_: Any) -> dict[str, Any]:
    return {"packed": weight.reshape(-1)[:n].reshape(-1, channels, window).transpose(0, 2, 1)}


def weight_size(sizes: Sizes) -> int:
    """Elements of a weight tensor in Caffe's order."""
    return sizes["o"] * (sizes["c"] // sizes["groups"]) * sizes["kh"] * sizes["kw"]


def _forward(s: Sizes) -> Dim3:
    """Rows and columns of the product, and the number of such products."""
    return s["n"] * s["oh"] * s["ow"], s["o"] // s["groups"], s["groups"]


def _data(s: Sizes) -> Dim3:
    return s["n"] * s["h"] * s["w"], s["c"] // s["groups"], s["groups"]


def _weight(s: Sizes) -> Dim3:
    columns = s["c"] // s["groups"] * s["kh"] * s["kw"]
    return s["o"] // s["groups"], columns, s["groups"] * s["splits"]


def _tiles(rows: int, columns: int, side: int) -> int:
    return -(-rows // side) * -(-columns // side)


def side_of(rows: int, columns: int, layers: int) -> int:
    """The side of a product's tiles, by the rule of `chosen_side` in matrix_product.cuh."""
    least = min(rows, columns)
    if least > 64 and _tiles(rows, columns, 128) * layers >= ENOUGH_BLOCKS:
        return 128
    if least > 32 and _tiles(rows, columns, 64) * layers >= ENOUGH_BLOCKS:
        return 64
    return 32


def _geometry(product: Callable[[Sizes], Dim3]) -> Geometry:
    """A block for each tile, in rows of tiles; shared memory has the index, then the stages."""

    def side(sizes: Sizes) -> int:
        return sizes["side"] or side_of(*product(sizes))

    def grid(sizes: Sizes) -> Dim3:
        rows, columns, layers = product(sizes)
        return _tiles(rows, columns, side(sizes)), 1, layers

    def shared_bytes(sizes: Sizes) -> int:
        return INDEX_BYTES + STAGES[side(sizes)] * 2 * side(sizes) * DEPTH * 4

    return Geometry((THREADS, 1, 1), grid, shared_bytes)


def _row(
    name: str,
    arrays: tuple[Parameter, ...],
    last: tuple[Parameter, ...],
    product: Callable[[Sizes], Dim3],
    expected: Callable[..., dict[str, Any]],
) -> Kernel:
    """A row; two blocks a multiprocessor for tensor cores, one of 64 sums a thread in float32."""
    sizes = tuple(scalar(size_name, "i4") for size_name in SHAPE)
    return Kernel(
        name,
        "convolution.cu",
        (*arrays, *sizes, *last, scalar("packed", "i4", usual=0), scalar("side", "i4", usual=0)),
        _geometry(product),
        expected,
        bytes_each=4,
        tolerance=SUMMED,
        resident=THREADS if name.endswith("fp32") else 2 * THREADS,
    )


def _rows(kind: str) -> tuple[Kernel, ...]:
    weight = reads("weight", weight_size, align=16)
    x, dy = reads("x", "n*h*w*c", align=16), reads("dy", "n*oh*ow*o", align=16)
    bias, mask = (
        reads("bias", "o", optional=True),
        reads("mask", "n*h*w*c", align=16, optional=True),
    )
    y, dx = writes("y", "n*oh*ow*o", align=16), writes("dx", "n*h*w*c", align=16)
    residual = reads("residual", "n*oh*ow*o", align=16, optional=True)
    parts = writes("parts", lambda s: s["splits"] * weight_size(s), align=16)
    relu, splits = scalar("relu", "i4"), scalar("splits", "i4")
    expected = _make_forward(kind), _make_data(kind), _make_weight(kind)
    return (
        _row(
            f"conv_forward_{kind}",
            (x, weight, bias, y),
            (relu, residual),
            _forward,
            expected[0],
        ),
        _row(f"conv_backward_data_{kind}", (dy, weight, mask, dx), (), _data, expected[1]),
        _row(f"conv_backward_weight_{kind}", (x, dy, parts), (splits,), _weight, expected[2]),
    )


ROWS = (
    *_rows("fp32"),
    *_rows("tf32"),
    *_rows("bf16"),
    Kernel(
        "sum_splits",
        "convolution.cu",
        (
            reads("parts", "splits*n"),
            writes("y", "n"),
            scalar("n"),
            scalar("splits"),
            scalar("channels", "i4", usual=1),
            scalar("window", "i4", usual=1),
        ),
        over("n"),
        _sum_splits,
        bytes_each=8,
    ),
    Kernel(
        "pack_weights",
        "convolution.cu",
        (
            reads("weight", "n"),
            writes("packed", "n"),
            scalar("n"),
            scalar("channels", "i4"),
            scalar("window", "i4"),
        ),
        over("n"),
        _pack_weights,
        bytes_each=8,
        tolerance=EXACT,
    ),
)
