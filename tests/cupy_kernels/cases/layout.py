"""Cases of `image_layout.cu`: tiles that are full, ragged and single, with and without a mean."""

from collections.abc import Iterator

import numpy as np

from tests.support.kernel_check import Case

SHAPES = ((0, 3, 4), (1, 1, 1), (2, 3, 35), (3, 33, 32), (1, 70, 5))


def cases() -> Iterator[Case]:
    generator = np.random.default_rng(91)
    for n, rows, columns in SHAPES:
        shape = {"n": n, "rows": rows, "columns": columns}
        size = n * rows * columns
        floats = generator.standard_normal(size, np.float32)
        pixels = generator.integers(0, 256, size, np.uint8)
        mean = 100 * generator.random(rows, np.float32)
        for kernel, x in (("transpose_floats", floats), ("transpose_bytes", pixels)):
            for given, scale in ((None, 1.0), (mean, 0.25)):
                numbers = {"mean": given, "scale": scale, **shape}
                yield Case(kernel, {"x": x, "y": np.empty(size, np.float32), **numbers})
    more = {"mean": None, "scale": 1.0, "n": 3, "rows": 33, "columns": 32}
    x = generator.standard_normal(3 * 33 * 32, np.float32)
    yield Case("transpose_floats", {"x": x, "y": np.empty_like(x), **more}, grid=(1, 2, 1))
