"""Compiled loops of batch normalisation on the host; without numba `cpu` uses NumPy."""

from typing import Any

import numpy as np

from cupy_kernels.compilation import compile_loop

Array = Any  # numba infers the loops' types, not these annotations


@compile_loop
def moments(x: Array, sums: Array, squares: Array) -> None:
    """The columns' sums, and sums of squares, of x minus its first row, in float64.

    Short runs of rows are added in float32 first.
    """
    # Without this shift, the squares of values far from 0 would cancel in the variance.
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
