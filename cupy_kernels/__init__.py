"""Ground floor: numerical kernels, arrays in and arrays out. Imports nothing above it.

Each subject is one file (`convolution`, `pooling`, `softmax`, ...) of operations, the same for all
arrays; `places` says where an array lives, and so which of an operation's two bodies computes:
NumPy's in `host`, the CPU twin, or the kernels' in `launches`. Beside them `reference` holds the
same functions in float64, slow and written straight from the formula; the tests compare all three.
Activations are channels-last (n, h, w, c), because there a convolution's unrolling is one strided
copy; parameters keep Caffe's own layout, so that weight files are straight copies.

The CUDA C kernels live in `cuda/`, one `.cu` file a subject; `rows/` says of each what it takes,
what it should give and what it may cost, and `registry` lists them. `launch` checks and runs one:
on a GPU through `device`, the only file that imports CuPy, or in `emulator`, which executes the
same source on the CPU. `nvrtc` compiles the sources where there is no GPU.
docs/explanation/kernels.md tells how to add a kernel, and an operation.
"""
