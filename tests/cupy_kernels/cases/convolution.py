"""Cases of `convolution.cu`: odd sizes, every border rule, and inner products."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from cupy_kernels.ops.convolution.window import Convolution
from tests.support.kernel_check import Case

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
    "fours of channels": (2, (5, 4), (8, 36), Convolution((3, 3), stride=(2, 1), pad=(1, 1))),
    "groups of fours": (1, (4, 3), (4, 4), Convolution((2, 3), pad=(1, 0), group=2)),
}
# Tiles of the greater sides, on products that they cover in part, once, and more than once.
LARGE = {
    "a corner of a tile": (64, (1, (5, 4), (3, 5), Convolution((2, 2)))),
    "wide rows": (64, (5, (4, 4), (36, 68), Convolution((1, 1)))),
    "a tile's fours": (128, (1, (9, 8), (12, 20), Convolution((3, 3), pad=(1, 1)))),
    "two tiles of 128": (128, (1, (12, 11), (7, 3), Convolution((2, 2)))),
}


def cases() -> Iterator[Case]:
    for seed, (label, shape) in enumerate(SHAPES.items()):
        yield from three_ways(shape, seed, label=label, side=0)
    for seed, (label, (side, shape)) in enumerate(LARGE.items()):
        yield from three_ways(shape, seed, label=label, side=side)
    yield from sums()


def three_ways(shape_of: Any, seed: int, *, label: str, side: int) -> Iterator[Case]:
    """A convolution and its gradients in every precision; what is optional, every other time."""
    n, size, channels, rule = shape_of
    generator = np.random.default_rng(seed)
    shape = {**sizes(n, size, channels, rule), "packed": int(seed % 3 != 1), "side": side}
    x = generator.standard_normal((n, *size, shape["c"]), np.float32)
    dy = generator.standard_normal((n, shape["oh"], shape["ow"], shape["o"]), np.float32)
    weight = generator.standard_normal((shape["o"], channels[0], *rule.kernel), np.float32)
    bias = generator.standard_normal(shape["o"], np.float32)
    splits = 1 + seed % 3
    parts = np.empty((splits, *weight.shape), np.float32)
    forward = {"x": x, "weight": weight, "bias": bias if seed % 2 else None, "y": dy}
    if seed % 4 > 1:
        forward["residual"] = generator.standard_normal(dy.shape, np.float32)
    data = {"dy": dy, "weight": weight, "mask": x if seed % 2 else None, "dx": x}
    weights = {"x": x, "dy": dy, "parts": parts, "splits": splits}
    for kind in ("fp32", "tf32", "bf16"):
        relu = {"relu": seed % 2}
        yield Case(f"conv_forward_{kind}", {**forward, **shape, **relu}, label=label)
        yield Case(f"conv_backward_data_{kind}", {**data, **shape}, label=label)
        yield Case(f"conv_backward_weight_{kind}", {**weights, **shape}, label=label)


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
    for filters, channels, window, splits in ((1, 1, 1, 1), (3, 5, 6, 2), (7, 4, 9, 3)):
        n = filters * channels * window
        x = generator.standard_normal((splits, n), np.float32)
        order = {"n": n, "channels": channels, "window": window}
        yield Case("sum_splits", {"parts": x, "y": x[0].copy(), "splits": splits, **order})
        yield Case("pack_weights", {"weight": x[0], "packed": x[0].copy(), **order})
