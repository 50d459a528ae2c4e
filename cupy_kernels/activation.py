"""Rectifier, plain and leaky.

y = max(x, 0) + slope * min(x, 0); dx = dy where x > 0, slope * dy elsewhere (at 0 too, as Caffe).
"""

import numpy as np

from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace


def relu(x: Array, slope: float, work: Workspace) -> Array:
    """Any shape in, the same out, valid until the next call."""
    y = work.take("y", x.shape)
    if slope == 0.0:
        return np.maximum(x, np.float32(0.0), out=y)
    np.minimum(x, np.float32(0.0), out=y)
    np.multiply(y, np.float32(slope), out=y)
    positive = work.take("positive", x.shape)
    np.maximum(x, np.float32(0.0), out=positive)
    return np.add(y, positive, out=y)


def relu_backward(dy: Array, x: Array, slope: float, work: Workspace) -> Array:
    """The gradient by x; `x` is the layer's input (its output serves too while slope is 0)."""
    positive = work.take_as("mask", x.shape, np.bool_)
    np.greater(x, np.float32(0.0), out=positive)
    dx = work.take("dx", x.shape)
    if slope == 0.0:
        np.multiply(dy, positive, out=dx)
    else:
        np.multiply(dy, np.float32(slope), out=dx)
        np.copyto(dx, dy, where=positive)
    return dx
