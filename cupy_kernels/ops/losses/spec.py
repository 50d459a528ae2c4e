"""Rows of `losses.cu`: losses by class, of pairs, and of targets, each with its gradient."""

from enum import IntEnum
from typing import Any

import numpy as np

from cupy_kernels.kernel_spec import Kernel, Tolerance, over, reads, scalar, warps_over, writes
from cupy_kernels.ops.softmax.spec import SMALLEST
from cupy_kernels.types import Wide


class ClassRule(IntEnum):
    """The rule by which the scores of a row, with the label of its true class, give its loss.

    HINGE is the sum of max(0, 1 + score), with the true class's score negated, and SQUARED_HINGE
    that of the squares. LOGARITHM is -log of the true class's score, a probability of at least
    1e-20.
    """

    HINGE = 0
    SQUARED_HINGE = 1
    LOGARITHM = 2


LEAST_PROBABILITY = 1e-20
NEAR = 1e-4
"""Added to a distance before it divides, in the gradient of `contrastive_loss`."""


def _class_loss(
    x: Wide, labels: Any, rule: int, factor: Any, rows: int, k: int, **_: Any
) -> dict[str, Any]:
    scores, is_true = x.reshape(rows, k), np.arange(k) == labels[:, None]
    if rule == ClassRule.LOGARITHM:
        p = np.maximum(scores, LEAST_PROBABILITY)
        losses, slopes = np.where(is_true, -np.log(p), 0), np.where(is_true, -1 / p, 0)
    else:
        sign = np.where(is_true, -1, 1)
        margin = np.maximum(0, 1 + sign * scores)
        losses, slopes = margin, sign * (margin > 0)
        if rule == ClassRule.SQUARED_HINGE:
            losses, slopes = margin**2, 2 * sign * margin
    known = (labels >= 0) & (labels < k)
    return {
        "losses": np.where(known, losses.sum(axis=1), np.nan),
        "dx": np.where(known[:, None], float(factor) * slopes, np.nan),
    }


def _infogain_loss(
    p: Wide, labels: Any, matrix: Wide, scale: Wide, ignored: int, rows: int, k: int, **_: Any
) -> dict[str, Any]:
    losses, dx = np.zeros(rows), np.zeros((rows, k))
    for row, label in enumerate(labels):
        if label == ignored:
            continue
        if not 0 <= label < k:
            losses[row], dx[row] = np.nan, np.nan
            continue
        gain, probabilities = matrix.reshape(k, k)[label], p.reshape(rows, k)[row]
        losses[row] = -gain @ np.log(np.maximum(probabilities, SMALLEST))
        dx[row] = scale[0] * (probabilities * gain.sum() - gain)
    return {"losses": losses, "dx": dx}


def _sigmoid_loss(x: Wide, targets: Wide, scale: Wide, ignored: Any, **_: Any) -> dict[str, Any]:
    counts = targets != float(ignored)
    slopes = 1 / (1 + np.exp(-x)) - targets
    return {
        "losses": counts * (np.logaddexp(0, x) - x * targets),
        "dx": counts * scale[0] * slopes,
    }


def _contrastive_loss(
    a: Wide, b: Wide, similar: Any, margin: Any, legacy: int, factor: Any, **shape: Any
) -> dict[str, Any]:
    apart = (a - b).reshape(shape["rows"], shape["width"])
    square = np.square(apart).sum(axis=1)
    distance = np.sqrt(square)
    lack = np.maximum(float(margin) - (square if legacy else distance), 0)
    other, slope = (lack, -np.sign(lack)) if legacy else (lack**2, -lack / (distance + NEAR))
    slope = np.where(similar != 0, 1, slope)
    return {
        "losses": np.where(similar != 0, square, other),
        "da": float(factor) * slope[:, None] * apart,
    }


_CLOSE = Tolerance(1e-5, 1e-6)

ROWS = (
    Kernel(
        "class_loss",
        "losses.cu",
        (
            reads("x", "rows*k"),
            reads("labels", "rows", "i8"),
            writes("losses", "rows"),
            writes("dx", "rows*k"),
            scalar("rule", "i4"),
            scalar("factor", "f4"),
            scalar("rows"),
            scalar("k", "i4"),
        ),
        warps_over("rows"),
        _class_loss,
        bytes_each=8,
        tolerance=_CLOSE,
    ),
    Kernel(
        "infogain_loss",
        "losses.cu",
        (
            reads("p", "rows*k"),
            reads("labels", "rows", "i8"),
            reads("matrix", "k*k"),
            reads("scale", "1"),
            writes("losses", "rows"),
            writes("dx", "rows*k"),
            scalar("ignored"),
            scalar("rows"),
            scalar("k", "i4"),
        ),
        warps_over("rows"),
        _infogain_loss,
        bytes_each=8,
        tolerance=Tolerance(1e-5, 5e-6),
    ),
    Kernel(
        "sigmoid_loss",
        "losses.cu",
        (
            reads("x", "n"),
            reads("targets", "n"),
            reads("scale", "1"),
            writes("losses", "n"),
            writes("dx", "n"),
            scalar("ignored", "f4"),
            scalar("n"),
        ),
        over("n"),
        _sigmoid_loss,
        bytes_each=16,
        tolerance=_CLOSE,
    ),
    Kernel(
        "contrastive_loss",
        "losses.cu",
        (
            reads("a", "rows*width"),
            reads("b", "rows*width"),
            reads("similar", "rows"),
            writes("losses", "rows"),
            writes("da", "rows*width"),
            scalar("margin", "f4"),
            scalar("legacy", "i4"),
            scalar("factor", "f4"),
            scalar("rows"),
            scalar("width"),
        ),
        warps_over("rows"),
        _contrastive_loss,
        bytes_each=12,
        tolerance=_CLOSE,
    ),
)
