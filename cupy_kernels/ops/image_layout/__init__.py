"""Memory orders of images: channels-last, for computation, and channels-first, for Caffe's files.

All functions fill an array of the caller, which must be contiguous and not overlap the input.
"""

from cupy_kernels.backends import pick
from cupy_kernels.ops.image_layout import cpu, gpu
from cupy_kernels.types import AnyArray, Array


def channels_first(x: Array, out: Array) -> None:
    """Copy (n, h, w, c), contiguous, into `out` (n, c, h, w)."""
    pick(x, cpu.channels_first, gpu.channels_first)(x, out)


def channels_last(x: Array, out: Array) -> None:
    """Copy (n, c, h, w) into `out` (n, h, w, c)."""
    pick(x, cpu.channels_last, gpu.channels_last)(x, out)


def images(pixels: AnyArray, mean: Array | None, scale: float, out: Array) -> None:
    """Write (pixels - mean) * scale of (n, c, h, w) into `out` (n, h, w, c); mean is (c,).

    Pixels are bytes or float32; on the host they may be any numbers.
    """
    pick(pixels, cpu.images, gpu.images)(pixels, mean, scale, out)
