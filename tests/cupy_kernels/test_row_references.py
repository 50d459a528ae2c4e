"""The references themselves: backward ones are the derivatives of the forward ones."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupy_kernels.ops.activation.spec import DERIVATIVE, FORWARD
from cupy_kernels.ops.reduction.column_sums_spec import chunks
from cupy_kernels.registry import KERNELS
from cupy_kernels.types import Wide
from tests.cupy_kernels.cases.elementwise import SETTINGS

STEP = 1e-6


def slope(function: Callable[[Wide], Wide], x: Wide, dy: Wide) -> Wide:
    """d(dy . function(x)) / dx by central differences, one element at a time."""
    found = np.zeros_like(x)
    for i in range(x.size):
        nudge = np.zeros_like(x)
        nudge.flat[i] = STEP
        difference = function(x + nudge) - function(x - nudge)
        found.flat[i] = np.sum(dy.reshape(-1) * difference.reshape(-1)) / (2 * STEP)
    return found


@pytest.mark.parametrize("name", DERIVATIVE)
def test_an_activations_backward_is_its_derivative(name: str) -> None:
    """At points off the kinks, for each of the settings tried."""
    x = np.random.default_rng(2).uniform(-3, 3, 40)
    dy = np.random.default_rng(3).standard_normal(40)
    for settings in SETTINGS.get(name, ({},)):
        y = FORWARD[name](x, **settings)
        seen = {"x": x, "y": y}[DERIVATIVE[name][0]]
        got = KERNELS[f"{name}_backward"].reference(
            dy=dy, **{DERIVATIVE[name][0]: seen}, **settings
        )["dx"]
        forward = KERNELS[f"{name}_forward"].reference
        expected = slope(lambda v: np.asarray(forward(x=v, **settings)["y"]), x, dy)  # noqa: B023
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)


def pair(forward: str, backward: str, shape: dict[str, Any], size: int, **given: Any) -> None:
    """Compare a backward reference with the slope of its forward one."""
    x, dy = np.random.default_rng(5).standard_normal((2, size))

    def run(values: Wide) -> Wide:
        found = KERNELS[forward].reference(x=values, **shape, **given)
        return np.asarray(found["y"])

    forward_only = KERNELS[forward].reference(x=x, **shape, **given)
    extra = {name: forward_only[name].reshape(-1) for name in ("scale",) if name in forward_only}
    got = KERNELS[backward].reference(dy=dy, x=x, **shape, **(given | extra))["dx"]
    np.testing.assert_allclose(got.reshape(-1), slope(run, x, dy), rtol=1e-5, atol=1e-7)


def test_the_gradients_of_local_response_normalisation() -> None:
    """Across channels and within one, at borders and inside."""
    settings = {"size": 3, "share": 0.2, "beta": 0.75}
    across = {"pixels": 3, "channels": 7, "k": 1.5, **settings}
    pair("lrn_across_forward", "lrn_across_backward", across, 21)
    within = {"n": 1, "h": 4, "w": 3, "channels": 2, **settings}
    pair("lrn_within_forward", "lrn_within_backward", within, 24)


def test_the_gradient_of_batch_normalisation_counts_its_statistics() -> None:
    """dx holds the way over mean and variance; the sums are the gradients of shift and scale."""
    rows, width = 11, 3
    generator = np.random.default_rng(7)
    x, dy = generator.standard_normal((2, rows * width))
    scale, shift = generator.standard_normal((2, width))
    shape = {"rows": rows, "channels": width}

    def normalised(values: Wide, scale: Wide, shift: Wide) -> Wide:
        blob = values.reshape(rows, width)
        deviate = 1 / np.sqrt(blob.var(axis=0) + 1e-3)
        known = {"mean": blob.mean(axis=0), "deviate": deviate, **shape}
        found = KERNELS["batch_norm_forward"].reference(x=values, scale=scale, shift=shift, **known)
        return np.asarray(found["y"])

    blob = x.reshape(rows, width)
    known = {"mean": blob.mean(axis=0), "deviate": 1 / np.sqrt(blob.var(axis=0) + 1e-3), **shape}
    sums = KERNELS["batch_norm_gradients"].reference(dy=dy, x=x, **known)["partials"].sum(axis=1)
    got = KERNELS["batch_norm_backward"].reference(
        dy=dy, x=x, scale=scale, shift_sum=sums[0], scale_sum=sums[1], **known
    )["dx"]
    expected = slope(lambda v: normalised(v, scale, shift), x, dy)
    np.testing.assert_allclose(got.reshape(-1), expected, rtol=1e-5, atol=1e-7)
    by_scale = slope(lambda v: normalised(x, v, shift), scale, dy)
    np.testing.assert_allclose(sums[1], by_scale, rtol=1e-6)
    by_shift = slope(lambda v: normalised(x, scale, v), shift, dy)
    np.testing.assert_allclose(sums[0], by_shift, rtol=1e-6)


def test_moments_and_statistics_are_mean_and_variance() -> None:
    """The two stages together, for values with a mean far above their spread."""
    rows, width = 200, 4
    x = 1000 + np.random.default_rng(11).standard_normal((rows, width))
    flat = x.reshape(-1)
    shape = {"rows": rows, "channels": width}
    partials = KERNELS["batch_norm_moments"].reference(x=flat, **shape)["partials"].reshape(-1)
    nothing = dict.fromkeys(("running_mean", "running_variance", "running_factor"))
    found = KERNELS["batch_norm_statistics"].reference(
        x=flat, partials=partials, chunks=chunks(rows), epsilon=0.0, **nothing, **shape
    )
    np.testing.assert_allclose(found["mean"], x.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found["deviate"], 1 / x.std(axis=0), rtol=1e-9)
