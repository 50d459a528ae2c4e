"""Ground floor: numerical kernels, arrays in and arrays out. Imports nothing above it.

Each subject is one file (`convolution`, `pooling`, `inner_product`, `activation`, `softmax`,
`dropout`) of plain functions on float32 NumPy arrays: the CPU twin. Beside them `reference` holds
the same functions in float64, slow and written straight from the formula; the tests compare the
two. Activations are channels-last (n, h, w, c), because there a convolution's unrolling is one
strided copy; parameters keep Caffe's own layout, so that weight files are straight copies.

The CUDA C kernels live in `cuda/`, one `.cu` file a subject; `rows/` says of each what it takes,
what it should give and what it may cost, and `registry` lists them. `launch` checks and runs one:
on a GPU through `device`, the only file that imports CuPy, or in `emulator`, which executes the
same source on the CPU. `nvrtc` compiles them where there is no GPU. docs/kernels.md tells how to
add one.
"""
