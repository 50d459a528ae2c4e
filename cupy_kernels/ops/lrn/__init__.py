"""Caffe's local response normalisation (Krizhevsky et al. 2012), across channels and within one.

With s the scale, over images (n, h, w, c) and zero outside of them:
    across  s[c] = k + alpha / size * sum of x^2 over `size` channels around c
    within  s[p, q] = 1 + alpha / size^2 * sum of x^2 over size x size places around (p, q)
    y = x * s^-beta
    dx = dy * s^-beta - 2 * alpha * beta / size (or size^2) * x * sum of dy * y / s over the window
Results are valid until the next call with the same workspace.
"""

from cupy_kernels.backends import pick
from cupy_kernels.ops.lrn import cpu, gpu
from cupy_kernels.ops.lrn.window import Lrn
from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace


def across(x: Array, rule: Lrn, work: Workspace) -> Array:
    """y (..., c) for x (..., c)."""
    return pick(x, cpu.across, gpu.across)(x, rule, work)


def across_backward(dy: Array, x: Array, rule: Lrn, work: Workspace) -> Array:
    """dx; it computes the scales again."""
    return pick(dy, cpu.across_backward, gpu.across_backward)(dy, x, rule, work)


def within(x: Array, rule: Lrn, work: Workspace) -> tuple[Array, Array]:
    """(y, s) for x (n, h, w, c); k must be 1 in the rule."""
    return pick(x, cpu.within, gpu.within)(x, rule, work)


def within_backward(dy: Array, x: Array, scale: Array, rule: Lrn, work: Workspace) -> Array:
    """dx, given the scale s from the forward pass."""
    body = pick(dy, cpu.within_backward, gpu.within_backward)
    return body(dy, x, scale, rule, work)
