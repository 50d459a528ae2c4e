"""Softmax over the last axis, the cross-entropy loss on it, and accuracy.

p = exp(x - max x) / sum exp(x - max x). Loss = -sum log(max(p[label], FLT_MIN)) / divisor, and its
gradient by x is (p - onehot(label)) / divisor, zero where the label is ignored. The divisor is a
number, or, for None, the number of rows that count, and at least 1. Scores are (rows, classes),
labels (rows,) of int64. Scalar results are arrays without axes on the device of the scores.
"""

from cupy_kernels.backends import HostOperation
from cupy_kernels.ops.softmax import cpu, gpu

softmax = HostOperation(cpu.softmax).with_kernels(gpu.softmax)
softmax_backward = HostOperation(cpu.softmax_backward).with_kernels(gpu.softmax_backward)
whole_labels = HostOperation(cpu.whole_labels).with_kernels(gpu.whole_labels)
cross_entropy = HostOperation(cpu.cross_entropy).with_kernels(gpu.cross_entropy)
cross_entropy_backward = HostOperation(cpu.cross_entropy_backward).with_kernels(
    gpu.cross_entropy_backward
)
accuracy = HostOperation(cpu.accuracy).with_kernels(gpu.accuracy)
class_accuracies = HostOperation(cpu.class_accuracies).with_kernels(gpu.class_accuracies)
