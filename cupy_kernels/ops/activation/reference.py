"""The reference for ReLU: float64, by simple loops, from the formula.

It shares no code with the fast versions, and its gradients are checked against finite differences.
"""

import numpy as np

from cupy_kernels.types import Wide


def relu(x: Wide, slope: float) -> Wide:
    """x above 0, slope * x elsewhere."""
    return np.where(x > 0, x, slope * x)


def relu_backward(dy: Wide, x: Wide, slope: float) -> Wide:
    """dy above 0, slope * dy elsewhere."""
    return np.where(x > 0, dy, slope * dy)
