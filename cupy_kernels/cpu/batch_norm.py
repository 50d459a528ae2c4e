"""Batch normalisation on the host; sums over rows run in float64."""

import numpy as np

from cupy_kernels.running_statistics import RunningStatistics
from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace


def statistics(
    x: Array, epsilon: float, running: RunningStatistics | None, work: Workspace
) -> tuple[Array, Array]:
    rows = x.reshape(-1, x.shape[-1])
    mean = rows.mean(axis=0, dtype=np.float64)
    variance = np.square(rows - mean.astype(np.float32)).mean(axis=0, dtype=np.float64)
    if running is not None:
        unbiased = variance * (len(rows) / max(len(rows) - 1, 1))
        for kept, new in zip(running[:3], (mean, unbiased, 1.0), strict=True):
            kept *= np.float32(running.fraction)
            kept += np.asarray(new, np.float32)
    return _given(mean, variance, epsilon, work)


def running_statistics(
    running: RunningStatistics, epsilon: float, work: Workspace
) -> tuple[Array, Array]:
    factor = 1 / running.factor[0] if running.factor[0] else np.float32(0)
    return _given(factor * running.mean, factor * running.variance, epsilon, work)


def forward(
    x: Array,
    mean: Array,
    deviate: Array,
    scale: Array | None,
    shift: Array | None,
    work: Workspace,
) -> Array:
    y = np.subtract(x, mean, out=work.take("y", x.shape))
    y *= deviate if scale is None else deviate * scale
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
    xhat = np.subtract(x, mean, out=work.take("xhat", x.shape))
    xhat *= deviate
    channels, count = x.shape[-1], x.size // x.shape[-1]
    dx = np.multiply(dy, xhat, out=work.take("dx", x.shape))
    scale_sum = dx.reshape(-1, channels).sum(axis=0, dtype=np.float64).astype(np.float32)
    shift_sum = dy.reshape(-1, channels).sum(axis=0, dtype=np.float64).astype(np.float32)
    for asked, total in ((dscale, scale_sum), (dshift, shift_sum)):
        if asked is not None:
            asked[...] = total
    xhat *= scale_sum / np.float32(count)
    np.subtract(dy, xhat, out=dx)
    dx -= shift_sum / np.float32(count)
    dx *= deviate if scale is None else deviate * scale
    return dx


def _given(
    mean: np.ndarray, variance: np.ndarray, epsilon: float, work: Workspace
) -> tuple[Array, Array]:
    into, deviate = work.take("mean", mean.shape), work.take("deviate", mean.shape)
    into[...] = mean
    deviate[...] = 1 / np.sqrt(variance + epsilon)
    return into, deviate
