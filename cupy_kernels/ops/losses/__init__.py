"""Losses other than that of softmax, each with its gradient.

A loss is a sum over the batch over a divisor, an array without axes on the device of its inputs;
the gradient is that of the loss. Results are valid until the next call with the same workspace.
"""

from cupy_kernels.backends import HostOperation
from cupy_kernels.ops.losses import cpu, gpu

by_class = HostOperation(cpu.by_class).with_kernels(gpu.by_class)
infogain = HostOperation(cpu.infogain).with_kernels(gpu.infogain)
sigmoid_cross_entropy = HostOperation(cpu.sigmoid_cross_entropy).with_kernels(
    gpu.sigmoid_cross_entropy
)
contrastive = HostOperation(cpu.contrastive).with_kernels(gpu.contrastive)
