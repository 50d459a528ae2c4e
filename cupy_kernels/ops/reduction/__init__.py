"""Reductions along the rows of matrices (rows, width): sums of terms, and the largest values.

Results are valid until the next call with the same workspace.
"""

from cupy_kernels.backends import HostOperation
from cupy_kernels.ops.reduction import cpu, gpu

row_sums = HostOperation(cpu.row_sums).with_kernels(gpu.row_sums)
row_sums_backward = HostOperation(cpu.row_sums_backward).with_kernels(gpu.row_sums_backward)
row_largest = HostOperation(cpu.row_largest).with_kernels(gpu.row_largest)
