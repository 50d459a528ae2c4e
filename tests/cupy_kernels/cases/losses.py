"""Cases of `losses.cu`: rows of one class and of many, kinks, labels that are ignored or wrong."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from cupy_kernels.ops.softmax.spec import NOTHING_IGNORED
from tests.support.kernel_check import Case

SHAPES = ((0, 3), (1, 1), (9, 10), (3, 70))


def cases() -> Iterator[Case]:
    generator = np.random.default_rng(109)
    for rows, k in SHAPES:
        yield from by_class(generator, rows, k)
        yield from pairs(generator, rows, k)
    for n in (0, 1, 300):
        x, targets = 4 * generator.standard_normal(n, np.float32), generator.random(n, np.float32)
        x[::9] *= 20  # no exponential may overflow
        targets[::4] = 1
        arrays = {"x": x, "targets": targets, "losses": x, "dx": x}
        for ignored in (np.nan, 1.0):
            numbers = {"scale": np.array([0.125], np.float32), "ignored": ignored, "n": n}
            yield Case("sigmoid_loss", {**arrays, **numbers}, grid=(1, 1, 1))


def by_class(generator: np.random.Generator, rows: int, k: int) -> Iterator[Case]:
    x, p = generator.standard_normal((rows, k), np.float32), generator.random((rows, k), np.float32)
    x[::2, ::3], p[::3, ::2] = -1, 0
    matrix = generator.standard_normal((k, k), np.float32)
    labels = generator.integers(0, k, rows)
    wrong = labels.copy()
    wrong[::3], wrong[1::4] = k, -1
    written: dict[str, Any] = {"losses": np.empty(rows, np.float32), "dx": x}
    shape = {"rows": rows, "k": k}
    for given in (labels, wrong):
        for rule in range(3):
            arrays = {"x": p if rule == 2 else x, "labels": given, **written}
            numbers = {"rule": rule, "factor": 0.25, **shape}
            yield Case("class_loss", {**arrays, **numbers}, grid=(1, 1, 1))
        for ignored in (NOTHING_IGNORED, -1):
            scale = np.array([0.125], np.float32)
            arrays = {"p": p, "labels": given, "matrix": matrix, "scale": scale, **written}
            yield Case("infogain_loss", {**arrays, "ignored": ignored, **shape})


def pairs(generator: np.random.Generator, rows: int, width: int) -> Iterator[Case]:
    a, b = generator.standard_normal((2, rows, width), np.float32) / np.float32(width**0.5)
    b[::4] = a[::4]  # no distance
    similar = generator.integers(0, 2, rows).astype(np.float32)
    arrays = {"a": a, "b": b, "similar": similar, "losses": np.empty(rows, np.float32), "da": a}
    for legacy in (0, 1):
        numbers = {"margin": 1.5, "legacy": legacy, "factor": 0.5, "rows": rows, "width": width}
        yield Case("contrastive_loss", {**arrays, **numbers}, grid=(1, 1, 1))
