"""Operations by channel: scale and bias; and blobs that are concatenated and split.

Axes are in the order of memory: an image's channels are its last axis. Results are valid until the
next call with the same workspace.
"""

from cupy_kernels.backends import HostOperation
from cupy_kernels.ops.channels import cpu, gpu

scale = HostOperation(cpu.scale).with_kernels(gpu.scale)
scale_backward = HostOperation(cpu.scale_backward).with_kernels(gpu.scale_backward)
concatenate = HostOperation(cpu.concatenate).with_kernels(gpu.concatenate)
split = HostOperation(cpu.split).with_kernels(gpu.split)
