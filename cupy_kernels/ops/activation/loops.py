"""Compiled loops of activations on the host; without numba `cpu` uses NumPy."""

from typing import Any

from cupy_kernels.compilation import compile_loop

Array = Any  # numba infers the loops' types, not these annotations


@compile_loop
def relu_backward(dy: Array, x: Array, slope: Any, dx: Array) -> None:
    """dy where x is above 0, slope * dy elsewhere; all flat."""
    for k in range(len(dx)):
        dx[k] = dy[k] if x[k] > 0 else slope * dy[k]
