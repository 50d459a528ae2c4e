"""Batch normalisation in kernels, see `batch_norm.cu`."""

from typing import Any

from cupy_kernels.launch import launch
from cupy_kernels.ops.batch_norm.running_statistics import RunningStatistics
from cupy_kernels.ops.reduction.column_sums_spec import chunks
from cupy_kernels.ops.reduction.gpu import column_totals
from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace


def statistics(
    x: Array, epsilon: float, running: RunningStatistics | None, work: Workspace
) -> tuple[Array, Array]:
    sizes = _sizes(x)
    rows, channels = sizes["rows"], sizes["channels"]
    partials = work.take("partials", (2, chunks(rows), channels), x)
    mean, deviate = work.take("mean", (channels,), x), work.take("deviate", (channels,), x)
    mean_average, variance, factor, fraction = running or (None, None, None, 0.0)
    launch("batch_norm_moments", x=x, partials=partials, **sizes)
    launch(
        "batch_norm_statistics",
        x=x,
        partials=partials,
        mean=mean,
        deviate=deviate,
        running_mean=mean_average,
        running_variance=variance,
        running_factor=factor,
        fraction=fraction,
        epsilon=epsilon,
        chunks=chunks(rows),
        **sizes,
    )
    return mean, deviate


def running_statistics(
    running: RunningStatistics, epsilon: float, work: Workspace
) -> tuple[Array, Array]:
    (channels,) = running.mean.shape
    mean = work.take("mean", (channels,), running.mean)
    deviate = work.take("deviate", (channels,), running.mean)
    launch(
        "batch_norm_running",
        running_mean=running.mean,
        running_variance=running.variance,
        running_factor=running.factor,
        mean=mean,
        deviate=deviate,
        epsilon=epsilon,
        channels=channels,
    )
    return mean, deviate


def forward(
    x: Array,
    mean: Array,
    deviate: Array,
    scale: Array | None,
    shift: Array | None,
    work: Workspace,
) -> Array:
    y = work.take("y", x.shape, x)
    known: dict[str, Any] = {"mean": mean, "deviate": deviate, "scale": scale, "shift": shift}
    launch("batch_norm_forward", x=x, y=y, **known, **_sizes(x))
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
    sizes, channels = _sizes(x), x.shape[-1]
    partials = work.take("partials", (2, chunks(sizes["rows"]), channels), x)
    shift_sum = work.take("dshift", (channels,), x) if dshift is None else dshift
    scale_sum = work.take("dscale", (channels,), x) if dscale is None else dscale
    known: dict[str, Any] = {"dy": dy, "x": x, "mean": mean, "deviate": deviate, **sizes}
    launch("batch_norm_gradients", partials=partials, **known)
    column_totals(partials[0], shift_sum)
    column_totals(partials[1], scale_sum)
    dx = work.take("dx", x.shape, x)
    sums: dict[str, Any] = {"shift_sum": shift_sum, "scale_sum": scale_sum}
    launch("batch_norm_backward", scale=scale, dx=dx, **sums, **known)
    return dx


def _sizes(x: Array) -> dict[str, Any]:
    return {"rows": x.size // x.shape[-1], "channels": x.shape[-1]}
