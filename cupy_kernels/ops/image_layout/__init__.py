"""Memory orders of images: channels-last, for computation, and channels-first, for Caffe's files.

All functions fill an array of the caller, which must be contiguous and not overlap the input.
"""

from cupy_kernels.backends import HostOperation
from cupy_kernels.ops.image_layout import cpu, gpu

channels_first = HostOperation(cpu.channels_first).with_kernels(gpu.channels_first)
channels_last = HostOperation(cpu.channels_last).with_kernels(gpu.channels_last)
images = HostOperation(cpu.images).with_kernels(gpu.images)
