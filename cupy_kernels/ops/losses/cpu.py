"""Losses other than that of softmax, on the host; sums are in float64."""

import numpy as np

from cupy_kernels.ops.losses.spec import LEAST_PROBABILITY, NEAR, ClassRule
from cupy_kernels.ops.softmax.cpu import SMALLEST
from cupy_kernels.types import AnyArray, Array, Labels, Wide
from cupy_kernels.workspace import Workspace


def by_class(x: Array, labels: Labels, rule: ClassRule, work: Workspace) -> tuple[AnyArray, Array]:
    """(loss, dx): the mean over the rows of scores x (rows, classes)."""
    rows, true_cells = len(x), (np.arange(len(x)), labels)
    dx = work.take("dx", x.shape)
    if rule == ClassRule.LOGARITHM:
        true = np.maximum(x[true_cells].astype(np.float64), LEAST_PROBABILITY)
        dx.fill(0.0)
        dx[true_cells] = -1 / true / rows
        return np.asarray(-np.log(true).mean()), dx
    sign = np.ones_like(x)
    sign[true_cells] = -1
    margin = np.maximum(0, 1 + sign * x)
    slope = 2 * margin if rule == ClassRule.SQUARED_HINGE else np.sign(margin)
    np.multiply(sign, slope / np.float32(rows), out=dx)
    terms = np.square(margin) if rule == ClassRule.SQUARED_HINGE else margin
    return np.asarray(terms.sum(dtype=np.float64) / rows), dx


def infogain(
    p: Array,
    labels: Labels,
    matrix: Array,
    ignored: int | None,
    divisor: float | None,
    work: Workspace,
) -> tuple[AnyArray, Array]:
    """(loss, dx) for p (rows, k), a softmax of x: -sum of matrix[label, j] log p[j] over j.

    A divisor of None is the number of rows that count, and at least 1.
    """
    counted = np.ones(len(p), np.bool_) if ignored is None else labels != ignored
    gain = matrix[np.where(counted, labels, 0)] * counted[:, None]
    by = max(1.0, np.count_nonzero(counted) if divisor is None else divisor)
    loss = -(gain * np.log(np.maximum(p, np.float32(SMALLEST)).astype(np.float64))).sum() / by
    dx = work.take("dx", p.shape)
    np.multiply(p, gain.sum(axis=1, keepdims=True), out=dx)
    np.subtract(dx, gain, out=dx)
    return np.asarray(loss), np.divide(dx, np.float32(by), out=dx)


def sigmoid_cross_entropy(
    x: Array, targets: Array, ignored: int | None, divisor: float | None, work: Workspace
) -> tuple[AnyArray, Array, Array]:
    """(loss, losses, dx): log(1 + e^x) - x * target for each element; x and targets have one shape.

    A divisor of None is the number of targets that count, and at least 1.
    """
    wide: Wide = x.astype(np.float64)
    counted = np.ones(x.shape, np.bool_) if ignored is None else targets != ignored
    by = max(1.0, np.count_nonzero(counted) if divisor is None else divisor)
    losses, dx = (work.take(role, x.shape) for role in ("losses", "dx"))
    terms = (np.logaddexp(0, wide) - wide * targets) * counted
    np.copyto(losses, terms, casting="same_kind")
    slopes = (np.exp(-np.logaddexp(0, -wide)) - targets) * counted / by
    np.copyto(dx, slopes, casting="same_kind")
    return np.asarray(terms.sum() / by), losses, dx


def contrastive(
    a: Array, b: Array, similar: Array, margin: float, legacy: bool, work: Workspace
) -> tuple[AnyArray, Array]:
    """(loss, da) of pairs of rows (rows, width); db is -da (Hadsell et al. 2006).

    Half the mean of d^2 for similar pairs (not 0), of max(margin - d, 0)^2 for others, d being the
    distance; with `legacy`, others give max(margin - d^2, 0).
    """
    apart = (a - b).astype(np.float64)
    square = np.square(apart).sum(axis=1, keepdims=True)
    if legacy:
        other = np.maximum(margin - square, 0)
        slope = -np.sign(other)
    else:
        distance = np.sqrt(square)
        lack = np.maximum(margin - distance, 0)
        other, slope = np.square(lack), -lack / (distance + NEAR)
    alike = similar.reshape(-1, 1) != 0
    da = work.take("da", a.shape)
    np.copyto(da, np.where(alike, 1.0, slope) * apart / len(a), casting="same_kind")
    return np.asarray(np.where(alike, square, other).sum() / (2 * len(a))), da
