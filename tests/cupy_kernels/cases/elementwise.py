"""Cases of `elementwise.cu`."""

from collections.abc import Iterator

import numpy as np

from tests.cupy_kernels.kernel_check import Case

SIZES = (0, 1, 31, 257, 1000)


def cases() -> Iterator[Case]:
    generator = np.random.default_rng(31)
    for n in SIZES:
        for slope in (0.0, 0.1):
            x, dy = generator.standard_normal((2, n), np.float32)
            x[::7] = 0
            yield Case("relu", {"x": x, "y": x, "slope": slope, "n": n}, grid=(2, 1, 1))
            yield Case("relu_backward", {"dy": dy, "x": x, "dx": x, "slope": slope, "n": n})
