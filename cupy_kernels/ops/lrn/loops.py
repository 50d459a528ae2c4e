"""Compiled loops of local response normalisation across channels; without numba `cpu` uses NumPy.

Each reads and writes memory once, where NumPy needs passes.
"""

from typing import Any

import numpy as np

from cupy_kernels.compilation import compile_loop

Array = Any  # numba infers the loops' types, not these annotations


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
