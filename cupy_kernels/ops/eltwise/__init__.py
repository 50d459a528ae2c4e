"""Sums, products, quotients and maxima of several blobs of one shape, and sums of gradients.

Results are valid until the next call with the same workspace. Each blob's gradient has its own
memory, by the blob's `index`.
"""

from cupy_kernels.backends import HostOperation
from cupy_kernels.ops.eltwise import cpu, gpu

accumulate = HostOperation(cpu.accumulate).with_kernels(gpu.accumulate)
weighted_sum = HostOperation(cpu.weighted_sum).with_kernels(gpu.weighted_sum)
weighted_sum_backward = HostOperation(cpu.weighted_sum_backward).with_kernels(
    gpu.weighted_sum_backward
)
product = HostOperation(cpu.product).with_kernels(gpu.product)
product_backward = HostOperation(cpu.product_backward).with_kernels(gpu.product_backward)
quotient = HostOperation(cpu.quotient).with_kernels(gpu.quotient)
maximum = HostOperation(cpu.maximum).with_kernels(gpu.maximum)
maximum_backward = HostOperation(cpu.maximum_backward).with_kernels(gpu.maximum_backward)
