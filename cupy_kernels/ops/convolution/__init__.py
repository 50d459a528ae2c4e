"""Two-dimensional convolution (cross-correlation, as every deep-learning library has it).

y[n, p, q, o] = b[o] + sum over i, j, c of
                x[n, p*sh - ph + i*dh, q*sw - pw + j*dw, c] * W[o, c, i, j]
"""

from cupy_kernels.backends import HostOperation
from cupy_kernels.ops.convolution import cpu, gpu

forward = HostOperation(cpu.forward).with_kernels(gpu.forward)
backward = HostOperation(cpu.backward).with_kernels(gpu.backward)
transpose = HostOperation(cpu.transpose).with_kernels(gpu.transpose)
