"""Compiled loops of the host's layers: each reads and writes memory once, where NumPy needs passes.

Without numba the callers use NumPy. Images are (n, h, w, c), contiguous; `rule` is a window's
(kh, kw, sh, sw, ph, pw, dh, dw): kernel, stride, pad and dilation.
"""

from typing import Any

import numpy as np

from cupy_kernels.ops.updates.cpu import COMPILED, compile_loop

Array = Any  # numba infers the loops' types, not these annotations
Rule = tuple[int, ...]

__all__ = ["COMPILED"]

_VECTOR = 16  # floats of the widest registers


@compile_loop
def _copy(source: Array, out: Array) -> None:
    # Indices from 0 alone are known not to be negative, and vectorise.
    for k in range(len(out)):
        out[k] = source[k]


@compile_loop
def _add(source: Array, out: Array) -> None:
    for k in range(len(out)):
        out[k] += source[k]


@compile_loop
def unroll(x: Array, first: int, rule: Rule, lines: tuple[int, int], columns: Array) -> None:
    """Copy the windows of output lines [start, stop) of each image, 0 left and right of the image.

    `columns` is (n, lines, ow, kh, kw, each): the channels [first, first + each). No window reaches
    above or below the image.
    """
    kh, kw, sh, sw, ph, pw, dh, dw = rule
    n, h, w, c = x.shape
    ow, channels = columns.shape[2], columns.shape[5]
    source, out, line, run = x.reshape(-1), columns.reshape(-1), 0, kw * columns.shape[5]
    long, step, dense = -(-run // _VECTOR) * _VECTOR, kh * run, dw == 1 and channels == c
    wide, count = (w + 2 * pw) * c, (lines[1] - lines[0] - 1) * sh + (kh - 1) * dh + 1
    padded = np.zeros(count * wide + _VECTOR if pw and kh else 0, np.float32)
    for image in range(n if kh else 0):
        start = (image * h + lines[0] * sh - ph) * w * c
        seen = source[start:]
        if pw:
            for y in range(count):
                to, off = y * wide + pw * c, start + y * w * c
                _copy(source[off : off + w * c], padded[to : to + w * c])
            seen = padded
        for p in range(lines[1] - lines[0]):
            for i in range(kh):
                at, tap = line + i * run, (p * sh + i * dh) * wide + first
                # Whole vectors are faster; the window's next rows overwrite the excess.
                fits = long <= (kh - i) * run and tap + (ow - 1) * sw * c + long <= len(seen)
                length = long if fits else run
                for q in range(ow):
                    spot, near = at + q * step, tap + q * sw * c
                    if dense:
                        _copy(seen[near : near + length], out[spot : spot + length])
                        continue
                    for _ in range(kw):
                        _copy(seen[near : near + channels], out[spot : spot + channels])
                        spot, near = spot + channels, near + dw * c
            line += ow * step


@compile_loop
def fold(columns: Array, first: int, rule: Rule, lines: tuple[int, int], x: Array) -> None:
    """Add each element of `columns` to the place in x that `unroll` copies it from."""
    kh, kw, sh, sw, ph, pw, dh, dw = rule
    n, h, w, c = x.shape
    ow, channels = columns.shape[2], columns.shape[5]
    into, source, line, run = x.reshape(-1), columns.reshape(-1), 0, kw * columns.shape[5]
    step, dense = kh * run, dw == 1 and channels == c
    wide, count = (w + 2 * pw) * c, (lines[1] - lines[0] - 1) * sh + (kh - 1) * dh + 1
    padded = np.zeros(count * wide if pw and kh else 0, np.float32)
    for image in range(n if kh else 0):
        start = (image * h + lines[0] * sh - ph) * w * c
        target = into[start:]
        if pw:
            padded[:], target = 0, padded
        for p in range(lines[1] - lines[0]):
            for i in range(kh):
                at, tap = line + i * run, (p * sh + i * dh) * wide + first
                for q in range(ow):
                    spot, near = at + q * step, tap + q * sw * c
                    if dense:
                        _add(source[spot : spot + run], target[near : near + run])
                        continue
                    for _ in range(kw):
                        _add(source[spot : spot + channels], target[near : near + channels])
                        spot, near = spot + channels, near + dw * c
            line += ow * step
        if pw:
            for y in range(count):
                off, to = y * wide + pw * c, start + y * w * c
                _add(padded[off : off + w * c], into[to : to + w * c])


@compile_loop
def finish(rows: Array, bias: Array, relu: bool) -> None:
    """Add the bias, unless it is empty, to each row (..., channels); with `relu`, no negatives."""
    for r in range(len(rows)):
        row = rows[r]
        if len(bias) == len(row):
            _add(bias, row)
        if relu:
            for k in range(len(row)):
                row[k] = row[k] if not row[k] < 0 else np.float32(0)


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
                        _add(x[image, p * sh - ph + i, q * sw - pw + j], total)
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


@compile_loop
def relu_backward(dy: Array, x: Array, slope: Any, dx: Array) -> None:
    """dy where x is above 0, slope * dy elsewhere; all flat."""
    for k in range(len(dx)):
        dx[k] = dy[k] if x[k] > 0 else slope * dy[k]


@compile_loop
def moments(x: Array, sums: Array, squares: Array) -> None:
    """The columns' sums, and sums of squares, of x minus its first row, in float64.

    Short runs of rows are added in float32 first.
    """
    first, channels = x[0], x.shape[1]
    near, far = np.empty(channels, np.float32), np.empty(channels, np.float32)
    for start in range(0, len(x), 64):
        near[:], far[:] = 0, 0
        for r in range(start, min(start + 64, len(x))):
            row = x[r]
            for k in range(channels):
                apart = row[k] - first[k]
                near[k] += apart
                far[k] += apart * apart
        for k in range(channels):
            sums[k] += near[k]
            squares[k] += far[k]


@compile_loop
def normalise(x: Array, mean: Array, factors: Array, shift: Array, y: Array) -> None:
    """(x - mean) * factors + shift, each (channels,), for rows x."""
    for r in range(len(x)):
        row, out = x[r], y[r]
        for k in range(len(row)):
            out[k] = (row[k] - mean[k]) * factors[k] + shift[k]


@compile_loop
def normal_sums(
    dy: Array, x: Array, mean: Array, deviate: Array, sums: Array, products: Array
) -> None:
    """The columns' sums of dy and of dy * (x - mean) * deviate, in float64 as in `moments`."""
    channels = x.shape[1]
    near, far = np.empty(channels, np.float32), np.empty(channels, np.float32)
    for start in range(0, len(x), 64):
        near[:], far[:] = 0, 0
        for r in range(start, min(start + 64, len(x))):
            row, gradients = x[r], dy[r]
            for k in range(channels):
                near[k] += gradients[k]
                far[k] += gradients[k] * ((row[k] - mean[k]) * deviate[k])
        for k in range(channels):
            sums[k] += near[k]
            products[k] += far[k]


@compile_loop
def normal_gradient(
    dy: Array, x: Array, mean: Array, factors: Array, shares: tuple[Array, Array], dx: Array
) -> None:
    """factors * (dy - shares[0] - (x - mean) * shares[1])."""
    ahead, along = shares
    for r in range(len(x)):
        row, gradients, out = x[r], dy[r], dx[r]
        for k in range(len(row)):
            out[k] = factors[k] * (gradients[k] - ahead[k] - (row[k] - mean[k]) * along[k])


@compile_loop
def _lrn_scale(row: Array, half: int, factor: Any, constant: Any, scale: Array) -> None:
    """scale = constant + factor * the sum of squares over the 2*half + 1 channels around each."""
    _window_sums(row, row, half, scale)
    for k in range(len(row)):
        scale[k] = constant + factor * scale[k]


@compile_loop
def _window_sums(a: Array, b: Array, half: int, sums: Array) -> None:
    c = len(a)
    for k in range(c):
        sums[k] = a[k] * b[k]
    for shift in range(1, min(half + 1, c)):
        low, high = sums[: c - shift], sums[shift:]
        a_low, b_low, a_high, b_high = a[: c - shift], b[: c - shift], a[shift:], b[shift:]
        for k in range(len(low)):
            low[k] += a_high[k] * b_high[k]
        for k in range(len(high)):
            high[k] += a_low[k] * b_low[k]


@compile_loop
def _raise_power(scale: Array, beta: Any, out: Array) -> None:
    """scale^-beta, for beta 0.75 by two roots, which are faster than a power."""
    if beta == np.float32(0.75):
        for k in range(len(scale)):
            root = np.sqrt(scale[k])
            out[k] = np.float32(1) / (root * np.sqrt(root))
    else:
        for k in range(len(scale)):
            out[k] = scale[k] ** -beta


@compile_loop
def lrn(x: Array, half: int, factor: Any, constant: Any, beta: Any, y: Array) -> None:
    """Local response normalisation across the columns of x."""
    scale = np.empty(x.shape[1], np.float32)
    for r in range(len(x)):
        row, out = x[r], y[r]
        _lrn_scale(row, half, factor, constant, scale)
        _raise_power(scale, beta, out)
        for k in range(len(row)):
            out[k] *= row[k]


@compile_loop
def lrn_backward(
    dy: Array, x: Array, half: int, factor: Any, constant: Any, beta: Any, dx: Array
) -> None:
    """The gradient of `lrn`; the scales are computed again."""
    channels = x.shape[1]
    scale, ratios, sums = (
        np.empty(channels, np.float32),
        np.empty(channels, np.float32),
        np.empty(channels, np.float32),
    )
    double = np.float32(2) * factor * beta
    for r in range(len(x)):
        row, gradients, out = x[r], dy[r], dx[r]
        _lrn_scale(row, half, factor, constant, scale)
        _raise_power(scale, beta, out)
        for k in range(channels):
            out[k] *= gradients[k]
            ratios[k] = row[k] / scale[k]
        _window_sums(out, ratios, half, sums)
        for k in range(channels):
            out[k] -= double * row[k] * sums[k]
