"""The references' own backward passes against finite differences of their forward passes.

In float64 a central difference with h = 1e-6 is good to about 1e-9, so an error in a formula has
nowhere to hide.
"""

from collections.abc import Callable

import numpy as np
import pytest

from cupy_kernels.ops.activation import reference as activation_reference
from cupy_kernels.ops.convolution import reference as convolution_reference
from cupy_kernels.ops.inner_product import reference as inner_product_reference
from cupy_kernels.ops.pooling import reference as pooling_reference
from cupy_kernels.ops.softmax import reference as softmax_reference
from cupy_kernels.types import Wide

H = 1e-6


def slope(function: Callable[[Wide], Wide | float], x: Wide, dy: Wide | float) -> Wide:
    """d(sum of dy * function(x)) / dx, one coordinate at a time."""
    found = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        shifted = x.copy()
        shifted[place] += H
        above = np.sum(dy * function(shifted))
        shifted[place] -= 2 * H
        found[place] = (above - np.sum(dy * function(shifted))) / (2 * H)
    return found


def draw(*shape: int) -> Wide:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


def agree(ours: Wide, numeric: Wide) -> None:
    np.testing.assert_allclose(ours, numeric, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("stride", "pad", "dilation", "group"),
    [((1, 1), (0, 0), (1, 1), 1), ((2, 1), (1, 2), (1, 2), 2), ((1, 2), (2, 0), (2, 1), 1)],
)
def test_convolution(
    stride: tuple[int, int], pad: tuple[int, int], dilation: tuple[int, int], group: int
) -> None:
    """Gradients by input, weight and bias."""
    x, weight, bias = draw(2, 4, 5, 6), draw(4, 4 // group, 3, 2), draw(4)
    rules = (stride, pad, dilation, group)
    dy = draw(*convolution_reference.convolution(x, weight, bias, *rules).shape)
    dx, dweight, dbias = convolution_reference.convolution_backward(dy, x, weight, *rules)
    agree(dx, slope(lambda v: convolution_reference.convolution(v, weight, bias, *rules), x, dy))
    agree(
        dweight, slope(lambda v: convolution_reference.convolution(x, v, bias, *rules), weight, dy)
    )
    agree(dbias, slope(lambda v: convolution_reference.convolution(x, weight, v, *rules), bias, dy))


@pytest.mark.parametrize("mode", ["max", "average"])
def test_pooling(mode: str) -> None:
    """Overlapping windows with padding, away from ties."""
    x = draw(2, 2, 5, 4)

    def forward(v: Wide) -> Wide:
        return pooling_reference.pooling(v, mode, (3, 2), (2, 2), (1, 1), True)[0]

    share = pooling_reference.pooling(x, mode, (3, 2), (2, 2), (1, 1), True)[1]
    dy = draw(*forward(x).shape)
    agree(pooling_reference.pooling_backward(dy, share), slope(forward, x, dy))


def test_inner_product() -> None:
    """Gradients by input, weight and bias."""
    x, weight, bias, dy = draw(3, 5), draw(4, 5), draw(4), draw(3, 4)
    dx, dweight, dbias = inner_product_reference.inner_product_backward(dy, x, weight)
    agree(dx, slope(lambda v: inner_product_reference.inner_product(v, weight, bias), x, dy))
    agree(dweight, slope(lambda v: inner_product_reference.inner_product(x, v, bias), weight, dy))
    agree(dbias, slope(lambda v: inner_product_reference.inner_product(x, weight, v), bias, dy))


@pytest.mark.parametrize("leak", [0.0, 0.2])
def test_relu(leak: float) -> None:
    """Away from zero, where there is no slope."""
    x, dy = draw(4, 6), draw(4, 6)
    agree(
        activation_reference.relu_backward(dy, x, leak),
        slope(lambda v: activation_reference.relu(v, leak), x, dy),
    )


def test_softmax() -> None:
    """The Jacobian of softmax."""
    x, dy = draw(3, 5), draw(3, 5)
    agree(
        softmax_reference.softmax_backward(dy, softmax_reference.softmax(x)),
        slope(softmax_reference.softmax, x, dy),
    )


@pytest.mark.parametrize("ignored", [None, 2])
def test_cross_entropy(ignored: int | None) -> None:
    """The gradient that softmax and loss have together."""
    x, labels = draw(4, 5), np.array([2, 0, 4, 2])
    numeric = slope(lambda v: softmax_reference.cross_entropy(v, labels, ignored, 3), x, 1.0)
    agree(softmax_reference.cross_entropy_backward(x, labels, ignored, 3), numeric)
