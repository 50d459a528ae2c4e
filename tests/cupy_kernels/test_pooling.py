"""Pooling against its float64 reference, over odd sizes and Caffe's border rules."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cupy_kernels import compilation
from cupy_kernels.ops import pooling
from cupy_kernels.ops.pooling import reference
from cupy_kernels.ops.pooling.window import Pooling
from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace


@st.composite
def poolings(draw: st.DrawFn) -> tuple[Pooling, tuple[int, int]]:
    """A pooling with all windows starting inside the image, and the image's size."""
    kernel = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    stride = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    pad = draw(st.tuples(st.integers(0, kernel[0] - 1), st.integers(0, kernel[1] - 1)))
    shape = Pooling(kernel, stride, pad, draw(st.booleans()))
    size = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    for count, step, edge, extent in zip(shape.output(*size), stride, pad, size, strict=True):
        assume(count >= 1)
        assume((count - 1) * step - edge < extent)
    return shape, size


def check(shape: Pooling, x: Array, mode: str, dy_seed: int) -> None:
    """Forward and backward of one mode against the reference."""
    work = Workspace()
    wide = x.transpose(0, 3, 1, 2).astype(np.float64)
    expected, share = reference.pooling(
        wide, mode, shape.kernel, shape.stride, shape.pad, shape.round_up
    )
    dy = np.random.default_rng(dy_seed).standard_normal(
        (x.shape[0], *expected.shape[2:], x.shape[3]), np.float32
    )
    if mode == "max":
        y, where = pooling.max_forward(x, shape, work)
        np.testing.assert_array_equal(y.transpose(0, 3, 1, 2), expected)
        dx = pooling.max_backward(dy, where, x.shape, shape, work)
    else:
        y = pooling.average_forward(x, shape, work)
        np.testing.assert_allclose(y.transpose(0, 3, 1, 2), expected, rtol=1e-5, atol=1e-6)
        dx = pooling.average_backward(dy, x.shape, shape, work)
    expected_dx = reference.pooling_backward(dy.transpose(0, 3, 1, 2).astype(np.float64), share)
    np.testing.assert_allclose(dx.transpose(0, 3, 1, 2), expected_dx, rtol=1e-5, atol=1e-5)


@given(case=poolings(), n=st.integers(1, 2), c=st.integers(1, 3), seed=st.integers(0, 99))
@pytest.mark.parametrize("compiled", [compilation.COMPILED, False])
@pytest.mark.parametrize("mode", ["max", "average"])
@settings(max_examples=60)
def test_forward_and_backward_equal_the_reference(
    mode: str, compiled: bool, case: tuple[Pooling, tuple[int, int]], n: int, c: int, seed: int
) -> None:
    """Values and gradients; few distinct values, so that ties are frequent."""
    shape, size = case
    x = np.random.default_rng(seed).integers(-2, 3, (n, *size, c)).astype(np.float32)
    with patch.object(compilation, "COMPILED", compiled):
        check(shape, x, mode, seed)


def test_windows_of_more_than_256_cells_remember_their_maximum() -> None:
    """An offset beyond a byte is kept: global pooling of a 20 x 20 image."""
    x = np.random.default_rng(5).standard_normal((2, 20, 20, 3), np.float32)
    check(Pooling((20, 20)), x, "max", 5)
