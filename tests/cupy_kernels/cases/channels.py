"""Cases of `channels.cu` and `column_sums.cu`."""

from collections.abc import Iterator

import numpy as np

from cupy_kernels.ops.reduction.column_sums_spec import chunks
from tests.support.kernel_check import Case

SHAPES = ((0, 3), (1, 1), (5, 33), (67, 3), (130, 32), (9, 100))


def cases() -> Iterator[Case]:
    generator = np.random.default_rng(47)
    for rows, columns in SHAPES:
        a, b = generator.standard_normal((2, rows * columns), np.float32)
        scale, bias = generator.standard_normal((2, columns), np.float32)
        shape = {"rows": rows, "columns": columns}
        for s, t in ((scale, bias), (scale, None), (None, bias)):
            yield Case("scale_forward", {"x": a, "scale": s, "bias": t, "y": a, **shape})
        yield Case("scale_backward", {"dy": a, "scale": scale, "dx": a, **shape}, grid=(2, 1, 1))
        sums = np.empty(chunks(rows) * columns, np.float32)
        for other in (b, None):
            yield Case("column_partials", {"a": a, "b": other, "partials": sums, **shape})
        for parts, add in ((1, 0), (7, 1), (128, 0)):
            partials = generator.standard_normal(parts * columns, np.float32)
            settings = {"factor": 0.5, "add": add, "chunks": parts, "columns": columns}
            yield Case("column_totals", {"partials": partials, "sums": scale, **settings})
        yield from moved(generator, rows, columns)


def moved(generator: np.random.Generator, rows: int, columns: int) -> Iterator[Case]:
    """Into the middle of a wider matrix, and from one."""
    narrow = generator.standard_normal(rows * columns, np.float32)
    wide = generator.standard_normal(rows * (columns + 5), np.float32)
    size = {"rows": rows, "width": columns}
    into = {"x_columns": columns, "x_first": 0, "y_columns": columns + 5, "y_first": 2}
    yield Case("copy_columns", {"x": narrow, "y": wide, **size, **into})
    out = {"x_columns": columns + 5, "x_first": 5, "y_columns": columns, "y_first": 0}
    yield Case("copy_columns", {"x": wide, "y": narrow, **size, **out})
