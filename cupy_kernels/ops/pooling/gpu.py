"""Pooling in kernels; a maximum's position is kept in a byte, or in two for large windows."""

from typing import Any

import numpy as np

from cupy_kernels.launch import launch
from cupy_kernels.ops.dropout.gpu import random_key
from cupy_kernels.ops.dropout.rng_keys import RngKey
from cupy_kernels.ops.pooling.window import Pooling
from cupy_kernels.types import Array, Kept
from cupy_kernels.workspace import Workspace

BYTE_CELLS = 256


def max_forward(x: Array, shape: Pooling, work: Workspace) -> tuple[Array, Kept]:
    suffix, kind = _offsets(shape)
    sizes = _numbers(x.shape, shape)
    y = _output("y", x, sizes, work)
    where = work.take_as(f"where{suffix}", y.shape, kind, x)
    launch(f"max_pool_forward{suffix}", x=x, y=y, where=where, **sizes)
    return y, (where,)


def max_backward(
    dy: Array, where: Kept, x_shape: tuple[int, ...], shape: Pooling, work: Workspace
) -> Array:
    suffix, _ = _offsets(shape)
    dx = work.take("dx", x_shape, dy)
    sizes = _numbers(x_shape, shape)
    launch(f"max_pool_backward{suffix}", dy=dy, where=where[0], dx=dx, **sizes)
    return dx


def average_forward(x: Array, shape: Pooling, work: Workspace) -> Array:
    sizes = _numbers(x.shape, shape)
    y = _output("y", x, sizes, work)
    launch("average_pool_forward", x=x, y=y, **sizes)
    return y


def average_backward(dy: Array, x_shape: tuple[int, ...], shape: Pooling, work: Workspace) -> Array:
    dx = work.take("dx", x_shape, dy)
    launch("average_pool_backward", dy=dy, dx=dx, **_numbers(x_shape, shape))
    return dx


def stochastic_forward(
    x: Array, shape: Pooling, draw: RngKey, work: Workspace
) -> tuple[Array, Kept]:
    sizes = _numbers(x.shape, shape)
    y = _output("y", x, sizes, work)
    where = work.take_as("where_wide", y.shape, np.uint16, x)
    key = random_key(x, draw, work)
    launch("stochastic_pool_forward", x=x, y=y, where=where, **key, **sizes)
    return y, (where,)


def stochastic_backward(
    dy: Array, where: Kept, x_shape: tuple[int, ...], shape: Pooling, work: Workspace
) -> Array:
    dx, sizes = work.take("dx", x_shape, dy), _numbers(x_shape, shape)
    launch("max_pool_backward_wide", dy=dy, where=where[0], dx=dx, **sizes)
    return dx


def _output(role: str, x: Array, sizes: dict[str, Any], work: Workspace) -> Array:
    return work.take(role, (sizes["n"], sizes["oh"], sizes["ow"], sizes["c"]), x)


def _offsets(shape: Pooling) -> tuple[str, Any]:
    wide = shape.kernel[0] * shape.kernel[1] > BYTE_CELLS
    return ("_wide", np.uint16) if wide else ("", np.uint8)


def _numbers(x_shape: tuple[int, ...], shape: Pooling) -> dict[str, Any]:
    n, h, w, c = x_shape
    (oh, ow), (kh, kw) = shape.output(h, w), shape.kernel
    (sh, sw), (ph, pw) = shape.stride, shape.pad
    sizes = {"n": n, "h": h, "w": w, "c": c, "oh": oh, "ow": ow}
    return sizes | {"kh": kh, "kw": kw, "sh": sh, "sw": sw, "ph": ph, "pw": pw}
