"""Activations on the host: each formula in a few passes of NumPy over the blob."""

import numpy as np

from cupy_kernels import compilation
from cupy_kernels.ops.activation import functions as f
from cupy_kernels.ops.activation import loops
from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace

ZERO, ONE = np.float32(0), np.float32(1)


def forward(x: Array, function: f.Function, work: Workspace) -> Array:
    """The function of each element of x, in x's shape."""
    y = work.take("y", x.shape)
    match function:
        case f.Relu(slope):
            _relu(x, slope, y, work)
        case f.Sigmoid():
            _logistic(x, y)
        case f.Tanh():
            np.tanh(x, out=y)
        case f.Elu(alpha):
            np.copyto(y, x)
            np.multiply(np.expm1(np.minimum(x, ZERO)), np.float32(alpha), out=y, where=x <= 0)
        case f.Swish(beta):
            np.multiply(x, _logistic(np.float32(beta) * x, y), out=y)
        case f.Bnll():
            np.logaddexp(ZERO, x, out=y)
        case f.Power(power, scale, shift):
            np.power(np.float32(shift) + np.float32(scale) * x, np.float32(power), out=y)
        case f.Exp(inner, outer):
            np.exp(np.float32(inner) * x + np.float32(outer), out=y)
        case f.Log(scale, shift, factor):
            np.log(np.float32(shift) + np.float32(scale) * x, out=y)
            np.multiply(y, np.float32(factor), out=y)
        case f.Abs():
            np.abs(x, out=y)
        case f.Clip(low, high):
            np.clip(x, np.float32(low), np.float32(high), out=y)
        case f.Threshold(limit):
            np.greater(x, np.float32(limit), out=y)
    return y


def backward(dy: Array, x: Array, y: Array, function: f.Smooth, work: Workspace) -> Array:
    """dy times the derivative, computed from the input x or the output y."""
    dx = work.take("dx", dy.shape)
    if isinstance(function, f.Relu):
        _relu_backward(dy, x, function.slope, dx, work)
    else:
        np.multiply(dy, _derivative(function, x, y), out=dx)
    return dx


def prelu(x: Array, slope: Array, work: Workspace) -> Array:
    """x above 0, slope[c] * x elsewhere (He et al. 2015), for x (..., c) and slope (c,) or (1,)."""
    y = work.take("y", x.shape)
    np.multiply(x, slope, out=y)
    np.copyto(y, x, where=x > 0)
    return y


def prelu_backward(
    dy: Array, x: Array, slope: Array, dslope: Array | None, work: Workspace
) -> Array:
    """The gradient by x; writes the gradient by the slope into `dslope`."""
    dx = work.take("dx", x.shape)
    if dslope is not None:
        np.multiply(dy, np.minimum(x, ZERO), out=dx)
        np.sum(dx.reshape(-1, slope.size), axis=0, out=dslope)
    np.multiply(dy, slope, out=dx)
    np.copyto(dx, dy, where=x > 0)
    return dx


def _relu(x: Array, slope: float, y: Array, work: Workspace) -> None:
    if slope == 0.0:
        np.maximum(x, ZERO, out=y)
        return
    np.minimum(x, ZERO, out=y)
    np.multiply(y, np.float32(slope), out=y)
    positive = work.take("positive", x.shape)
    np.maximum(x, ZERO, out=positive)
    np.add(y, positive, out=y)


def _relu_backward(dy: Array, x: Array, slope: float, dx: Array, work: Workspace) -> None:
    if compilation.COMPILED:
        loops.relu_backward(dy.reshape(-1), x.reshape(-1), np.float32(slope), dx.reshape(-1))
        return
    positive = work.take_as("mask", x.shape, np.bool_)
    np.greater(x, ZERO, out=positive)
    if slope == 0.0:
        np.multiply(dy, positive, out=dx)
    else:
        np.multiply(dy, np.float32(slope), out=dx)
        np.copyto(dx, dy, where=positive)


def _derivative(function: f.Smooth, x: Array, y: Array) -> Array:
    match function:
        case f.Sigmoid():
            return y * (ONE - y)
        case f.Tanh():
            return ONE - y * y
        case f.Elu(alpha):
            return np.asarray(np.where(y > 0, ONE, y + np.float32(alpha)), np.float32)
        case f.Swish(beta):
            s = _logistic(np.float32(beta) * x, np.empty_like(x))
            return np.asarray(s * (ONE + np.float32(beta) * x * (ONE - s)), np.float32)
        case f.Bnll():
            return _logistic(x, np.empty_like(x))
        case f.Power(power, scale, shift):
            factor = np.float32(power * scale)
            base = np.float32(shift) + np.float32(scale) * x
            return factor * np.power(base, np.float32(power - 1)) if factor else np.zeros_like(x)
        case f.Exp(inner, _):
            return np.float32(inner) * y
        case f.Log(scale, shift, factor):
            return np.float32(factor * scale) / (np.float32(shift) + np.float32(scale) * x)
        case f.Abs():
            return np.sign(x)
        case f.Clip(low, high):
            return ((x >= np.float32(low)) & (x <= np.float32(high))).astype(np.float32)
    raise AssertionError(f"{function} has a body of its own")


def _logistic(x: Array, out: Array) -> Array:
    """1 / (1 + e^-x), without the exponential of a large positive number, which overflows."""
    small = np.exp(-np.abs(x))
    np.divide(np.where(x >= 0, ONE, small), ONE + small, out=out)
    return out
