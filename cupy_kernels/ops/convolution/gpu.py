"""Convolution in kernels: an implicit matrix product each way, see `convolution.cu`."""

from math import prod
from typing import Any

from cupy_kernels.launch import launch
from cupy_kernels.ops.convolution.spec import TILE
from cupy_kernels.ops.convolution.window import Convolution
from cupy_kernels.ops.reduction.gpu import sum_columns
from cupy_kernels.types import Array, Kept
from cupy_kernels.workspace import Workspace

# The weight's gradient is split along its sum until it has this many tiles, if each part keeps
# enough pixels for a tile. It depends on the sizes alone, so all devices give the same result.
BLOCKS, PART_PIXELS = 264, 256

# From this number of pixels on, weights with a multiple of four channels are first reordered so
# that each four are adjacent: one more launch, and a quarter of the reads in every block. The
# number is an estimate, not a measurement.
PACKED_PIXELS = 8192


def forward(
    x: Array,
    weight: Array,
    bias: Array | None,
    shape: Convolution,
    work: Workspace,
    *,
    relu: bool = False,
) -> tuple[Array, Kept]:
    sizes = numbers(x.shape, len(weight), shape)
    read, packed = _as_read(weight, sizes, work)
    y = work.take("y", (sizes["n"], sizes["oh"], sizes["ow"], len(weight)), x)
    launch(
        f"conv_forward_{shape.precision}",
        x=x,
        weight=read,
        bias=bias,
        y=y,
        relu=int(relu),
        packed=packed,
        **sizes,
    )
    return y, (x, read, packed)


def backward(
    dy: Array,
    saved: Kept,
    x_shape: tuple[int, ...],
    weight: Array,
    dweight: Array | None,
    dbias: Array | None,
    shape: Convolution,
    work: Workspace,
    *,
    needs_dx: bool,
) -> Array | None:
    sizes, (x, read, packed) = numbers(x_shape, len(weight), shape), saved
    if dbias is not None:
        sum_columns(dy.reshape(-1, len(weight)), None, dbias, work)
    if dweight is not None:
        kernel = f"conv_backward_weight_{shape.precision}"
        _weight_gradient(kernel, x, dy, dweight, sizes | {"packed": packed}, work)
    return _input_gradient(dy, x_shape, read, packed, shape, work) if needs_dx else None


def transpose(
    y: Array, x_shape: tuple[int, ...], weight: Array, shape: Convolution, work: Workspace
) -> Array:
    read, packed = _as_read(weight, numbers(x_shape, len(weight), shape), work)
    return _input_gradient(y, x_shape, read, packed, shape, work)


def _input_gradient(
    dy: Array,
    x_shape: tuple[int, ...],
    read: Array,
    packed: int,
    shape: Convolution,
    work: Workspace,
) -> Array:
    dx = work.take("dx", x_shape, dy)
    arrays: dict[str, Any] = {"dy": dy, "weight": read, "mask": None, "dx": dx, "packed": packed}
    launch(f"conv_backward_data_{shape.precision}", **arrays, **numbers(x_shape, len(read), shape))
    return dx


def numbers(x_shape: tuple[int, ...], outputs: int, shape: Convolution) -> dict[str, Any]:
    """The scalars that describe a convolution to its kernels."""
    n, h, w, c = x_shape
    (oh, ow), (kh, kw) = shape.output(h, w), shape.kernel
    (sh, sw), (ph, pw), (dh, dw) = shape.stride, shape.pad, shape.dilation
    sizes = {"n": n, "h": h, "w": w, "c": c, "o": outputs, "oh": oh, "ow": ow}
    rules = {"kh": kh, "kw": kw, "sh": sh, "sw": sw, "ph": ph, "pw": pw, "dh": dh, "dw": dw}
    return sizes | rules | {"groups": shape.group}


def _as_read(weight: Array, sizes: dict[str, Any], work: Workspace) -> tuple[Array, int]:
    """The weights in the order for the kernels, and whether they are packed."""
    channels, window = weight.shape[1], sizes["kh"] * sizes["kw"]
    pixels = sizes["n"] * sizes["oh"] * sizes["ow"]
    if window == 1 or channels % 4 or pixels < PACKED_PIXELS:
        return weight, 0
    packed = work.take("packed", weight.shape, weight)
    numbers = {"n": weight.size, "channels": channels, "window": window}
    launch("pack_weights", weight=weight, packed=packed, **numbers)
    return packed, 1


def _weight_gradient(
    kernel: str, x: Array, dy: Array, dweight: Array, sizes: dict[str, Any], work: Workspace
) -> None:
    """Write the weight's gradient into the arena, directly or as the ordered sum of its parts."""
    count, packed = _splits(sizes, dweight.shape), sizes["packed"]
    if count == 1 and not packed:
        launch(kernel, x=x, dy=dy, parts=dweight, splits=1, **sizes)
        return
    parts = work.take("parts", (count, *dweight.shape), x)
    launch(kernel, x=x, dy=dy, parts=parts, splits=count, **sizes)
    turned = (dweight.shape[1], sizes["kh"] * sizes["kw"]) if packed else (1, 1)
    launch(
        "sum_splits",
        parts=parts,
        y=dweight,
        n=dweight.size,
        splits=count,
        channels=turned[0],
        window=turned[1],
    )


def _splits(sizes: dict[str, Any], weight_shape: tuple[int, ...]) -> int:
    """The number of parts into which the sum over an output's pixels is split."""
    rows, columns = weight_shape[0] // sizes["groups"], prod(weight_shape[1:])
    tiles = -(-rows // TILE) * -(-columns // TILE) * sizes["groups"]
    pixels = sizes["n"] * sizes["oh"] * sizes["ow"]
    return int(max(1, min(BLOCKS // tiles, pixels // PART_PIXELS)))
