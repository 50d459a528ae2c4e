"""Two-dimensional convolution (cross-correlation, as every deep-learning library has it).

y[n, p, q, o] = b[o] + sum over i, j, c of
                x[n, p*sh - ph + i*dh, q*sw - pw + j*dw, c] * W[o, c, i, j]
"""

from cupy_kernels.backends import pick
from cupy_kernels.ops.convolution import cpu, gpu
from cupy_kernels.ops.convolution.window import Convolution
from cupy_kernels.types import Array, Kept
from cupy_kernels.workspace import Workspace


def forward(
    x: Array,
    weight: Array,
    bias: Array | None,
    shape: Convolution,
    work: Workspace,
    *,
    relu: bool = False,
) -> tuple[Array, Kept]:
    """Convolve x (n, h, w, c) with weight (out, c/group, kh, kw); with `relu`, negatives are 0.

    Returns y (n, oh, ow, out) and the values for `backward`. Both are valid until the next call
    with this workspace, and x must not change until then.
    """
    body = pick(x, cpu.forward, gpu.forward)
    return body(x, weight, bias, shape, work, relu=relu)


def backward(
    dy: Array,
    saved: Kept,
    x_shape: tuple[int, ...],
    weight: Array,
    dweight: Array | None,
    dbias: Array | None,
    shape: Convolution,
    work: Workspace,
    *,
    needs_dx: bool,
) -> Array | None:
    """Write dW (out, c/group, kh, kw) and db (out,); return dx (n, h, w, c) if `needs_dx`.

    After a forward pass with `relu`, dy must already be zero where y is zero.
    """
    body = pick(dy, cpu.backward, gpu.backward)
    return body(dy, saved, x_shape, weight, dweight, dbias, shape, work, needs_dx=needs_dx)


def transpose(
    y: Array, x_shape: tuple[int, ...], weight: Array, shape: Convolution, work: Workspace
) -> Array:
    """The transpose of the convolution, x (n, h, w, c) for y (n, oh, ow, out): its gradient by x.

    The result is valid until the next call with this workspace.
    """
    return pick(y, cpu.transpose, gpu.transpose)(y, x_shape, weight, shape, work)
