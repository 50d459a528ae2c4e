"""Blobs combined element by element, in kernels, two at a time."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupy_kernels import backends
from cupy_kernels.launch import launch
from cupy_kernels.types import Array, Kept
from cupy_kernels.workspace import Workspace


def accumulate(x: Array, total: Array, factor: float = 1.0) -> None:
    launch("add_scaled", x=x, y=total, a=factor, b=1.0, n=x.size)


def weighted_sum(parts: Sequence[Array], factors: Sequence[float], work: Workspace) -> Array:
    y = work.take("y", parts[0].shape, parts[0])
    for number, (part, factor) in enumerate(zip(parts, factors, strict=True)):
        launch("add_scaled", x=part, y=y, a=factor, b=float(number > 0), n=y.size)
    return y


def weighted_sum_backward(dy: Array, factor: float, index: int, work: Workspace) -> Array:
    if factor == 1.0:
        return dy
    dx = work.take(f"d{index}", dy.shape, dy)
    launch("add_scaled", x=dy, y=dx, a=factor, b=0.0, n=dy.size)
    return dx


def product(parts: Sequence[Array], work: Workspace) -> Array:
    y = work.take("y", parts[0].shape, parts[0])
    factor = parts[0]
    for part in parts[1:]:
        launch("multiply", a=factor, b=part, y=y, n=y.size)
        factor = y
    return y


def product_backward(dy: Array, parts: Sequence[Array], index: int, work: Workspace) -> Array:
    dx, factor = work.take(f"d{index}", dy.shape, dy), dy
    for number, part in enumerate(parts):
        if number != index:
            launch("multiply", a=factor, b=part, y=dx, n=dx.size)
            factor = dx
    return dx


def quotient(a: Array, b: Array, work: Workspace) -> Array:
    y = work.take("y", a.shape, a)
    launch("quotient", a=a, b=b, y=y, n=y.size)
    return y


def maximum(parts: Sequence[Array], work: Workspace) -> tuple[Array, Kept]:
    y = work.take("y", parts[0].shape, parts[0])
    origin = work.take_as("from", y.shape, np.uint8, y)
    backends.copy(parts[0], y)
    origin.fill(0)
    for number, part in enumerate(parts[1:], 1):
        named: dict[str, Any] = {"x": part, "y": y, "from": origin}
        launch("keep_larger", number=number, n=y.size, **named)
    return y, (origin,)


def maximum_backward(dy: Array, saved: Kept, index: int, work: Workspace) -> Array:
    dx = work.take(f"d{index}", dy.shape, dy)
    named: dict[str, Any] = {"dy": dy, "from": saved[0], "dx": dx}
    launch("keep_larger_backward", number=index, n=dy.size, **named)
    return dx
