"""Numerical kernels, arrays in and arrays out: the lowest layer, which imports nothing above it.

Each operation (`convolution`, `pooling`, `softmax`, ...) is a folder of `ops/`. Its package has the
functions to call, the same for all arrays: `backends` finds the device of an array, and selects one
of two implementations, `cpu` in NumPy, or `gpu`, which launches kernels. The CUDA C source is next
to them, and `spec` has for each of its kernels the parameters, the cost and a float64 reference,
which is slow and written directly from the formula. The tests compare all three. Activations are
channels-last (n, h, w, c), because a convolution's unrolling is then one strided copy; parameters
keep Caffe's own layout, so that weight files are plain copies.

`registry` collects the kernels of all operations. `launch` checks and runs a kernel: on a GPU
through `cupy_device`, the only file that imports CuPy, or in `emulator`, which executes the same
source on the CPU. `nvrtc` compiles the sources on a machine without a GPU. `headers/` has what
several sources include. docs/explanation/kernels.md explains how to add an operation.
"""
