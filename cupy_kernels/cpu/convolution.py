"""Convolution on the host.

Chellapilla et al. 2006: unroll the input's windows into a matrix, once, and leave the arithmetic
to GEMM. Channels-last, the unrolling is a single strided copy with contiguous runs of kw*c floats.
If those runs are short (a first layer's 1 or 3 channels) the matrix is built transposed, with runs
of a whole output row; GEMM accepts both.

The gradient by the input is summed over the kernel taps: for each a GEMM into a buffer that stays
in the cache, then one shifted addition. That reads and writes far less memory than folding the
whole unrolled gradient.
"""

import numpy as np

from cupy_kernels.conv_shapes import Convolution
from cupy_kernels.types import Array, Kept
from cupy_kernels.workspace import Workspace

SHORT_RUN = 16


def forward(
    x: Array,
    weight: Array,
    bias: Array | None,
    shape: Convolution,
    work: Workspace,
    *,
    relu: bool,
) -> tuple[Array, Kept]:
    """Keeps the unrolled windows, one (n*oh*ow, kh*kw*c/group) matrix for each group."""
    n, h, w, _ = x.shape
    oh, ow = shape.output(h, w)
    out = weight.shape[0]
    columns = unroll(_padded(x, shape.pad, work), (oh, ow), shape, work)
    y = work.take("y", (n, oh, ow, out))
    rows, each = y.reshape(-1, out), out // shape.group
    for g, windows in enumerate(columns):
        kernel = weight[g * each : (g + 1) * each].transpose(2, 3, 1, 0).reshape(-1, each)
        np.matmul(windows, kernel, out=rows[:, g * each : (g + 1) * each])
    if bias is not None:
        # A whole output row at a time: numpy's loop over `out` floats alone is three times slower.
        lines = y.reshape(n * oh, ow * out)
        np.add(lines, np.tile(bias, ow), out=lines)
    if relu:
        np.maximum(y, np.float32(0.0), out=y)
    return y, tuple(columns)


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
    n, oh, ow, out = dy.shape
    rows, each = dy.reshape(-1, out), out // shape.group
    if dbias is not None:
        ones = np.ones(n * oh, np.float32)
        lines = ones @ dy.reshape(n * oh, ow * out)
        np.sum(lines.reshape(ow, out), axis=0, out=dbias)
    if dweight is not None:
        kh, kw = shape.kernel
        for g, windows in enumerate(kept):
            part = slice(g * each, (g + 1) * each)
            kernel = np.matmul(rows[:, part].T, windows)
            dweight[part] = kernel.reshape(each, kh, kw, -1).transpose(0, 3, 1, 2)
    return transposed(dy, x_shape, weight, shape, work) if wanted else None


def unroll(x: Array, output: tuple[int, int], shape: Convolution, work: Workspace) -> list[Array]:
    """The windows of a padded x, a matrix for each group; rows (n, oh, ow), columns (i, j, c).

    The matrix is row-major, or column-major if a window's rows are short.
    """
    n, _, _, c = x.shape
    (oh, ow), (kh, kw), each = output, shape.kernel, c // shape.group
    sn, sy, sx, sc = x.strides
    across = (sn, sy * shape.stride[0], sx * shape.stride[1])
    within = (sy * shape.dilation[0], sx * shape.dilation[1], sc)
    found = []
    for g in range(shape.group):
        source = x[..., g * each : (g + 1) * each]
        if kw * each < SHORT_RUN:
            matrix = work.take(f"columns{g}", (kh, kw, each, n, oh, ow))
            np.copyto(matrix, _strided(source, matrix.shape, within + across))
            found.append(matrix.reshape(kh * kw * each, n * oh * ow).T)
        else:
            matrix = work.take(f"columns{g}", (n, oh, ow, kh, kw, each))
            np.copyto(matrix, _strided(source, matrix.shape, across + within))
            found.append(matrix.reshape(n * oh * ow, kh * kw * each))
    return found


def _padded(x: Array, pad: tuple[int, int], work: Workspace) -> Array:
    if pad == (0, 0):
        return x
    n, h, w, c = x.shape
    ph, pw = pad
    wide = work.zeros("padded", (n, h + 2 * ph, w + 2 * pw, c))
    wide[:, ph : ph + h, pw : pw + w] = x
    return wide


def _strided(source: Array, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    return np.lib.stride_tricks.as_strided(source, shape, strides, writeable=False)


def transposed(
    y: Array, x_shape: tuple[int, ...], weight: Array, shape: Convolution, work: Workspace
) -> Array:
    n, oh, ow, out = y.shape
    _, h, w, c = x_shape
    (ph, pw), (sh, sw), (dh, dw) = shape.pad, shape.stride, shape.dilation
    rows, into, each = out // shape.group, c // shape.group, y.reshape(-1, out)
    taps = np.ascontiguousarray(weight.transpose(2, 3, 0, 1))
    padded = work.zeros("dpadded", (n, h + 2 * ph, w + 2 * pw, c))
    part = work.take("dtap", (n * oh * ow, into))
    for i in range(shape.kernel[0]):
        for j in range(shape.kernel[1]):
            lines = slice(i * dh, i * dh + (oh - 1) * sh + 1, sh)
            target = padded[:, lines, j * dw : j * dw + (ow - 1) * sw + 1 : sw]
            for g in range(shape.group):
                mine = slice(g * rows, (g + 1) * rows)
                np.matmul(each[:, mine], taps[i, j, mine], out=part)
                reached = target[..., g * into : (g + 1) * into]
                np.add(reached, part.reshape(n, oh, ow, into), out=reached)
    if (ph, pw) == (0, 0):
        return padded
    dx = work.take("dx", x_shape)
    np.copyto(dx, padded[:, ph : ph + h, pw : pw + w])
    return dx
