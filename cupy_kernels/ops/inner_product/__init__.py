"""Inner product (a fully connected layer): one matrix product forward, two backward."""

from cupy_kernels.backends import HostOperation
from cupy_kernels.ops.inner_product import cpu, gpu

forward = HostOperation(cpu.forward).with_kernels(gpu.forward)
backward = HostOperation(cpu.backward).with_kernels(gpu.backward)
