"""Local response normalisation on the host, with windows summed by shifted additions.

Across channels there is a compiled loop, which keeps all temporaries in the cache.

A running sum would lose digits by cancellation.
"""

import numpy as np

from cupy_kernels import compilation
from cupy_kernels.ops.lrn import loops
from cupy_kernels.ops.lrn.window import Lrn
from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace


def across(x: Array, rule: Lrn, work: Workspace) -> Array:
    """y (..., c) for x (..., c)."""
    if compilation.COMPILED:
        y = work.take("y", x.shape)
        loops.lrn(_rows(x), *_numbers(rule), _rows(y))
        return y
    return np.multiply(
        x, _raise_power(_across_scale(x, rule, work), rule), out=work.take("y", x.shape)
    )


def across_backward(dy: Array, x: Array, rule: Lrn, work: Workspace) -> Array:
    """dx; it computes the scales again."""
    if compilation.COMPILED:
        dx = work.take("dx", x.shape)
        loops.lrn_backward(_rows(dy), _rows(x), *_numbers(rule), _rows(dx))
        return dx
    return _gradient(dy, x, _across_scale(x, rule, work), rule, (x.ndim - 1,), work)


def within(x: Array, rule: Lrn, work: Workspace) -> tuple[Array, Array]:
    """(y, s) for x (n, h, w, c); k must be 1 in the rule."""
    scale = _window_sums(np.square(x), rule.size, (1, 2), work.take("scale", x.shape))
    scale *= np.float32(rule.alpha / rule.size**2)
    scale += np.float32(1)
    return np.multiply(x, _raise_power(scale, rule), out=work.take("y", x.shape)), scale


def within_backward(dy: Array, x: Array, scale: Array, rule: Lrn, work: Workspace) -> Array:
    """dx, given the scale s from the forward pass."""
    return _gradient(dy, x, scale, rule, (1, 2), work)


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _numbers(rule: Lrn) -> tuple[int, np.float32, np.float32, np.float32]:
    """Half the window, the factor of its sum of squares, the constant, and the power."""
    factor, constant = np.float32(rule.alpha / rule.size), np.float32(rule.k)
    return rule.size // 2, factor, constant, np.float32(rule.beta)


def _across_scale(x: Array, rule: Lrn, work: Workspace) -> Array:
    scale = _window_sums(np.square(x), rule.size, (x.ndim - 1,), work.take("scale", x.shape))
    scale *= np.float32(rule.alpha / rule.size)
    scale += np.float32(rule.k)
    return scale


def _gradient(
    dy: Array, x: Array, scale: Array, rule: Lrn, axes: tuple[int, ...], work: Workspace
) -> Array:
    direct = np.multiply(dy, _raise_power(scale, rule), out=work.take("dx", x.shape))
    sums = _window_sums(direct * x / scale, rule.size, axes, work.take("sums", x.shape))
    sums *= x
    sums *= np.float32(2 * rule.alpha * rule.beta / rule.size ** len(axes))
    return np.subtract(direct, sums, out=direct)


def _raise_power(scale: Array, rule: Lrn) -> Array:
    """scale^-beta, for beta 0.75 by two roots, which are faster than a power."""
    if rule.beta == 0.75:
        root = np.sqrt(scale)
        root *= np.sqrt(root)
        return np.reciprocal(root)
    return np.asarray(np.power(scale, np.float32(-rule.beta)), np.float32)


def _window_sums(values: Array, size: int, axes: tuple[int, ...], out: Array) -> Array:
    """The sum over the `size` elements around each, along each axis; overwrites `values`."""
    for axis in axes:
        lines, sums = np.moveaxis(values, axis, 0), np.moveaxis(out, axis, 0)
        np.copyto(sums, lines)
        for shift in range(1, min(size // 2 + 1, len(lines))):
            sums[shift:] += lines[:-shift]
            sums[:-shift] += lines[shift:]
        if axis != axes[-1]:
            np.copyto(values, out)
    return out
