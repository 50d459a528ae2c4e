"""Losses other than SoftmaxWithLoss.

A loss is a sum over the batch over a divisor; its gradient is multiplied by the top's own, which is
the loss weight.
"""

from abc import abstractmethod
from collections.abc import Mapping
from math import prod
from typing import ClassVar

import numpy as np

from cupy_kernels import backends
from cupy_kernels.ops import eltwise, losses, reduction, softmax
from cupy_kernels.ops.losses.spec import ClassRule
from cupy_kernels.ops.reduction.spec import Term
from cupy_kernels.types import AnyArray, Array
from worker.caffe.caffe_pb2 import HingeLossParameter, LossParameter
from worker.caffe.layer import (
    Arrays,
    Gradients,
    Layer,
    NeedsGrad,
    Shape,
    StepKey,
    SupportedFields,
    as_stored,
    caffe_shape,
    flat,
)
from worker.caffe.layers.labelled import Labelled
from worker.caffe.layers.loss_divisor import divisor, mode_of

_LOSS = frozenset({"ignore_label", "normalize", "normalization"})


class _Loss(Layer):
    """A loss of rows; its gradient by the first bottom is computed with it.

    The gradient by the second bottom, if it has one, is the opposite.
    """

    BOTTOMS = range(2, 3)
    LOSS = True
    LABELS = frozenset({1})

    @abstractmethod
    def loss(self, bottoms: Arrays) -> tuple[AnyArray, ...]:
        """The tops, and the gradient by the first bottom, in that bottom's order in memory."""

    def forward(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        *tops, self._dx = self.loss(bottoms)
        return tops[: len(self.spec.top)]

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, needs_grad: NeedsGrad
    ) -> Gradients:
        assert gradients[0] is not None
        weight = float(backends.as_host(gradients[0]))
        return [
            eltwise.weighted_sum_backward(self._dx, sign * weight, side, self.work)
            if want and side not in self.LABELS
            else None
            for side, (sign, want) in enumerate(zip((1, -1, 0), needs_grad, strict=False))
        ]

    def rows(self, bottom: AnyArray, role: str) -> Array:
        """A bottom as rows, one for each of its first axis, in Caffe's order."""
        return flat(self.as_floats(bottom, role), 1, self.work, role)

    def as_floats(self, bottom: AnyArray, role: str) -> AnyArray:
        """A bottom as float32: the labels of a data layer are integers."""
        if bottom.dtype == np.float32:
            return bottom
        numbers = self.work.take(f"{role} as floats", bottom.shape, bottom)
        backends.copy(bottom, numbers)
        return numbers

    def store_gradient(self, dx: Array, shape: Shape) -> AnyArray:
        """A gradient in Caffe's order, as a bottom of this shape is stored."""
        return as_stored(dx.reshape(shape), self.work, "bottom")


class EuclideanLoss(_Loss):
    """The sum of squared differences over twice the number of rows."""

    LABELS = frozenset()

    def set_up(self) -> tuple[Shape, ...]:
        first, second = self.bottoms
        self.axis(0, first)
        if first[:1] != second[:1] or prod(first) != prod(second):
            raise self.bad(
                f"expected as many values in each row, got {self.describe_bottom(0)} and"
                f" {self.describe_bottom(1)}"
            )
        return ((),)

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, needs_grad: NeedsGrad
    ) -> Gradients:
        both = super().backward(gradients, weights, out, needs_grad)
        if self.bottoms[0] == self.bottoms[1]:
            return both
        return [
            dx if dx is None else as_stored(dx.reshape(-1, *shape[1:]), self.work, f"bottom{side}")
            for side, (dx, shape) in enumerate(zip(both, self.bottoms, strict=True))
        ]

    def loss(self, bottoms: Arrays) -> tuple[AnyArray, ...]:
        share = 1 / len(bottoms[0])
        bottoms = [self.as_floats(x, f"bottom{side}") for side, x in enumerate(bottoms)]
        if self.bottoms[0] != self.bottoms[1]:  # scores (n, 1) and labels (n,), for example
            bottoms = [self.rows(x, f"rows{side}") for side, x in enumerate(bottoms)]
        dx = eltwise.weighted_sum(bottoms, [share, -share], self.work)
        sums = reduction.row_sums(dx.reshape(1, -1), Term.SQUARES, 0.5 / share, self.work)
        return sums.reshape(()), dx


class ClassLoss(_Loss):
    """A loss of rows of scores, each with the label of its class."""

    def set_up(self) -> tuple[Shape, ...]:
        scores, labels = self.bottoms
        self.classes = prod(scores[1:])
        if not scores or prod(labels) != scores[0]:
            raise self.bad(
                f"expected a label for each row of {self.describe_bottom(0)}, got"
                f" {self.describe_bottom(1)}"
            )
        return ((),)

    @abstractmethod
    def rule(self) -> ClassRule:
        """The rule by which scores and label give the loss."""

    def loss(self, bottoms: Arrays) -> tuple[AnyArray, ...]:
        x, labels = bottoms
        scores = self.rows(x, "scores")
        indices = self.indices(1, labels, self.classes)
        loss, dx = losses.by_class(scores, indices, self.rule(), self.work)
        return loss, self.store_gradient(dx, caffe_shape(x))

    def check_column(self, bottom: int, column: AnyArray) -> None:
        if bottom == 1:
            self.indices(1, column, self.classes)


class HingeLoss(ClassLoss):
    """The sum (L1) or sum of squares (L2) of max(0, 1 + score), the true class's score negated."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {"hinge_loss_param": frozenset({"norm"})}

    def rule(self) -> ClassRule:
        plain = self.spec.hinge_loss_param.norm == HingeLossParameter.L1
        return ClassRule.HINGE if plain else ClassRule.SQUARED_HINGE


class MultinomialLogisticLoss(ClassLoss):
    """The mean of -log of the true class's probability, which is at least 1e-20."""

    def rule(self) -> ClassRule:
        return ClassRule.LOGARITHM


class InfogainLoss(Labelled, _Loss):
    """-sum of H[label, k] log softmax(x)[k] over k; H is in a file, or the third bottom."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "infogain_loss_param": frozenset({"source", "axis"}),
        "loss_param": _LOSS,
    }
    BOTTOMS = range(2, 4)
    TOPS = range(1, 3)
    LABELS = frozenset({1, 2})

    def set_up(self) -> tuple[Shape, ...]:
        param = self.spec.infogain_loss_param
        self._mode, ignored = mode_of(self.spec.loss_param, LossParameter.VALID)
        self.set_up_rows(param.axis, ignored)
        self._matrix: Array | None = None
        if len(self.bottoms) == 2:
            if not param.source:
                raise self.bad("expected a source, or a third bottom with the matrix, got neither")
            self._matrix = self._check_matrix(self.read_blob(param.source), param.source)
        elif prod(self.bottoms[2]) != self.classes**2:
            raise self.bad(
                f"expected a matrix of {self.classes} x {self.classes}, got"
                f" {self.describe_bottom(2)}"
            )
        return ((), self.bottoms[0])[: len(self.spec.top)]

    def loss(self, bottoms: Arrays) -> tuple[AnyArray, ...]:
        x, labels = self.scores(bottoms[0]), self.labels(bottoms[1])
        p = softmax.softmax(x, self.work)
        by = self.divisor(self._mode)
        loss, dx = losses.infogain(p, labels, self._gains(bottoms), self._ignored, by, self.work)
        return loss, self.back(p, "top"), self.back(dx, "bottom")

    def _gains(self, bottoms: Arrays) -> Array:
        """The matrix, on the device of the bottoms."""
        if self._matrix is None:
            return flat(bottoms[2], 0, self.work, "matrix").reshape(self.classes, self.classes)
        if backends.backend_of(self._matrix) != backends.backend_of(bottoms[0]):
            self._matrix = backends.copy_to(self._matrix, backends.backend_of(bottoms[0]))
        return self._matrix

    def _check_matrix(self, matrix: Array, source: str) -> Array:
        if matrix.size != self.classes**2:
            raise self.bad(
                f"{source}: expected {self.classes} x {self.classes} numbers, got {matrix.shape}"
            )
        return matrix.reshape(self.classes, self.classes)


class SigmoidCrossEntropyLoss(_Loss):
    """The cross-entropy of sigmoid(x) and targets in [0, 1], over the number of rows by default."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {"loss_param": _LOSS}
    TOPS = range(1, 3)

    def set_up(self) -> tuple[Shape, ...]:
        scores, targets = self.bottoms
        self.axis(0, scores)
        if prod(scores) != prod(targets):
            raise self.bad(
                f"expected as many targets as scores, got {self.describe_bottom(1)} and"
                f" {self.describe_bottom(0)}"
            )
        default = LossParameter.BATCH_SIZE
        self._mode, self._ignored = mode_of(self.spec.loss_param, default)
        return ((), scores)[: len(self.spec.top)]

    def loss(self, bottoms: Arrays) -> tuple[AnyArray, ...]:
        x, shape = self.rows(bottoms[0], "scores"), caffe_shape(bottoms[0])
        targets = self.rows(bottoms[1], "targets").reshape(x.shape)
        by = divisor(self._mode, x.size, len(x))
        loss, by_score, dx = losses.sigmoid_cross_entropy(x, targets, self._ignored, by, self.work)
        return (
            loss,
            as_stored(by_score.reshape(shape), self.work, "top"),
            self.store_gradient(dx, shape),
        )


class ContrastiveLoss(_Loss):
    """Half the mean of d^2 for similar pairs (label 1), of max(margin - d, 0)^2 for others.

    d is the distance of two rows; with legacy_version, others give max(margin - d^2, 0).
    """

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "contrastive_loss_param": frozenset({"margin", "legacy_version"})
    }
    BOTTOMS = range(3, 4)
    LABELS = frozenset({2})

    def set_up(self) -> tuple[Shape, ...]:
        a, b, labels = self.bottoms
        self.axis(0, a)
        if a != b or prod(labels) != a[0]:
            raise self.bad(
                "expected two bottoms of one shape and a label a row, got"
                f" {self.describe_bottom(0)}, {self.describe_bottom(1)} and"
                f" {self.describe_bottom(2)}"
            )
        return ((),)

    def loss(self, bottoms: Arrays) -> tuple[AnyArray, ...]:
        param = self.spec.contrastive_loss_param
        a, b = (x.reshape(len(x), -1) for x in bottoms[:2])  # in any order, the same in both
        similar = flat(self.as_floats(bottoms[2], "similar"), 0, self.work, "similar").reshape(-1)
        rule = param.margin, param.legacy_version, self.work
        loss, da = losses.contrastive(a, b, similar, *rule)
        return loss, da.reshape(bottoms[0].shape)


ROWS: Mapping[str, type[Layer]] = {
    "EuclideanLoss": EuclideanLoss,
    "HingeLoss": HingeLoss,
    "MultinomialLogisticLoss": MultinomialLogisticLoss,
    "InfogainLoss": InfogainLoss,
    "SigmoidCrossEntropyLoss": SigmoidCrossEntropyLoss,
    "ContrastiveLoss": ContrastiveLoss,
}
