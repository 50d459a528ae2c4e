"""Cases of `convolution.cu`: odd sizes, every border rule, and inner products."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from cupy_kernels.convolution import Convolution
from tests.cupy_kernels.kernel_check import Case

# Images, height and width, channels of a group in and out, and the convolution.
SHAPES = {
    "one of each": (1, (1, 1), (1, 1), Convolution((1, 1))),
    "two tiles of pixels": (1, (9, 8), (3, 5), Convolution((3, 3), pad=(1, 1))),
    "strides, pads, dilation": (
        2,
        (7, 6),
        (5, 3),
        Convolution((3, 2), stride=(2, 3), pad=(2, 1), dilation=(1, 2)),
    ),
    "three groups": (1, (5, 4), (2, 3), Convolution((2, 2), pad=(0, 1), group=3)),
    "inner product of rows": (3, (1, 1), (70, 67), Convolution((1, 1))),
    "inner product of an image": (2, (3, 2), (3, 7), Convolution((3, 2))),
}


def cases() -> Iterator[Case]:
    for seed, (label, (n, size, channels, rule)) in enumerate(SHAPES.items()):
        generator = np.random.default_rng(seed)
        shape = sizes(n, size, channels, rule)
        x = generator.standard_normal((n, *size, shape["c"]), np.float32)
        dy = generator.standard_normal((n, shape["oh"], shape["ow"], shape["o"]), np.float32)
        weight = generator.standard_normal((shape["o"], channels[0], *rule.kernel), np.float32)
        bias = generator.standard_normal(shape["o"], np.float32)
        splits = 1 + seed % 3
        parts = np.empty((splits, *weight.shape), np.float32)
        forward = {"x": x, "weight": weight, "bias": bias if seed % 2 else None, "y": dy}
        data = {"dy": dy, "weight": weight, "mask": x if seed % 2 else None, "dx": x}
        weights = {"x": x, "dy": dy, "parts": parts, "splits": splits}
        for kind in ("fp32", "tf32", "bf16"):
            relu = {"relu": seed % 2}
            yield Case(f"conv_forward_{kind}", {**forward, **shape, **relu}, label=label)
            yield Case(f"conv_data_{kind}", {**data, **shape}, label=label)
            yield Case(f"conv_weight_{kind}", {**weights, **shape}, label=label)
    yield from sums()


def sizes(n: int, size: tuple[int, int], channels: tuple[int, int], rule: Convolution) -> Any:
    """A launch's scalars."""
    oh, ow = rule.output(*size)
    pairs = {"h": size[0], "w": size[1], "kh": rule.kernel[0], "kw": rule.kernel[1]}
    pairs |= {"sh": rule.stride[0], "sw": rule.stride[1], "ph": rule.pad[0], "pw": rule.pad[1]}
    pairs |= {"dh": rule.dilation[0], "dw": rule.dilation[1], "oh": oh, "ow": ow}
    c, o = (each * rule.group for each in channels)
    return {"n": n, "c": c, "o": o, "groups": rule.group, **pairs}


def sums() -> Iterator[Case]:
    generator = np.random.default_rng(40)
    for n, splits in ((0, 3), (1, 1), (257, 3), (300, 2)):
        x = generator.standard_normal((splits, n), np.float32)
        yield Case("sum_splits", {"parts": x, "y": x[0].copy(), "n": n, "splits": splits})
    for rows, columns, splits in ((1, 1, 1), (7, 259, 3), (2, 5, 3), (100, 10, 4)):
        x = generator.standard_normal((rows, columns), np.float32)
        parts = np.empty((splits, columns), np.float32)
        shape = {"rows": rows, "columns": columns, "splits": splits}
        yield Case("column_sums", {"x": x, "parts": parts, **shape})
