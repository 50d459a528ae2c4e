"""Every kernel, by name.

A subject's rows stand in `cupy_kernels/kernel_specs/`, beside the float64 references they name; its
CUDA source in `cupy_kernels/cuda/`. A new subject takes one line here. A test holds the rows
against the sources: no kernel without a row, no row without a kernel, and the same C types in both.
"""

from cupy_kernels.kernel import Kernel
from cupy_kernels.kernel_specs import (
    channels,
    codecs,
    convolution,
    dropout,
    elementwise,
    embedding,
    layout,
    normalisation,
    pooling,
    softmax,
    unrolled,
    updates,
)

SUBJECTS = (
    channels,
    codecs,
    convolution,
    dropout,
    elementwise,
    embedding,
    layout,
    normalisation,
    pooling,
    softmax,
    unrolled,
    updates,
)

KERNELS: dict[str, Kernel] = {row.name: row for subject in SUBJECTS for row in subject.ROWS}
