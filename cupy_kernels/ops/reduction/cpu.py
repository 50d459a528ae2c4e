"""Reductions along rows on the host; sums are in float64."""

import numpy as np

from cupy_kernels.ops.reduction.spec import MAGNITUDES, VALUES
from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace


def row_sums(x: Array, term: int, factor: float, work: Workspace) -> Array:
    sums = work.take("sums", x.shape[:1])
    wide = _terms(x, term).sum(axis=1, dtype=np.float64)
    np.multiply(wide, factor, out=sums, casting="same_kind")
    return sums


def row_sums_backward(dy: Array, x: Array, term: int, factor: float, work: Workspace) -> Array:
    dx = work.take("dx", x.shape)
    spread = np.float32(factor) * dy[:, None]
    if term == VALUES:
        np.copyto(dx, spread)
        return dx
    if term == MAGNITUDES:
        np.sign(x, out=dx)
    else:
        np.multiply(x, np.float32(2), out=dx)
    np.multiply(dx, spread, out=dx)
    return dx


def row_largest(x: Array, count: int, work: Workspace) -> tuple[Array, Array]:
    rows, width = x.shape
    order = width - 1 - np.argsort(-x[:, ::-1], axis=1, kind="stable")[:, :count]
    positions, values = (work.take(role, (rows, count)) for role in ("places", "values"))
    np.copyto(positions, order)
    np.copyto(values, np.take_along_axis(x, order, axis=1))
    return positions, values


def _terms(x: Array, term: int) -> Array:
    if term == VALUES:
        return x
    return np.abs(x) if term == MAGNITUDES else np.square(x)
