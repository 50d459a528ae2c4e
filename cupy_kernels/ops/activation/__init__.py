"""Activations: functions of one element (`functions` lists them), and PReLU with a learnt slope.

Gradients at a kink are Caffe's. Results are valid until the next call with the same workspace.
"""

import numpy as np

from cupy_kernels.backends import backend_of, pick
from cupy_kernels.ops.activation import cpu, gpu
from cupy_kernels.ops.activation.functions import Function, Relu, Smooth
from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace


def forward(function: Function, x: Array, work: Workspace) -> Array:
    """The function of each element of x, in x's shape."""
    return pick(x, cpu.forward, gpu.forward)(function, x, work)


def backward(function: Smooth, dy: Array, x: Array, y: Array, work: Workspace) -> Array:
    """dy times the derivative, computed from the input x or the output y."""
    return pick(dy, cpu.backward, gpu.backward)(function, dy, x, y, work)


def relu(x: Array, slope: float, work: Workspace, *, over: bool = False) -> Array:
    """x above 0, slope * x elsewhere. With `over`, it may write over x, and does on the host."""
    if over and slope == 0.0 and not backend_of(x).runs_kernels:
        return np.maximum(x, np.float32(0), out=x)
    return forward(Relu(slope), x, work)


def relu_backward(dy: Array, x: Array, slope: float, work: Workspace) -> Array:
    """The gradient by x; `x` is the layer's input (or its output, if the slope is 0)."""
    return backward(Relu(slope), dy, x, x, work)


def prelu(x: Array, slope: Array, work: Workspace) -> Array:
    """x above 0, slope[c] * x elsewhere (He et al. 2015), for x (..., c) and slope (c,) or (1,)."""
    return pick(x, cpu.prelu, gpu.prelu)(x, slope, work)


def prelu_backward(
    dy: Array, x: Array, slope: Array, dslope: Array | None, work: Workspace
) -> Array:
    """The gradient by x; writes the gradient by the slope into `dslope`."""
    body = pick(dy, cpu.prelu_backward, gpu.prelu_backward)
    return body(dy, x, slope, dslope, work)
