"""Reductions along rows on the host; sums are in float64."""

import numpy as np

from cupy_kernels.ops.reduction.spec import Term
from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace


def row_sums(x: Array, term: Term, factor: float, work: Workspace) -> Array:
    """(rows,): factor times the sum of each row's terms."""
    sums = work.take("sums", x.shape[:1])
    wide = _terms(x, term).sum(axis=1, dtype=np.float64)
    np.multiply(wide, factor, out=sums, casting="same_kind")
    return sums


def row_sums_backward(dy: Array, x: Array, term: Term, factor: float, work: Workspace) -> Array:
    """dx (rows, width) for dy (rows,); the derivative of a magnitude at 0 is 0."""
    dx = work.take("dx", x.shape)
    spread = np.float32(factor) * dy[:, None]
    if term == Term.VALUES:
        np.copyto(dx, spread)
        return dx
    if term == Term.MAGNITUDES:
        np.sign(x, out=dx)
    else:
        np.multiply(x, np.float32(2), out=dx)
    np.multiply(dx, spread, out=dx)
    return dx


def row_largest(x: Array, count: int, work: Workspace) -> tuple[Array, Array]:
    """(places, values) of the `count` largest of each row, (rows, count) each, as float32.

    The largest is first. Of equal values the last place is first. NaN is below all numbers.
    """
    rows, width = x.shape
    order = width - 1 - np.argsort(-x[:, ::-1], axis=1, kind="stable")[:, :count]
    positions, values = (work.take(role, (rows, count)) for role in ("places", "values"))
    np.copyto(positions, order)
    np.copyto(values, np.take_along_axis(x, order, axis=1))
    return positions, values


def _terms(x: Array, term: Term) -> Array:
    if term == Term.VALUES:
        return x
    return np.abs(x) if term == Term.MAGNITUDES else np.square(x)
