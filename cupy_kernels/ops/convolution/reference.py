"""The reference for convolution: float64, by simple loops, from the formula.

It shares no code with the fast versions, and its gradients are checked against finite differences.
Blobs are channels-first (n, c, h, w).
"""

from itertools import product

import numpy as np

from cupy_kernels.types import Wide

Pair = tuple[int, int]


def convolution(
    x: Wide, weight: Wide, bias: Wide | None, stride: Pair, pad: Pair, dilation: Pair, group: int
) -> Wide:
    """y[n,o,p,q] = b[o] + sum x[n, c, p*sh-ph+i*dh, q*sw-pw+j*dw] W[o,c,i,j]; sizes round down."""
    n, _, h, w = x.shape
    out, _, kh, kw = weight.shape
    oh = (h + 2 * pad[0] - dilation[0] * (kh - 1) - 1) // stride[0] + 1
    ow = (w + 2 * pad[1] - dilation[1] * (kw - 1) - 1) // stride[1] + 1
    y = np.zeros((n, out, oh, ow))
    for g, p, q in product(range(group), range(oh), range(ow)):
        o = slice(g * (out // group), (g + 1) * (out // group))
        for c, a, b, i, j in _taps(g, p, q, x.shape, weight.shape, stride, pad, dilation):
            y[:, o, p, q] += np.outer(x[:, c, a, b], weight[o, c % weight.shape[1], i, j])
    return y if bias is None else y + bias[None, :, None, None]


def convolution_backward(
    dy: Wide, x: Wide, weight: Wide, stride: Pair, pad: Pair, dilation: Pair, group: int
) -> tuple[Wide, Wide, Wide]:
    """(dx, dW, db): the chain rule term by term over the same taps."""
    dx, dweight = np.zeros_like(x), np.zeros_like(weight)
    _, out, oh, ow = dy.shape
    for g, p, q in product(range(group), range(oh), range(ow)):
        o = slice(g * (out // group), (g + 1) * (out // group))
        for c, a, b, i, j in _taps(g, p, q, x.shape, weight.shape, stride, pad, dilation):
            k = c % weight.shape[1]
            dx[:, c, a, b] += dy[:, o, p, q] @ weight[o, k, i, j]
            dweight[o, k, i, j] += x[:, c, a, b] @ dy[:, o, p, q]
    return dx, dweight, dy.sum(axis=(0, 2, 3))


def _taps(
    group: int,
    p: int,
    q: int,
    x_shape: tuple[int, ...],
    w_shape: tuple[int, ...],
    stride: Pair,
    pad: Pair,
    dilation: Pair,
) -> list[tuple[int, int, int, int, int]]:
    """(channel, row, column, i, j) of each cell in the image that a group reads for (p, q)."""
    _, _, h, w = x_shape
    _, per_group, kh, kw = w_shape
    first = group * per_group
    taps = []
    for c, i, j in product(range(first, first + per_group), range(kh), range(kw)):
        a = p * stride[0] - pad[0] + i * dilation[0]
        b = q * stride[1] - pad[1] + j * dilation[1]
        if 0 <= a < h and 0 <= b < w:
            taps.append((c, a, b, i, j))
    return taps
