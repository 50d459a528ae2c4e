"""Compiled loops of a convolution on the host; without numba `cpu` uses NumPy.

Images are (n, h, w, c), contiguous; `rule` is a window's (kh, kw, sh, sw, ph, pw, dh, dw):
kernel, stride, pad and dilation.
"""

from typing import Any

import numpy as np

from cupy_kernels.compilation import compile_loop

Array = Any  # numba infers the loops' types, not these annotations

Rule = tuple[int, ...]

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
                # In this form NaN stays NaN, which the loss then shows; a maximum would hide it.
                row[k] = row[k] if not row[k] < 0 else np.float32(0)
