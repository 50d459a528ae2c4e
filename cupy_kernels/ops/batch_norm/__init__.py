"""Batch normalisation by channel (Ioffe and Szegedy 2015), with Caffe's running statistics.

    y = (x - mean) * deviate, times scale, plus shift;  deviate = 1 / sqrt(variance + epsilon)
    dx = scale * deviate * (dy - sum(dy) / rows - xhat * sum(dy * xhat) / rows)

Blobs are (..., channels); all axes but the channels are rows. Caffe's BatchNorm has no scale and no
shift; they belong to a Scale layer behind it. Results are valid until the next call with the same
workspace.
"""

from cupy_kernels.backends import pick
from cupy_kernels.ops.batch_norm import cpu, gpu
from cupy_kernels.ops.batch_norm.running_statistics import RunningStatistics
from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace


def statistics(
    x: Array, epsilon: float, running: RunningStatistics | None, work: Workspace
) -> tuple[Array, Array]:
    """(mean, deviate) of this batch, (channels,) each; adds them to `running`, if it is given.

    The unbiased variance, with rows / (rows - 1), is added to the running variance.
    """
    return pick(x, cpu.statistics, gpu.statistics)(x, epsilon, running, work)


def running_statistics(
    running: RunningStatistics, epsilon: float, work: Workspace
) -> tuple[Array, Array]:
    """(mean, deviate) of all batches so far, for tests; at first 0 and 1 / sqrt(epsilon)."""
    body = pick(running.mean, cpu.running_statistics, gpu.running_statistics)
    return body(running, epsilon, work)


def forward(
    x: Array,
    mean: Array,
    deviate: Array,
    scale: Array | None,
    shift: Array | None,
    work: Workspace,
) -> Array:
    """y of x's shape."""
    return pick(x, cpu.forward, gpu.forward)(x, mean, deviate, scale, shift, work)


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
    body = pick(dy, cpu.backward, gpu.backward)
    return body(dy, x, mean, deviate, scale, dscale, dshift, work)
