"""Max, average and stochastic pooling with Caffe's rules for the border.

The output size is rounded up (or down, on request). With padding on any side, a last window that
would start past the image (at or past size + pad, counted from the padding's edge) is dropped. A
maximum is taken over the window clipped to the image. An average is the sum over the window clipped
to the image, divided by the size of the window clipped to the image *with* its padding.

The forward pass of the maximum records the position of each maximum; among equal values the first
in reading order wins. The backward pass adds each gradient at that position.
"""

from cupy_kernels.backends import HostOperation
from cupy_kernels.ops.pooling import cpu, gpu

max_forward = HostOperation(cpu.max_forward).with_kernels(gpu.max_forward)
max_backward = HostOperation(cpu.max_backward).with_kernels(gpu.max_backward)
average_forward = HostOperation(cpu.average_forward).with_kernels(gpu.average_forward)
average_backward = HostOperation(cpu.average_backward).with_kernels(gpu.average_backward)
stochastic_forward = HostOperation(cpu.stochastic_forward).with_kernels(gpu.stochastic_forward)
stochastic_backward = HostOperation(cpu.stochastic_backward).with_kernels(gpu.stochastic_backward)
