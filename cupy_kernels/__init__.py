"""Ground floor: numerical kernels, arrays in and arrays out. Imports nothing above it.

Each subject is one file (`convolution`, `pooling`, `inner_product`, `activation`, `softmax`,
`dropout`) of plain functions on float32 NumPy arrays: the CPU twin. Beside them `reference` holds
the same functions in float64, slow and written straight from the formula; the tests compare the
two. Activations are channels-last (n, h, w, c), because there a convolution's unrolling is one
strided copy; parameters keep Caffe's own layout, so that weight files are straight copies.

CUDA C sources belong in `cupy_kernels/cuda/`, one `.cu` file a subject, and are compiled and
launched by the file of the same subject here. `device` is the only file that imports CuPy.
"""
