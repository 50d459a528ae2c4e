"""Inner product (a fully connected layer): one GEMM forward, two backward."""

import numpy as np

from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace


def forward(x: Array, weight: Array, bias: Array | None, work: Workspace) -> Array:
    """y = x W^T + b for x (m, k) and W (out, k); returns (m, out), valid until the next call."""
    y = work.take("y", (x.shape[0], weight.shape[0]))
    np.matmul(x, weight.T, out=y)
    if bias is not None:
        np.add(y, bias, out=y)
    return y


def backward(
    dy: Array,
    x: Array,
    weight: Array,
    dweight: Array | None,
    dbias: Array | None,
    work: Workspace,
    *,
    wanted: bool,
) -> Array | None:
    """dW = dy^T x and db = sum(dy) into the arrays given; returns dx = dy W if `wanted`."""
    if dweight is not None:
        np.matmul(dy.T, x, out=dweight)
    if dbias is not None:
        np.sum(dy, axis=0, out=dbias)
    if not wanted:
        return None
    dx = work.take("dx", x.shape)
    np.matmul(dy, weight, out=dx)
    return dx
