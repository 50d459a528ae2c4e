"""Mean-variance normalisation of rows on the host; means are in float64."""

import numpy as np

from cupy_kernels.types import Array, Kept, Wide
from cupy_kernels.workspace import Workspace


def forward(x: Array, epsilon: float | None, work: Workspace) -> tuple[Array, Kept]:
    """y of x's shape, and the values for `backward`."""
    y = np.subtract(x, _means(x), out=work.take("y", x.shape), casting="same_kind")
    if epsilon is None:
        return y, ()
    deviation = np.sqrt(_means(np.square(y)))
    np.divide(y, deviation + epsilon, out=y, casting="same_kind")
    return y, (y, deviation)


def backward(dy: Array, saved: Kept, epsilon: float | None, work: Workspace) -> Array:
    """dx; a row without variance gets the first term only."""
    dx = np.subtract(dy, _means(dy), out=work.take("dx", dy.shape), casting="same_kind")
    if epsilon is None:
        return dx
    y, deviation = saved
    np.divide(dx, deviation + epsilon, out=dx, casting="same_kind")
    inner = _means(dy * y) / np.where(deviation > 0, deviation, np.inf)
    np.subtract(dx, y * inner, out=dx, casting="same_kind")
    return dx


def _means(x: Array) -> Wide:
    return np.asarray(x.mean(axis=1, keepdims=True, dtype=np.float64))
