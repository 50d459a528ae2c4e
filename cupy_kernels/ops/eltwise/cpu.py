"""Blobs combined element by element, on the host."""

from collections.abc import Sequence

import numpy as np

from cupy_kernels.types import Array, Kept
from cupy_kernels.workspace import Workspace


def accumulate(x: Array, total: Array, factor: float = 1.0) -> None:
    """total += factor * x; both have the same size."""
    np.add(total, x if factor == 1.0 else np.float32(factor) * x, out=total)


def weighted_sum(parts: Sequence[Array], factors: Sequence[float], work: Workspace) -> Array:
    """The sum of factor * part."""
    y = work.take("y", parts[0].shape)
    if factors[:2] == [1.0, 1.0]:
        np.add(parts[0], parts[1], out=y)
        parts, factors = parts[1:], factors[1:]
    else:
        np.multiply(parts[0], np.float32(factors[0]), out=y)
    for part, factor in zip(parts[1:], factors[1:], strict=True):
        accumulate(part, y, factor)
    return y


def weighted_sum_backward(dy: Array, factor: float, index: int, work: Workspace) -> Array:
    """The gradient by one part: factor * dy, and dy itself for a factor of 1."""
    if factor == 1.0:
        return dy
    return np.multiply(dy, np.float32(factor), out=work.take(f"d{index}", dy.shape))


def product(parts: Sequence[Array], work: Workspace) -> Array:
    """The product of all parts, at least two."""
    y = np.multiply(parts[0], parts[1], out=work.take("y", parts[0].shape))
    for part in parts[2:]:
        np.multiply(y, part, out=y)
    return y


def product_backward(dy: Array, parts: Sequence[Array], index: int, work: Workspace) -> Array:
    """The gradient by one part: dy times all other parts. It divides by none, so zeros are safe."""
    dx = work.take(f"d{index}", dy.shape)
    np.copyto(dx, dy)
    for number, part in enumerate(parts):
        if number != index:
            np.multiply(dx, part, out=dx)
    return dx


def quotient(a: Array, b: Array, work: Workspace) -> Array:
    """a / b, and 0 where b is 0."""
    return np.divide(a, b, where=b != 0, out=work.zeros("y", a.shape))


def maximum(parts: Sequence[Array], work: Workspace) -> tuple[Array, Kept]:
    """The maximum of up to 256 parts, and the values for `maximum_backward`; the first tie wins."""
    y = work.take("y", parts[0].shape)
    origin = work.take_as("from", y.shape, np.uint8)
    np.copyto(y, parts[0])
    origin.fill(0)
    for number, part in enumerate(parts[1:], 1):
        greater = ~(part <= y) & ~np.isnan(y)  # NaN is greater than all numbers
        np.copyto(y, part, where=greater)
        np.copyto(origin, np.uint8(number), where=greater)
    return y, (origin,)


def maximum_backward(dy: Array, saved: Kept, index: int, work: Workspace) -> Array:
    """dy where this part was the maximum, 0 elsewhere."""
    dx = work.take(f"d{index}", dy.shape)
    np.multiply(dy, saved[0] == index, out=dx)
    return dx
