"""Batch normalisation by channel (Ioffe and Szegedy 2015), with Caffe's running statistics.

    y = (x - mean) * deviate, times scale, plus shift;  deviate = 1 / sqrt(variance + epsilon)
    dx = scale * deviate * (dy - sum(dy) / rows - xhat * sum(dy * xhat) / rows)

Blobs are (..., channels); all axes but the channels are rows. Caffe's BatchNorm has no scale and no
shift; they belong to a Scale layer behind it. Results are valid until the next call with the same
workspace.
"""

from cupy_kernels.backends import HostOperation
from cupy_kernels.ops.batch_norm import cpu, gpu

statistics = HostOperation(cpu.statistics).with_kernels(gpu.statistics)
running_statistics = HostOperation(cpu.running_statistics).with_kernels(gpu.running_statistics)
forward = HostOperation(cpu.forward).with_kernels(gpu.forward)
backward = HostOperation(cpu.backward).with_kernels(gpu.backward)
