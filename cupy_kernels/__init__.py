"""Numerical kernels, arrays in and arrays out: the lowest layer, which imports nothing above it.

Each subject is one file (`convolution`, `pooling`, `softmax`, ...) of operations, the same for all
arrays. `backends` finds the device of an array, and selects one of an operation's two
implementations: `cpu` in NumPy, or `gpu`, which launches kernels. `reference` has the same
functions in float64, slow and written directly from the formula; the tests compare all three.
Activations are channels-last (n, h, w, c), because a convolution's unrolling is then one strided
copy; parameters keep Caffe's own layout, so that weight files are plain copies.

The CUDA C kernels are in `cuda/`, one `.cu` file for each subject. `kernel_specs/` specifies the
parameters, expected results and cost of each, and `registry` lists them. `launch` checks and runs a
kernel: on a GPU through `device`, the only file that imports CuPy, or in `emulator`, which executes
the same source on the CPU. `nvrtc` compiles the sources on a machine without a GPU.
docs/explanation/kernels.md explains how to add a kernel, and an operation.
"""
