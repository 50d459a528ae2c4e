"""Memory orders of images on the host: views, and one strided copy."""

import numpy as np

from cupy_kernels.types import AnyArray, Array


def channels_first(x: Array, out: Array) -> None:
    """Copy (n, h, w, c), contiguous, into `out` (n, c, h, w)."""
    np.copyto(out, x.transpose(0, 3, 1, 2))


def channels_last(x: Array, out: Array) -> None:
    """Copy (n, c, h, w) into `out` (n, h, w, c)."""
    np.copyto(out, x.transpose(0, 2, 3, 1), casting="unsafe")


def images(pixels: AnyArray, mean: Array | None, scale: float, out: Array) -> None:
    """Write (pixels - mean) * scale of (n, c, h, w) into `out` (n, h, w, c); mean is (c,).

    Pixels are bytes or float32; on the host they may be any numbers.
    """
    seen = pixels.transpose(0, 2, 3, 1)
    if mean is None:
        np.multiply(seen, np.float32(scale), out=out, casting="same_kind")
    else:
        np.subtract(seen, mean, out=out)
        np.multiply(out, np.float32(scale), out=out)
