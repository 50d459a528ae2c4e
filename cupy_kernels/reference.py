"""The reference for the kernels: every function in float64, from its formula, in Caffe's order.

It uses simple loops, is channels-first (n, c, h, w), and shares no code with the fast versions. The
backward functions are checked against finite differences of the forward ones. Sources: Caffe's
documented behaviour as restated in each docstring; `pooling` has the border rules of pooling.
"""

from itertools import product

import numpy as np

from cupy_kernels.types import Labels, Wide

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


def count_windows(size: Pair, kernel: Pair, stride: Pair, pad: Pair, round_up: bool) -> Pair:
    """The number of windows; with any padding, the last one must start before size + pad."""
    counts = []
    for s, k, d, p in zip(size, kernel, stride, pad, strict=True):
        exact = (s + 2 * p - k) / d
        count = int(np.ceil(exact) if round_up else np.floor(exact)) + 1
        counts.append(count - 1 if max(pad) > 0 and (count - 1) * d >= s + p else count)
    return counts[0], counts[1]


def pooling(
    x: Wide, mode: str, kernel: Pair, stride: Pair, pad: Pair, round_up: bool
) -> tuple[Wide, Wide]:
    """(y, W) for `mode` "max" or "average"; W[n,c,p,q,a,b] is the share of x[n,c,a,b] in y.

    A maximum's W is 1 at the first greatest cell of the window in reading order; an average's is
    1 / (cells of the window within the padded image) at each cell within the image.
    """
    n, c, h, w = x.shape
    oh, ow = count_windows((h, w), kernel, stride, pad, round_up)
    share = np.zeros((n, c, oh, ow, h, w))
    for m, k, p, q in product(range(n), range(c), range(oh), range(ow)):
        top, left_edge = p * stride[0] - pad[0], q * stride[1] - pad[1]
        bottom, right = min(top + kernel[0], h + pad[0]), min(left_edge + kernel[1], w + pad[1])
        area = (bottom - top) * (right - left_edge)
        inside = product(
            range(max(top, 0), min(bottom, h)), range(max(left_edge, 0), min(right, w))
        )
        cells = list(inside)
        if mode == "max":
            share[(m, k, p, q, *max(cells, key=lambda cell: x[(m, k, *cell)]))] = 1.0
        else:
            for cell in cells:
                share[(m, k, p, q, *cell)] = 1.0 / area
    return np.einsum("ncpqab,ncab->ncpq", share, x), share


def pooling_backward(dy: Wide, share: Wide) -> Wide:
    """dx = W^T dy."""
    return np.asarray(np.einsum("ncpqab,ncpq->ncab", share, dy))


def inner_product(x: Wide, weight: Wide, bias: Wide | None) -> Wide:
    """y = x W^T + b."""
    y = np.einsum("mk,ok->mo", x, weight)
    return np.asarray(y if bias is None else y + bias)


def inner_product_backward(dy: Wide, x: Wide, weight: Wide) -> tuple[Wide, Wide, Wide]:
    """(dx, dW, db) = (dy W, dy^T x, sum of dy)."""
    return np.einsum("mo,ok->mk", dy, weight), np.einsum("mo,mk->ok", dy, x), dy.sum(axis=0)


def relu(x: Wide, slope: float) -> Wide:
    """x above 0, slope * x elsewhere."""
    return np.where(x > 0, x, slope * x)


def relu_backward(dy: Wide, x: Wide, slope: float) -> Wide:
    """dy above 0, slope * dy elsewhere."""
    return np.where(x > 0, dy, slope * dy)


def softmax(x: Wide) -> Wide:
    """exp(x_k) / sum exp(x_j) over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def softmax_backward(dy: Wide, p: Wide) -> Wide:
    """dx_i = sum_j dy_j dp_j/dx_i with dp_j/dx_i = p_j (delta_ij - p_i)."""
    diagonal = np.einsum("...j,ji->...ji", p, np.eye(p.shape[-1]))
    jacobian = diagonal - p[..., :, None] * p[..., None, :]
    return np.asarray(np.einsum("...j,...ji->...i", dy, jacobian))


def cross_entropy(x: Wide, labels: Labels, ignored: int | None, divisor: float) -> float:
    """-sum log softmax(x)[label] / divisor over the rows with a label that is not ignored."""
    rows = [m for m, label in enumerate(labels) if label != ignored]
    return float(sum(-np.log(softmax(x[m])[labels[m]]) for m in rows) / divisor)


def cross_entropy_backward(x: Wide, labels: Labels, ignored: int | None, divisor: float) -> Wide:
    """(softmax(x) - onehot(label)) / divisor; a row of zeros if the label is ignored."""
    dx = np.zeros_like(x)
    for m, label in enumerate(labels):
        if label != ignored:
            dx[m] = (softmax(x[m]) - np.eye(x.shape[1])[label]) / divisor
    return dx


def accuracy(scores: Wide, labels: Labels, ignored: int | None, top_k: int) -> float:
    """The share of rows where fewer than top_k *other* classes score at least the true one's."""
    counted = [(row, label) for row, label in zip(scores, labels, strict=True) if label != ignored]
    good = [sum(row[k] >= row[t] for k in range(len(row)) if k != t) < top_k for row, t in counted]
    return float(np.mean(good)) if good else 0.0
