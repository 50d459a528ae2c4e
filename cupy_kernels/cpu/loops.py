"""Compiled loops of the host's layers: each reads and writes memory once, where NumPy needs passes.

Without numba the callers use NumPy. Images are (n, h, w, c), contiguous; `rule` is a window's
(kh, kw, sh, sw, ph, pw, dh, dw): kernel, stride, pad and dilation.
"""

from typing import Any

import numpy as np

from cupy_kernels.update_loops import COMPILED, compiled

Array = Any  # numba infers the loops' types, not these annotations
Rule = tuple[int, ...]

__all__ = ["COMPILED"]


@compiled
def _copy(source: Array, out: Array) -> None:
    # Indices from 0 alone are known not to be negative, and vectorise.
    for k in range(len(out)):
        out[k] = source[k]


@compiled
def _add(source: Array, out: Array) -> None:
    for k in range(len(out)):
        out[k] += source[k]


@compiled
def unroll(x: Array, first: int, rule: Rule, lines: tuple[int, int], columns: Array) -> None:
    """Copy the windows of output lines [start, stop) of each image, 0 outside of the image.

    `columns` is (n, lines, ow, kh, kw, each): the channels [first, first + each).
    """
    kh, kw, sh, sw, ph, pw, dh, dw = rule
    n, h, w, c = x.shape
    each, ow = columns.shape[5], columns.shape[2]
    source, out, at, run = x.reshape(-1), columns.reshape(-1), 0, kw * columns.shape[5]
    whole = dw == 1 and each == c
    for image in range(n):
        for p in range(lines[0], lines[1]):
            for q in range(ow):
                left = q * sw - pw
                for i in range(kh):
                    y = p * sh - ph + i * dh
                    start = ((image * h + y) * w + left) * c + first
                    into = out[at : at + run]
                    if y < 0 or y >= h:
                        into[:] = 0
                    elif whole and left >= 0 and left + kw <= w:
                        _copy(source[start : start + run], into)
                    else:
                        for j in range(kw):
                            tap, part = start + j * dw * c, into[j * each : (j + 1) * each]
                            if 0 <= left + j * dw < w:
                                _copy(source[tap : tap + each], part)
                            else:
                                part[:] = 0
                    at += run


@compiled
def fold(columns: Array, first: int, rule: Rule, lines: tuple[int, int], x: Array) -> None:
    """Add each element of `columns` to the place in x that `unroll` copies it from."""
    kh, kw, sh, sw, ph, pw, dh, dw = rule
    n, h, w, c = x.shape
    each, ow = columns.shape[5], columns.shape[2]
    into, source, at, run = x.reshape(-1), columns.reshape(-1), 0, kw * columns.shape[5]
    whole = dw == 1 and each == c
    for image in range(n):
        for p in range(lines[0], lines[1]):
            for q in range(ow):
                left = q * sw - pw
                for i in range(kh):
                    y = p * sh - ph + i * dh
                    start = ((image * h + y) * w + left) * c + first
                    taps = source[at : at + run]
                    if 0 <= y < h:
                        if whole and left >= 0 and left + kw <= w:
                            _add(taps, into[start : start + run])
                        else:
                            for j in range(kw):
                                if 0 <= left + j * dw < w:
                                    tap = start + j * dw * c
                                    part = taps[j * each : (j + 1) * each]
                                    _add(part, into[tap : tap + each])
                    at += run


@compiled
def finish(rows: Array, bias: Array, relu: bool) -> None:
    """Add the bias, unless it is empty, to each row (..., channels); with `relu`, no negatives."""
    for r in range(len(rows)):
        row = rows[r]
        if len(bias) == len(row):
            _add(bias, row)
        if relu:
            for k in range(len(row)):
                row[k] = row[k] if not row[k] < 0 else np.float32(0)
