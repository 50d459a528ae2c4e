"""Cases of `softmax.cu`: rows of one class and of many, ties, labels that are ignored or wrong."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from cupy_kernels.rows.softmax import NOTHING_IGNORED, VALID
from tests.cupy_kernels.kernel_check import Case

SHAPES = ((0, 3), (1, 1), (9, 10), (17, 33), (3, 700))


def cases() -> Iterator[Case]:
    generator = np.random.default_rng(67)
    for rows, k in SHAPES:
        shape = {"rows": rows, "k": k}
        x, dy = 3 * generator.standard_normal((2, rows * k), np.float32)
        x[::5] *= 30  # far apart: some probabilities underflow
        p = generator.random(rows * k, np.float32)
        yield Case("softmax_forward", {"x": x, "p": x, **shape}, grid=(1, 1, 1))
        yield Case("softmax_backward", {"dy": dy, "p": p, "dx": dy, **shape})
        labels = generator.integers(0, k, rows)
        for ignored, marked in ((NOTHING_IGNORED, labels), (2, labels), (-1, spoilt(labels, k))):
            yield from losses(x, marked, ignored, rows, k)
        scores = generator.integers(0, 4, rows * k).astype(np.float32)
        for top_k, ignored in ((1, 2), (3, NOTHING_IGNORED)):
            counted = {"labels": labels, "ignored": ignored, "top_k": top_k, **shape}
            hits = np.empty(rows, np.uint8)
            yield Case("top_k_hits", {"scores": scores, "hits": hits, **counted})
    yield from totals(generator)


def spoilt(labels: Any, k: int) -> Any:
    """With labels that no class has."""
    labels = labels.copy()
    labels[::3], labels[1::4] = k, -1
    return labels


def losses(x: Any, labels: Any, ignored: int, rows: int, k: int) -> Iterator[Case]:
    written = {"losses": np.empty(rows, np.float32), "dx": np.empty_like(x)}
    given = {"x": x, "labels": labels, "scale": np.array([0.125], np.float32), "ignored": ignored}
    for kernel in ("softmax_loss", "softmax_loss_wide"):
        yield Case(kernel, {**given, **written, "rows": rows, "k": k}, grid=(2, 1, 1))
    scale = np.empty(1, np.float32)
    for mode, fixed in ((VALID, 0.0), (1, 64.0), (1, 0.5)):
        numbers = {"ignored": ignored, "weight": 0.3, "fixed": fixed, "mode": mode, "rows": rows}
        yield Case("loss_scale", {"labels": labels, "scale": scale, **numbers})


def totals(generator: np.random.Generator) -> Iterator[Case]:
    for n in (0, 1, 255, 1000):
        values, scale = generator.random(n, np.float32), np.array([0.25], np.float32)
        total = np.empty(1, np.float32)
        yield Case("scaled_total", {"values": values, "scale": scale, "total": total, "n": n})
