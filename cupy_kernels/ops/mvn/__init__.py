"""Mean-variance normalisation of the rows of matrices (rows, width), as Caffe's MVN.

    y = (x - mean) / (deviation + epsilon), with deviation = sqrt(mean((x - mean)^2))
    dx = (dy - mean(dy)) / (deviation + epsilon) - y * mean(dy * y) / deviation

With an epsilon of None, y = x - mean. Results are valid until the next call with the same
workspace.
"""

from cupy_kernels.backends import HostOperation
from cupy_kernels.ops.mvn import cpu, gpu

forward = HostOperation(cpu.forward).with_kernels(gpu.forward)
backward = HostOperation(cpu.backward).with_kernels(gpu.backward)
