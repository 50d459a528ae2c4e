"""Batch normalisation on the host; sums over rows run in float64."""

import numpy as np

from cupy_kernels import compilation
from cupy_kernels.ops.batch_norm import loops
from cupy_kernels.ops.batch_norm.running_statistics import RunningStatistics
from cupy_kernels.types import Array, Wide
from cupy_kernels.workspace import Workspace


def statistics(
    x: Array, epsilon: float, running: RunningStatistics | None, work: Workspace
) -> tuple[Array, Array]:
    """(mean, deviate) of this batch, (channels,) each; adds them to `running`, if it is given.

    The unbiased variance, with rows / (rows - 1), is added to the running variance.
    """
    rows = x.reshape(-1, x.shape[-1])
    mean, variance = _moments(rows)
    if running is not None:
        unbiased = variance * (len(rows) / max(len(rows) - 1, 1))
        for average, new in zip(running[:3], (mean, unbiased, 1.0), strict=True):
            average *= np.float32(running.fraction)
            average += np.asarray(new, np.float32)
    return _store_statistics(mean, variance, epsilon, work)


def running_statistics(
    running: RunningStatistics, epsilon: float, work: Workspace
) -> tuple[Array, Array]:
    """(mean, deviate) of all batches so far, for tests; at first 0 and 1 / sqrt(epsilon)."""
    factor = 1 / running.factor[0] if running.factor[0] else np.float32(0)
    return _store_statistics(factor * running.mean, factor * running.variance, epsilon, work)


def forward(
    x: Array,
    mean: Array,
    deviate: Array,
    scale: Array | None,
    shift: Array | None,
    work: Workspace,
) -> Array:
    """y of x's shape."""
    y = work.take("y", x.shape)
    factors = deviate if scale is None else deviate * scale
    if compilation.COMPILED:
        offset = np.zeros_like(mean) if shift is None else shift
        loops.normalise(_rows(x), mean, factors, offset, _rows(y))
        return y
    np.subtract(x, mean, out=y)
    y *= factors
    if shift is not None:
        y += shift
    return y


def backward(
    dy: Array,
    x: Array,
    mean: Array,
    deviate: Array,
    scale: Array | None,
    dscale: Array | None,
    dshift: Array | None,
    work: Workspace,
) -> Array:
    """dx, where mean and deviate are this batch's own; writes the requested gradients.

    For running statistics, which do not depend on x, dx = dy * deviate: `channels.scale_backward`.
    """
    rows, gradients, dx = _rows(x), _rows(dy), work.take("dx", x.shape)
    scale_sum, shift_sum = _normal_sums(gradients, rows, mean, deviate)
    for asked, total in ((dscale, scale_sum), (dshift, shift_sum)):
        if asked is not None:
            asked[...] = total
    factors = deviate if scale is None else deviate * scale
    count = np.float32(len(rows))
    ahead, along = shift_sum / count, scale_sum / count * deviate
    if compilation.COMPILED:
        loops.normal_gradient(gradients, rows, mean, factors, (ahead, along), _rows(dx))
        return dx
    np.subtract(x, mean, out=dx)
    dx *= along
    np.subtract(dy, dx, out=dx)
    dx -= ahead
    dx *= factors
    return dx


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _moments(rows: Array) -> tuple[Wide, Wide]:
    """The mean and the variance of each column."""
    if not compilation.COMPILED:
        mean = rows.mean(axis=0, dtype=np.float64)
        return mean, np.square(rows - mean.astype(np.float32)).mean(axis=0, dtype=np.float64)
    sums, squares = np.zeros((2, rows.shape[1]))
    loops.moments(rows, sums, squares)
    apart = sums / len(rows)
    return rows[0] + apart, np.maximum(squares / len(rows) - np.square(apart), 0)


def _normal_sums(dy: Array, x: Array, mean: Array, deviate: Array) -> tuple[Array, Array]:
    """The columns' sums of dy times normalised x, and of dy."""
    sums, products = np.zeros((2, x.shape[1]))
    if compilation.COMPILED:
        loops.normal_sums(dy, x, mean, deviate, sums, products)
    else:
        np.sum(dy, axis=0, out=sums)
        np.sum(dy * ((x - mean) * deviate), axis=0, dtype=np.float64, out=products)
    return products.astype(np.float32), sums.astype(np.float32)


def _store_statistics(
    mean: np.ndarray, variance: np.ndarray, epsilon: float, work: Workspace
) -> tuple[Array, Array]:
    into, deviate = work.take("mean", mean.shape), work.take("deviate", mean.shape)
    into[...] = mean
    deviate[...] = 1 / np.sqrt(variance + epsilon)
    return into, deviate
