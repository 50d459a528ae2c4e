"""Mean-variance normalisation of the rows of matrices (rows, width), as Caffe's MVN.

    y = (x - mean) / (deviation + epsilon), with deviation = sqrt(mean((x - mean)^2))
    dx = (dy - mean(dy)) / (deviation + epsilon) - y * mean(dy * y) / deviation

With an epsilon of None, y = x - mean. Results are valid until the next call with the same
workspace.
"""

from cupy_kernels.backends import pick
from cupy_kernels.ops.mvn import cpu, gpu
from cupy_kernels.types import Array, Kept
from cupy_kernels.workspace import Workspace


def forward(x: Array, epsilon: float | None, work: Workspace) -> tuple[Array, Kept]:
    """y of x's shape, and the values for `backward`."""
    return pick(x, cpu.forward, gpu.forward)(x, epsilon, work)


def backward(dy: Array, saved: Kept, epsilon: float | None, work: Workspace) -> Array:
    """dx; a row without variance gets the first term only."""
    return pick(dy, cpu.backward, gpu.backward)(dy, saved, epsilon, work)
