"""Convolution against its float64 reference, over odd sizes."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cupy_kernels import compilation
from cupy_kernels.ops import convolution
from cupy_kernels.ops.convolution import cpu, reference
from cupy_kernels.ops.convolution.window import Convolution
from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace

PAIR = st.tuples(st.integers(1, 3), st.integers(1, 3))
SHAPES = st.builds(
    Convolution,
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stride=PAIR,
    pad=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    group=st.integers(1, 3),
)


def draw(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, np.float32)


@pytest.mark.parametrize("compiled", [compilation.COMPILED, False])
@given(
    shape=SHAPES,
    n=st.integers(1, 3),
    size=st.tuples(st.integers(3, 9), st.integers(3, 9)),
    each=st.tuples(st.integers(1, 7), st.integers(1, 3)),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_forward_and_backward_equal_the_reference(
    compiled: bool,
    shape: Convolution,
    n: int,
    size: tuple[int, int],
    each: tuple[int, int],
    seed: int,
) -> None:
    """Output and all three gradients, for any kernel, stride, pad, dilation and group.

    1 to 21 input channels cover all ways of unrolling, in compiled loops and in NumPy.
    """
    with patch.object(compilation, "COMPILED", compiled):
        check(shape, n, size, each, seed)


@pytest.mark.parametrize("lines", [1, 3, 20])
def test_blocks_of_any_size_make_up_the_whole(lines: int) -> None:
    """An output line at a time, a part of an image, and several images."""
    shape = Convolution((3, 3), pad=(1, 1))
    with patch.object(cpu, "_BLOCK", lines * 8 * 9 * 4):
        check(shape, 3, (9, 8), (4, 5), seed=6)


def check(
    shape: Convolution, n: int, size: tuple[int, int], each: tuple[int, int], seed: int
) -> None:
    """Compare both passes with the reference."""
    assume(min(shape.output(*size)) >= 1)
    rng, work = np.random.default_rng(seed), Workspace()
    channels, outputs = each[0] * shape.group, each[1] * shape.group
    x = draw(rng, n, *size, channels)
    weight, bias = draw(rng, outputs, each[0], *shape.kernel), draw(rng, outputs)
    rules = (shape.stride, shape.pad, shape.dilation, shape.group)
    wide_x, wide_weight = x.transpose(0, 3, 1, 2).astype(np.float64), weight.astype(np.float64)

    y, columns = convolution.forward(x, weight, bias, shape, work)
    expected = reference.convolution(wide_x, wide_weight, bias.astype(np.float64), *rules)
    np.testing.assert_allclose(y.transpose(0, 3, 1, 2), expected, rtol=1e-4, atol=1e-4)

    dy = draw(rng, *y.shape)
    dweight, dbias = np.full_like(weight, np.nan), np.full_like(bias, np.nan)
    dx = convolution.backward(
        dy, columns, x.shape, weight, dweight, dbias, shape, work, needs_dx=True
    )
    assert dx is not None
    wide_dy = dy.transpose(0, 3, 1, 2).astype(np.float64)
    expected_dx, expected_dw, expected_db = reference.convolution_backward(
        wide_dy, wide_x, wide_weight, *rules
    )
    np.testing.assert_allclose(dx.transpose(0, 3, 1, 2), expected_dx, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dweight, expected_dw, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dbias, expected_db, rtol=1e-4, atol=1e-4)


def test_gradients_that_nobody_wants_are_not_computed() -> None:
    """A frozen tensor's gradient is untouched, and an unwanted input gradient is None."""
    rng, work, shape = np.random.default_rng(3), Workspace(), Convolution((3, 3))
    x, weight = draw(rng, 2, 5, 5, 2), draw(rng, 4, 2, 3, 3)
    y, columns = convolution.forward(x, weight, None, shape, work)
    dbias = np.full(4, np.nan, np.float32)
    dx = convolution.backward(y, columns, x.shape, weight, None, dbias, shape, work, needs_dx=False)
    assert dx is None
    np.testing.assert_allclose(dbias, y.sum(axis=(0, 1, 2)), rtol=1e-4)


def test_a_smaller_batch_reuses_the_memory_of_a_larger_one() -> None:
    """Results for 2 images are the same whether or not 5 went through before."""
    rng, work, shape = np.random.default_rng(4), Workspace(), Convolution((3, 2), pad=(1, 1))
    weight, bias = draw(rng, 3, 4, 3, 2), draw(rng, 3)
    large, small = draw(rng, 5, 6, 7, 4), draw(rng, 2, 6, 7, 4)
    convolution.forward(large, weight, bias, shape, work)
    after, _ = convolution.forward(small, weight, bias, shape, work)
    fresh, _ = convolution.forward(small, weight, bias, shape, Workspace())
    np.testing.assert_array_equal(after, fresh)
