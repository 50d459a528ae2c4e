"""Two-dimensional convolution (cross-correlation, as every deep-learning library has it).

y[n, p, q, o] = b[o] + sum over i, j, c of
                x[n, p*sh - ph + i*dh, q*sw - pw + j*dw, c] * W[o, c, i, j]
"""

from cupy_kernels.backends import pick
from cupy_kernels.cpu import convolution as on_host
from cupy_kernels.gpu import convolution as in_kernels
from cupy_kernels.types import Array, Kept
from cupy_kernels.window_shapes import Convolution
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
    body = pick(x, on_host.forward, in_kernels.forward)
    return body(x, weight, bias, shape, work, relu=relu)


def backward(
    dy: Array,
    kept: Kept,
    x_shape: tuple[int, ...],
    weight: Array,
    dweight: Array | None,
    dbias: Array | None,
    shape: Convolution,
    work: Workspace,
    *,
    wanted: bool,
) -> Array | None:
    """Write dW (out, c/group, kh, kw) and db (out,); return dx (n, h, w, c) if `wanted`.

    After a forward pass with `relu`, dy must already be zero where y is zero.
    """
    body = pick(dy, on_host.backward, in_kernels.backward)
    return body(dy, kept, x_shape, weight, dweight, dbias, shape, work, wanted=wanted)


def transposed(
    y: Array, x_shape: tuple[int, ...], weight: Array, shape: Convolution, work: Workspace
) -> Array:
    """The transpose of the convolution, x (n, h, w, c) for y (n, oh, ow, out): its gradient by x.

    The result is valid until the next call with this workspace.
    """
    return pick(y, on_host.transposed, in_kernels.transposed)(y, x_shape, weight, shape, work)
