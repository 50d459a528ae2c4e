"""Cases of `convolution_unrolled.cu`: shapes of convolutions, products with all strides."""

from collections.abc import Iterator

import numpy as np

from tests.cupy_kernels.cases.convolution import SHAPES, sizes
from tests.support.kernel_check import Case


def cases() -> Iterator[Case]:
    for seed, (label, (n, size, channels, rule)) in enumerate(SHAPES.items()):
        shape = sizes(n, size, channels, rule)
        del shape["o"], shape["groups"]
        generator = np.random.default_rng(seed)
        x = generator.standard_normal((n, *size, shape["c"]), np.float32)
        count = n * shape["oh"] * shape["ow"]
        windows = (count, shape["c"], *rule.kernel)
        columns = generator.standard_normal(windows, np.float32)
        yield Case("im2col", {"x": x, "columns": columns, **shape}, label=label)
        yield Case("col2im", {"columns": columns, "dx": x, **shape}, label=label)
    yield from products()


def products() -> Iterator[Case]:
    """Plain, with a transposed right side, with a transposed left side into a wider matrix."""
    for rows, columns, depth in ((1, 1, 1), (17, 5, 35), (16, 33, 16), (3, 2, 0), (0, 4, 2)):
        generator = np.random.default_rng(rows)
        a = generator.standard_normal(rows * depth, np.float32)
        b = generator.standard_normal(depth * columns, np.float32)
        shape = {"rows": rows, "columns": columns, "depth": depth}
        for strides in (
            {"a_row": depth, "a_step": 1, "b_step": columns, "b_column": 1, "y_row": columns},
            {"a_row": depth, "a_step": 1, "b_step": 1, "b_column": depth, "y_row": columns},
            {"a_row": 1, "a_step": rows, "b_step": columns, "b_column": 1, "y_row": columns + 3},
        ):
            y = np.full(rows * strides["y_row"], 7, np.float32)
            yield Case("strided_product", {"a": a, "b": b, "y": y, **shape, **strides})
