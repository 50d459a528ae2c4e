"""Cases of `pooling.cu`: windows that overlap, leave gaps, hang over the border, cover all."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from cupy_kernels.ops.pooling.window import Pooling
from tests.support.kernel_check import Case

# n, h, w, c and the pooling.
SHAPES = (
    (2, 8, 8, 4, Pooling((2, 2), (2, 2))),
    (1, 7, 9, 3, Pooling((3, 3), (2, 2))),
    (2, 5, 4, 8, Pooling((3, 2), (1, 2), (1, 0))),
    (1, 5, 5, 5, Pooling((2, 2), (3, 3))),
    (1, 6, 8, 2, Pooling((3, 3), (2, 2))),
    (1, 7, 7, 2, Pooling((3, 3), (2, 2), (1, 1), round_up=False)),
    (1, 5, 5, 1, Pooling((4, 4), (4, 4), (2, 2))),
    (3, 1, 1, 4, Pooling((1, 1))),
    (2, 4, 6, 40, Pooling((4, 6))),
    (0, 4, 4, 4, Pooling((2, 2), (2, 2))),
)
GLOBAL = (1, 17, 17, 2, Pooling((17, 17)))


def cases() -> Iterator[Case]:
    generator = np.random.default_rng(53)
    for n, h, w, c, pooling in (*SHAPES, GLOBAL):
        oh, ow = pooling.output(h, w)
        # Few distinct values, so that ties are frequent.
        x = generator.integers(-2, 3, n * h * w * c).astype(np.float32)
        dy = generator.standard_normal(n * oh * ow * c, np.float32)
        sizes = {"n": n, "h": h, "w": w, "c": c, "oh": oh, "ow": ow}
        numbers: dict[str, Any] = {**sizes, **pairs(pooling)}
        yield Case("average_pool_forward", {"x": x, "y": dy, **numbers})
        yield Case("average_pool_backward", {"dy": dy, "dx": x, **numbers}, grid=(3, 1, 1))
        if not any(pooling.pad):
            yield stochastic(np.abs(x), dy, numbers)
        for suffix, kind in (("", np.uint8), ("_wide", np.uint16)):
            if suffix or pooling.kernel != (17, 17):
                yield from maxima(suffix, x, dy, np.empty(dy.size, kind), numbers)


def stochastic(x: Any, dy: Any, numbers: dict[str, Any]) -> Case:
    """Of small whole numbers, whose sums are exact in any order; some windows hold only zeros."""
    where = np.empty(dy.size, np.uint16)
    key = {"step": np.array([2**33], np.uint64), "seed": 2**50 + 1, "layer": 7}
    return Case("stochastic_pool_forward", {"x": x, "y": dy, "where": where, **key, **numbers})


def pairs(pooling: Pooling) -> dict[str, int]:
    """Kernel, stride and padding under the names that the kernels have for them."""
    named = {"k": pooling.kernel, "s": pooling.stride, "p": pooling.pad}
    return {name + axis: pair[i] for name, pair in named.items() for i, axis in enumerate("hw")}


def maxima(suffix: str, x: Any, dy: Any, where: Any, numbers: dict[str, Any]) -> Iterator[Case]:
    yield Case(f"max_pool_forward{suffix}", {"x": x, "y": dy, "where": where, **numbers})
    cells = places(np.random.default_rng(x.size), numbers).astype(where.dtype)
    yield Case(f"max_pool_backward{suffix}", {"dy": dy, "where": cells, "dx": x, **numbers})


def places(generator: np.random.Generator, a: dict[str, Any]) -> Any:
    """A random cell inside the image for each window."""
    low_high = []
    for axis, size, count in (("h", "h", "oh"), ("w", "w", "ow")):
        start = np.arange(a[count]) * a["s" + axis] - a["p" + axis]
        low_high.append((np.maximum(0, -start), np.minimum(a["k" + axis], a[size] - start)))
    shape = (a["n"], a["oh"], a["ow"], a["c"])
    (top, bottom), (left, right) = low_high
    rows = generator.integers(top[:, None, None], bottom[:, None, None], shape)
    columns = generator.integers(left[:, None], right[:, None], shape)
    return (rows * a["kw"] + columns).reshape(-1)
