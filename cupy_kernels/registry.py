"""Every kernel, by name.

A subject's rows are in `cupy_kernels/kernel_specs/`, next to the float64 references that they name;
its CUDA source is in `cupy_kernels/cuda/`. A new subject takes one line here. A test compares the
rows with the sources: each kernel has a row, each row has a kernel, and their C types are the same.
"""

from cupy_kernels.kernel_spec import Kernel
from cupy_kernels.kernel_specs import (
    channels,
    codecs,
    convolution,
    convolution_unrolled,
    dropout,
    elementwise,
    embedding,
    layout,
    losses,
    normalisation,
    pooling,
    recurrent,
    reduction,
    softmax,
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
    losses,
    normalisation,
    pooling,
    recurrent,
    reduction,
    softmax,
    convolution_unrolled,
    updates,
)

KERNELS: dict[str, Kernel] = {row.name: row for subject in SUBJECTS for row in subject.ROWS}
