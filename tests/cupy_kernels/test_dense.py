"""Inner product, rectifier and dropout against their references."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_kernels.ops import activation, dropout, inner_product
from cupy_kernels.ops.activation import reference as activation_reference
from cupy_kernels.ops.dropout.rng_keys import RngKey
from cupy_kernels.ops.inner_product import reference as inner_product_reference
from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace


def draw(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, np.float32)


@given(st.integers(1, 9), st.integers(1, 33), st.integers(1, 17), st.integers(0, 99))
@settings(max_examples=40)
def test_inner_product_equals_the_reference(m: int, k: int, out: int, seed: int) -> None:
    """Output and all three gradients."""
    rng, work = np.random.default_rng(seed), Workspace()
    x, weight, bias, dy = draw(rng, m, k), draw(rng, out, k), draw(rng, out), draw(rng, m, out)
    y = inner_product.forward(x, weight, bias, work)
    wide = [a.astype(np.float64) for a in (x, weight, bias, dy)]
    np.testing.assert_allclose(
        y, inner_product_reference.inner_product(*wide[:3]), rtol=1e-4, atol=1e-5
    )
    dweight, dbias = np.full_like(weight, np.nan), np.full_like(bias, np.nan)
    dx = inner_product.backward(dy, x, weight, dweight, dbias, work, needs_dx=True)
    expected = inner_product_reference.inner_product_backward(wide[3], wide[0], wide[1])
    for ours, theirs in zip((dx, dweight, dbias), expected, strict=True):
        assert ours is not None
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert inner_product.backward(dy, x, weight, None, None, work, needs_dx=False) is None


@pytest.mark.parametrize("slope", [0.0, 0.1, -0.5])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 5, 4)])
def test_relu_equals_the_reference(slope: float, shape: tuple[int, ...]) -> None:
    """Values and gradients, at zero as well, for any slope."""
    rng, work = np.random.default_rng(11), Workspace()
    x, dy = draw(rng, *shape), draw(rng, *shape)
    x.flat[0] = 0.0
    y = activation.relu(x, slope, work)
    wide, wide_dy = x.astype(np.float64), dy.astype(np.float64)
    np.testing.assert_allclose(y, activation_reference.relu(wide, slope), rtol=1e-6)
    dx = activation.relu_backward(dy, x, slope, work)
    np.testing.assert_allclose(
        dx, activation_reference.relu_backward(wide_dy, wide, slope), rtol=1e-6
    )


def mask(seed: int, step: int, layer: int, ratio: float = 0.4) -> Array:
    ones = np.ones((200, 50), np.float32)
    return dropout.forward(ones, ratio, RngKey(seed, step, layer), Workspace())[0]


def test_a_dropout_mask_repeats_with_its_keys_and_differs_without() -> None:
    """Seed, step and layer decide the mask, and each of them changes it."""
    first = mask(1, 2, 3)
    np.testing.assert_array_equal(first, mask(1, 2, 3))
    for other in (mask(9, 2, 3), mask(1, 9, 3), mask(1, 2, 9)):
        assert np.mean(first != other) > 0.3


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_expectation(ratio: float) -> None:
    """The mask is 0 or 1/(1 - ratio), zeros in the given share: 10,000 draws, five sigma."""
    drawn = mask(7, 0, 0, ratio)
    kept = drawn > 0
    np.testing.assert_array_equal(drawn[kept], np.float32(1 / (1 - ratio)))
    assert abs(np.mean(~kept) - ratio) < 5 * np.sqrt(ratio * (1 - ratio) / drawn.size)


def test_dropout_backward_is_the_same_mask() -> None:
    """What was dropped gets no gradient, the rest is scaled as it was forward."""
    rng, work = np.random.default_rng(2), Workspace()
    drawn, x, dy = mask(1, 1, 1), draw(rng, 200, 50), draw(rng, 200, 50)
    y, kept = dropout.forward(x, 0.4, RngKey(1, 1, 1), work)
    np.testing.assert_array_equal(y, x * drawn)
    np.testing.assert_array_equal(dropout.backward(dy, kept, work), dy * drawn)
