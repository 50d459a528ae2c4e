"""Compiled loops of a pooling on the host; without numba `cpu` uses NumPy.

Images are (n, h, w, c), contiguous; `rule` is a window's (kh, kw, sh, sw, ph, pw): kernel,
stride and pad.
"""

from typing import Any

import numpy as np

from cupy_kernels.compilation import compile_loop

Array = Any  # numba infers the loops' types, not these annotations

Rule = tuple[int, ...]


@compile_loop
def max_pool(x: Array, rule: Rule, y: Array, where: Array) -> None:
    """The maxima, and their places in their windows; the first wins, and NaN against numbers."""
    kh, kw, sh, sw, ph, pw = rule
    n, oh, ow, c = y.shape
    h, w = x.shape[1:3]
    for image in range(n):
        for p in range(oh):
            for q in range(ow):
                best, cells, first = y[image, p, q], where[image, p, q], True
                best[:], cells[:] = -np.inf, 0
                for i in range(max(0, ph - p * sh), min(kh, h + ph - p * sh)):
                    for j in range(max(0, pw - q * sw), min(kw, w + pw - q * sw)):
                        cell = where.dtype.type(i * kw + j)
                        values = x[image, p * sh - ph + i, q * sw - pw + j]
                        # Not compared with -infinity: if all values are
                        # -infinity, the place must still be in the image.
                        if first:
                            first = False
                            for k in range(c):
                                best[k], cells[k] = values[k], cell
                            continue
                        for k in range(c):
                            better = values[k] > best[k] or values[k] != values[k]
                            best[k] = values[k] if better else best[k]
                            cells[k] = cell if better else cells[k]


@compile_loop
def max_pool_backward(dy: Array, where: Array, rule: Rule, dx: Array) -> None:
    """Add each gradient to dx at the place of its maximum."""
    kh, kw, sh, sw, ph, pw = rule
    n, oh, ow, c = dy.shape
    h, w = dx.shape[1:3]
    into, offsets = dx.reshape(-1), np.empty(kh * kw, np.int64)
    for cell in range(kh * kw):
        offsets[cell] = (cell // kw * w + cell % kw) * c
    for image in range(n):
        for p in range(oh):
            for q in range(ow):
                gradients, cells = dy[image, p, q], where[image, p, q]
                corner = ((image * h + p * sh - ph) * w + q * sw - pw) * c
                for k in range(c):
                    spot = corner + offsets[cells[k]] + k
                    if 0 <= spot < len(into):  # a window outside of the image has no maximum
                        into[spot] += gradients[k]


@compile_loop
def average_pool(x: Array, rule: Rule, shares: Array, y: Array) -> None:
    """y += the windows' sums, then times each window's share (oh, ow)."""
    kh, kw, sh, sw, ph, pw = rule
    n, oh, ow, c = y.shape
    h, w = x.shape[1:3]
    for image in range(n):
        for p in range(oh):
            for q in range(ow):
                total, share = y[image, p, q], shares[p, q]
                for i in range(max(0, ph - p * sh), min(kh, h + ph - p * sh)):
                    for j in range(max(0, pw - q * sw), min(kw, w + pw - q * sw)):
                        values = x[image, p * sh - ph + i, q * sw - pw + j]
                        for k in range(c):
                            total[k] += values[k]
                for k in range(c):
                    total[k] *= share


@compile_loop
def average_pool_backward(dy: Array, rule: Rule, shares: Array, dx: Array) -> None:
    """Add each gradient, times its window's share, to every place of its window."""
    kh, kw, sh, sw, ph, pw = rule
    n, oh, ow, c = dy.shape
    h, w = dx.shape[1:3]
    for image in range(n):
        for p in range(oh):
            for q in range(ow):
                gradients, share = dy[image, p, q], shares[p, q]
                for i in range(max(0, ph - p * sh), min(kh, h + ph - p * sh)):
                    for j in range(max(0, pw - q * sw), min(kw, w + pw - q * sw)):
                        into = dx[image, p * sh - ph + i, q * sw - pw + j]
                        for k in range(c):
                            into[k] += gradients[k] * share
