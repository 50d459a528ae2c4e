"""The reference for pooling: float64, by simple loops, from the formula.

It shares no code with the fast versions, and its gradients are checked against finite differences.
Blobs are channels-first (n, c, h, w).
"""

from itertools import product

import numpy as np

from cupy_kernels.types import Wide

Pair = tuple[int, int]


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
