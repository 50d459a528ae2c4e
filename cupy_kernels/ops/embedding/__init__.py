"""Embedding: rows of a table by id, and their gradient as sums over equal ids.

It uses neither atomics nor scatter: a batch's positions are sorted by id, equal ids in batch order,
and each row's gradient is one sum in that order, with the same bits in every run.
"""

from cupy_kernels.backends import HostOperation
from cupy_kernels.ops.embedding import cpu, gpu

gather = HostOperation(cpu.gather).with_kernels(gpu.gather)
gather_backward = HostOperation(cpu.gather_backward).with_kernels(gpu.gather_backward)
