"""Losses other than that of softmax, each with its gradient.

A loss is a sum over the batch over a divisor, an array without axes on the device of its inputs;
the gradient is that of the loss. Results are valid until the next call with the same workspace.
"""

from enum import IntEnum

from cupy_kernels.backends import pick
from cupy_kernels.ops.losses import cpu, gpu
from cupy_kernels.ops.losses.spec import HINGE, LOGARITHM, SQUARED_HINGE
from cupy_kernels.types import AnyArray, Array, Labels
from cupy_kernels.workspace import Workspace


class ClassRule(IntEnum):
    """The rule by which the scores of a row, with the label of its true class, give its loss.

    HINGE is the sum of max(0, 1 + score), with the true class's score negated, and SQUARED_HINGE
    that of the squares. LOGARITHM is -log of the true class's score, a probability of at least
    1e-20.
    """

    HINGE = HINGE
    SQUARED_HINGE = SQUARED_HINGE
    LOGARITHM = LOGARITHM


def by_class(rule: ClassRule, x: Array, labels: Labels, work: Workspace) -> tuple[AnyArray, Array]:
    """(loss, dx): the mean over the rows of scores x (rows, classes)."""
    return pick(x, cpu.by_class, gpu.by_class)(rule, x, labels, work)


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
    body = pick(p, cpu.infogain, gpu.infogain)
    return body(p, labels, matrix, ignored, divisor, work)


def sigmoid_cross_entropy(
    x: Array, targets: Array, ignored: int | None, divisor: float | None, work: Workspace
) -> tuple[AnyArray, Array, Array]:
    """(loss, losses, dx): log(1 + e^x) - x * target for each element; x and targets have one shape.

    A divisor of None is the number of targets that count, and at least 1.
    """
    body = pick(x, cpu.sigmoid_cross_entropy, gpu.sigmoid_cross_entropy)
    return body(x, targets, ignored, divisor, work)


def contrastive(
    a: Array, b: Array, similar: Array, margin: float, legacy: bool, work: Workspace
) -> tuple[AnyArray, Array]:
    """(loss, da) of pairs of rows (rows, width); db is -da (Hadsell et al. 2006).

    Half the mean of d^2 for similar pairs (not 0), of max(margin - d, 0)^2 for others, d being the
    distance; with `legacy`, others give max(margin - d^2, 0).
    """
    body = pick(a, cpu.contrastive, gpu.contrastive)
    return body(a, b, similar, margin, legacy, work)
