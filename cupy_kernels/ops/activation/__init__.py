"""Activations: functions of one element (`functions` lists them), and PReLU with a learnt slope.

Gradients at a kink are Caffe's. Results are valid until the next call with the same workspace.
"""

import numpy as np

from cupy_kernels.backends import HostOperation, backend_of
from cupy_kernels.ops.activation import cpu, gpu
from cupy_kernels.ops.activation.functions import Relu
from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace

forward = HostOperation(cpu.forward).with_kernels(gpu.forward)
backward = HostOperation(cpu.backward).with_kernels(gpu.backward)


def relu(x: Array, slope: float, work: Workspace, *, over: bool = False) -> Array:
    """x above 0, slope * x elsewhere. With `over`, it may write over x, and does on the host."""
    if over and slope == 0.0 and not backend_of(x).runs_kernels:
        return np.maximum(x, np.float32(0), out=x)
    return forward(x, Relu(slope), work)


def relu_backward(dy: Array, x: Array, slope: float, work: Workspace) -> Array:
    """The gradient by x; `x` is the layer's input (or its output, if the slope is 0)."""
    return backward(dy, x, x, Relu(slope), work)


prelu = HostOperation(cpu.prelu).with_kernels(gpu.prelu)
prelu_backward = HostOperation(cpu.prelu_backward).with_kernels(gpu.prelu_backward)
