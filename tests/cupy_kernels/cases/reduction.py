"""Cases of `reduction.cu`: rows below a warp and above a chunk, ties, NaN, no elements."""

from collections.abc import Iterator

import numpy as np

from cupy_kernels.ops.reduction.spec import CHUNK, chunks
from tests.support.kernel_check import Case

SHAPES = ((0, 5), (3, 0), (1, 1), (5, 33), (40, 3), (2, CHUNK), (2, 2 * CHUNK + 5))


def cases() -> Iterator[Case]:
    generator = np.random.default_rng(101)
    for rows, width in SHAPES:
        a, b = generator.standard_normal((2, rows * width), np.float32)
        a[::7] = 0
        dy = generator.standard_normal(rows, np.float32)
        sums = np.empty(rows * chunks(width), np.float32)
        shape = {"factor": 0.5, "rows": rows, "width": width}
        scale = np.array([3], np.float32)
        products = {"a": a, "b": b, "scale": scale, "sums": sums}
        yield Case("row_sums", {**products, "term": 0, **shape})
        for term in range(3):
            one = (1, 1, 1)
            yield Case("row_sums", {"a": a, "sums": sums, "term": term, **shape}, grid=one)
            yield Case("row_sums_backward", {"dy": dy, "x": a, "dx": a, "term": term, **shape})
    for rows, width, count in ((0, 3, 2), (1, 1, 1), (3, 70, 70), (17, 5, 2)):
        x = generator.integers(-2, 3, (rows, width)).astype(np.float32)
        x[::2, ::3], x[1::2, ::2] = np.nan, -np.inf
        found = np.empty((rows, count), np.float32)
        numbers = {"rows": rows, "width": width, "count": count}
        arrays = {"x": x, "places": found, "values": found.copy()}
        yield Case("row_largest", {**arrays, **numbers}, grid=(1, 1, 1))
