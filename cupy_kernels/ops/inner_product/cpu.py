"""The inner product on the host: BLAS, always in float32, also if kernels use less precision."""

import numpy as np

from cupy_kernels.types import Array, Precision
from cupy_kernels.workspace import Workspace


def forward(
    x: Array,
    weight: Array,
    bias: Array | None,
    work: Workspace,
    precision: Precision = Precision.FP32,  # noqa: ARG001  # as kernels take it
    *,
    relu: bool = False,
) -> Array:
    """y = x W^T + b for x (m, k) and W (out, k); with `relu`, negatives are 0.

    Returns (m, out), valid until the next call with this workspace.
    W may be the transpose of a contiguous (k, out); kernels then use a slow product.
    """
    y = work.take("y", (x.shape[0], weight.shape[0]))
    np.matmul(x, weight.T, out=y)
    if bias is not None:
        np.add(y, bias, out=y)
    if relu:
        np.maximum(y, np.float32(0.0), out=y)
    return y


def backward(
    dy: Array,
    x: Array,
    weight: Array,
    dweight: Array | None,
    dbias: Array | None,
    work: Workspace,
    precision: Precision = Precision.FP32,  # noqa: ARG001  # as kernels take it
    *,
    needs_dx: bool,
) -> Array | None:
    """Write dW = dy^T x and db = sum(dy) into the given arrays; return dx = dy W if `needs_dx`."""
    if dweight is not None:
        np.matmul(dy.T, x, out=dweight)
    if dbias is not None:
        np.sum(dy, axis=0, out=dbias)
    if not needs_dx:
        return None
    dx = work.take("dx", x.shape)
    np.matmul(dy, weight, out=dx)
    return dx
