"""Inner product (a fully connected layer): one matrix product forward, two backward."""

from cupy_kernels.backends import pick
from cupy_kernels.ops.inner_product import cpu, gpu
from cupy_kernels.types import Array, Precision
from cupy_kernels.workspace import Workspace


def forward(
    x: Array,
    weight: Array,
    bias: Array | None,
    work: Workspace,
    precision: Precision = Precision.FP32,
    *,
    relu: bool = False,
) -> Array:
    """y = x W^T + b for x (m, k) and W (out, k); with `relu`, negatives are 0.

    Returns (m, out), valid until the next call with this workspace.
    W may be the transpose of a contiguous (k, out); kernels then use a slow product.
    """
    body = pick(x, cpu.forward, gpu.forward)
    return body(x, weight, bias, work, precision, relu=relu)


def backward(
    dy: Array,
    x: Array,
    weight: Array,
    dweight: Array | None,
    dbias: Array | None,
    work: Workspace,
    precision: Precision = Precision.FP32,
    *,
    needs_dx: bool,
) -> Array | None:
    """Write dW = dy^T x and db = sum(dy) into the given arrays; return dx = dy W if `needs_dx`."""
    body = pick(dy, cpu.backward, gpu.backward)
    return body(dy, x, weight, dweight, dbias, work, precision, needs_dx=needs_dx)
