"""Cases of `softmax.cu`: rows of one class and of many, ties, labels that are ignored or wrong."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from cupy_kernels.ops.softmax.spec import NOTHING_IGNORED
from tests.support.kernel_check import Case

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
    yield from wide_rows(generator)
    yield from shares(generator)


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
    arrays = {"labels": labels, "scale": scale}
    yield Case("loss_scale", {**arrays, "ignored": ignored, "rows": rows})


def wide_rows(generator: np.random.Generator) -> Iterator[Case]:
    """A row that shared memory can't hold whole; NaN, and infinities that are no maximum."""
    numbers = {"scale": np.array([0.5], np.float32), "ignored": NOTHING_IGNORED}
    for rows, k in ((1, 40_008), (3, 20), (3, 21)):
        x = generator.standard_normal((rows, k), np.float32)
        if rows > 1:
            x[0, :9], x[1, 3] = -np.inf, np.nan
        labels = generator.integers(9, k, rows)
        arrays = {"x": x, "dx": np.empty_like(x), "losses": np.empty(rows, np.float32)}
        shape = {"labels": labels, "rows": rows, "k": k}
        yield Case("softmax_loss_wide", {**arrays, **numbers, **shape}, label="wide")


def shares(generator: np.random.Generator) -> Iterator[Case]:
    """Verdicts of 0, 1 and 2 (not counted), whole batches of each, classes that nobody has."""
    share = np.empty(1, np.float32)
    for rows, k in ((0, 3), (1, 1), (255, 4), (1000, 7)):
        labels = generator.integers(0, k, rows)
        for verdicts in (3, 1):
            hits = generator.integers(0, verdicts, rows).astype(np.uint8)
            yield Case("hit_share", {"hits": hits, "share": share, "rows": rows})
            each = {"shares": np.empty(k + 1, np.float32), "rows": rows, "k": k + 1}
            yield Case("class_shares", {"hits": hits, "labels": labels, **each}, grid=(2, 1, 1))
    x = np.array([0, 3, -1, 2.5, np.nan, np.inf, -np.inf, 1e20, 2**24], np.float32)
    labels = np.empty(len(x), np.int64)
    yield Case("labels_from_floats", {"x": x, "labels": labels, "n": len(x)})
