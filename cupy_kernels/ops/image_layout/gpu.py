"""Memory orders of images in kernels: each image is a matrix, transposed in tiles."""

import numpy as np

from cupy_kernels import backends
from cupy_kernels.launch import launch
from cupy_kernels.types import AnyArray, Array


def channels_first(x: Array, out: Array) -> None:
    n, h, w, c = x.shape
    launch("transpose_floats", x=x, y=out, mean=None, scale=1.0, n=n, rows=h * w, columns=c)


def channels_last(x: Array, out: Array) -> None:
    if x.flags.c_contiguous:
        images(x, None, 1.0, out)
    else:
        backends.copy(x.transpose(0, 2, 3, 1), out)


def images(pixels: AnyArray, mean: Array | None, scale: float, out: Array) -> None:
    n, c, h, w = pixels.shape
    kernel = "transpose_bytes" if pixels.dtype == np.uint8 else "transpose_floats"
    launch(kernel, x=pixels, y=out, mean=mean, scale=scale, n=n, rows=c, columns=h * w)
