"""Rows of `dropout.cu`. The reference draws its words one by one in Python's integers."""

from typing import Any

import numpy as np

from cupy_kernels.kernel_spec import EXACT, Kernel, Tolerance, over, reads, scalar, writes
from cupy_kernels.types import Wide

_LOW = 2**32 - 1


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds over Python's integers (Salmon et al. 2011, section 3.3)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _LOW, (a >> 32) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3


def draw_words(n: int, step: int, layer: int, seed: int) -> Any:
    """The word of each of n elements."""
    key = (seed & _LOW, seed >> 32)
    groups = [philox((g, step >> 32, step & _LOW, layer), key) for g in range(-(-n // 4))]
    return np.array(groups, np.int64).reshape(-1)[:n]


def _philox_words(step: Any, seed: Any, layer: Any, n: int, **_: Any) -> dict[str, Any]:
    return {"words": draw_words(n, int(step[0]), int(layer), int(seed))}


def _dropout_apply(
    x: Wide, step: Any, seed: Any, layer: Any, limit: Any, scale: Any, n: int, **_: Any
) -> dict[str, Any]:
    dropped = draw_words(n, int(step[0]), int(layer), int(seed)) < int(limit)
    return {"y": np.where(dropped, 0, float(scale) * x)}


_QUADRUPLES = over(lambda sizes: -(-sizes["n"] // 4))
RANDOM_KEY = (reads("step", "1", "u8"), scalar("seed", "u8"), scalar("layer", "u4"))


ROWS = (
    Kernel(
        "dropout_apply",
        "dropout.cu",
        (
            reads("x", "n"),
            writes("y", "n"),
            *RANDOM_KEY,
            scalar("limit", "u4"),
            scalar("scale", "f4"),
            scalar("n"),
        ),
        _QUADRUPLES,
        _dropout_apply,
        bytes_each=8,
        tolerance=Tolerance(1e-6, 0),
        in_place=(("x", "y"),),
    ),
    Kernel(
        "philox_words",
        "dropout.cu",
        (writes("words", "n", "u4"), *RANDOM_KEY, scalar("n")),
        _QUADRUPLES,
        _philox_words,
        bytes_each=4,
        tolerance=EXACT,
    ),
)
