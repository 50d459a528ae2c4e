"""Scale, bias, concatenation and splitting on the host."""

from collections.abc import Sequence

import numpy as np

from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace


def scale(x: Array, factors: Array | None, bias: Array | None, work: Workspace) -> Array:
    """x * factors + bias for x (..., c) and each (c,); either may be missing."""
    y = work.take("y", x.shape)
    np.copyto(y, x)
    if factors is not None:
        y *= factors
    if bias is not None:
        y += bias
    return y


def scale_backward(
    dy: Array,
    x: Array,
    factors: Array | None,
    dfactors: Array | None,
    dbias: Array | None,
    work: Workspace,
) -> Array:
    """dx (dy itself without factors); writes the gradients of factors and bias, if requested."""
    if dbias is not None:
        np.sum(dy.reshape(-1, dy.shape[-1]), axis=0, out=dbias)
    dx = work.take("dx", dy.shape)
    if dfactors is not None:
        np.multiply(dy, x, out=dx)
        np.sum(dx.reshape(-1, dy.shape[-1]), axis=0, out=dfactors)
    return dy if factors is None else np.multiply(dy, factors, out=dx)


def concatenate(parts: Sequence[Array], axis: int, work: Workspace) -> Array:
    """Blobs joined along an axis; they may differ in size along that axis only."""
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    return np.concatenate(parts, axis, out=work.take("y", tuple(shape)))


def split(x: Array, sizes: Sequence[int], axis: int, work: Workspace) -> list[Array]:
    """A blob split along an axis into contiguous blobs of the given sizes, which sum to its own."""
    parts = []
    for number, seen in enumerate(np.split(x, np.cumsum(sizes)[:-1], axis)):
        part = work.take(f"part{number}", seen.shape)
        np.copyto(part, seen)
        parts.append(part)
    return parts
