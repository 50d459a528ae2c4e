"""Caffe's local response normalisation (Krizhevsky et al. 2012), across channels and within one.

With s the scale, over images (n, h, w, c) and zero outside of them:
    across  s[c] = k + alpha / size * sum of x^2 over `size` channels around c
    within  s[p, q] = 1 + alpha / size^2 * sum of x^2 over size x size places around (p, q)
    y = x * s^-beta
    dx = dy * s^-beta - 2 * alpha * beta / size (or size^2) * x * sum of dy * y / s over the window
Results are valid until the next call with the same workspace.
"""

from cupy_kernels.backends import HostOperation
from cupy_kernels.ops.lrn import cpu, gpu

across = HostOperation(cpu.across).with_kernels(gpu.across)
across_backward = HostOperation(cpu.across_backward).with_kernels(gpu.across_backward)
within = HostOperation(cpu.within).with_kernels(gpu.within)
within_backward = HostOperation(cpu.within_backward).with_kernels(gpu.within_backward)
