"""Losses other than SoftmaxWithLoss.

All but EuclideanLoss have no kernels. A loss is a sum over the batch over a divisor; its gradient
is multiplied by the top's own, which is the loss weight.
"""

from collections.abc import Mapping
from math import prod
from typing import ClassVar

import numpy as np

from cupy_kernels import backends, channels, eltwise
from cupy_kernels.cpu import softmax as on_host
from cupy_kernels.cpu.softmax import SMALLEST
from cupy_kernels.types import AnyArray, Array, Labels
from worker.caffe.caffe_pb2 import HingeLossParameter, LossParameter
from worker.caffe.layer import (
    Arrays,
    Gradients,
    HostLayer,
    Layer,
    Shape,
    StepKey,
    Takes,
    Wanted,
)
from worker.caffe.layers.normalisers import divisor, mode_of

_LOSS = frozenset({"ignore_label", "normalize", "normalization"})
_LEAST = 1e-20  # of a probability of MultinomialLogisticLoss


class EuclideanLoss(Layer):
    """The sum of squared differences over twice the number of rows."""

    BOTTOMS = range(2, 3)
    LOSS = True

    def set_up(self) -> tuple[Shape, ...]:
        self.axis(0, self.bottoms[0])
        self.check_alike()
        return ((),)

    def forward(self, bottoms: Arrays, weights: Arrays, moment: StepKey) -> Arrays:
        a, b = bottoms
        self._rows = len(a)
        self._apart = eltwise.weighted_sum([a, b], [1.0, -1.0], self.work)
        squares = eltwise.product_backward(self._apart, [a, self._apart], 0, self.work)
        total = self.work.take("total", (1,), a)
        seen = squares.reshape(-1, 1)
        channels.scale_backward(seen, seen, None, None, total, self.work)
        loss = self.work.take("loss", (1,), a)
        loss.fill(0.0)
        eltwise.accumulate(total, loss, 0.5 / self._rows)
        return (loss.reshape(()),)

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, wanted: Wanted
    ) -> Gradients:
        assert gradients[0] is not None
        factor = float(backends.as_host(gradients[0])) / self._rows
        return [
            eltwise.weighted_sum_backward(self._apart, sign * factor, 2 + side, self.work)
            if want
            else None
            for side, (sign, want) in enumerate(zip((1.0, -1.0), wanted, strict=True))
        ]


class _HostLoss(HostLayer):
    """A loss whose gradient by the first bottom is computed with it, in `loss`."""

    BOTTOMS = range(2, 3)
    LOSS = True
    LABELS = frozenset({1})
    _dx: AnyArray

    def gradients(self, dtops: Gradients, weights: Arrays, out: Gradients) -> Gradients:
        assert dtops[0] is not None
        weight = float(dtops[0])
        return [self._dx * np.float32(weight), *[None] * (len(self.bottoms) - 1)]


class ClassifiedLoss(_HostLoss):
    """A loss of rows of scores, each with the label of its class."""

    classes: int

    def set_up(self) -> tuple[Shape, ...]:
        scores, labels = self.bottoms[:2]
        self.classes = prod(scores[1:])
        if not scores or prod(labels) != scores[0]:
            raise self.bad(
                f"expected a label for each row of {self.described(0)}, got {self.described(1)}"
            )
        return ((),)

    def check_column(self, bottom: int, column: AnyArray) -> None:
        if bottom == 1:
            self.labels(column)

    def labels(self, column: AnyArray, ignored: int | None = None) -> Labels:
        """The labels as int64; raises BadInput for one that is no class."""
        try:
            return on_host.whole_labels(column.reshape(-1), self.classes, ignored, self.work)
        except ValueError as error:
            raise self.bad(f"{self.spec.bottom[1]}: {error}") from None


class HingeLoss(ClassifiedLoss):
    """The sum (L1) or sum of squares (L2) of max(0, 1 + score), the true class's score negated."""

    SUPPORTED_FIELDS: ClassVar[Takes] = {"hinge_loss_param": frozenset({"norm"})}

    def compute(self, bottoms: Arrays, weights: Arrays, moment: StepKey) -> Arrays:
        scores = bottoms[0].reshape(len(bottoms[0]), -1)
        sign = np.ones_like(scores)
        sign[np.arange(len(scores)), self.labels(bottoms[1])] = -1
        margin = np.maximum(0, 1 + sign * scores)
        rows = len(scores)
        if self.spec.hinge_loss_param.norm == HingeLossParameter.L1:
            loss, slope = margin.sum(dtype=np.float64), np.sign(margin)
        else:
            loss, slope = np.square(margin, dtype=np.float64).sum(), 2 * margin
        self._dx = (sign * slope / rows).reshape(bottoms[0].shape)
        return (np.asarray(loss / rows),)


class MultinomialLogisticLoss(ClassifiedLoss):
    """The mean of -log of the true class's probability, which is at least 1e-20."""

    def compute(self, bottoms: Arrays, weights: Arrays, moment: StepKey) -> Arrays:
        p = bottoms[0].reshape(len(bottoms[0]), -1)
        own = np.arange(len(p)), self.labels(bottoms[1])
        true = np.maximum(p[own].astype(np.float64), _LEAST)
        dx = np.zeros_like(p)
        dx[own] = -1 / true / len(p)
        self._dx = dx.reshape(bottoms[0].shape)
        return (np.asarray(-np.log(true).mean()),)


class InfogainLoss(ClassifiedLoss):
    """-sum of H[label, k] log softmax(x)[k] over k; H is in a file, or the third bottom."""

    SUPPORTED_FIELDS: ClassVar[Takes] = {
        "infogain_loss_param": frozenset({"source", "axis"}),
        "loss_param": _LOSS,
    }
    BOTTOMS = range(2, 4)
    TOPS = range(1, 3)
    LABELS = frozenset({1, 2})

    def set_up(self) -> tuple[Shape, ...]:
        scores, labels = self.bottoms[:2]
        param = self.spec.infogain_loss_param
        self._axis = self.axis(param.axis, scores)
        self.classes = scores[self._axis]
        self._mode, self._ignored = mode_of(self.spec.loss_param, LossParameter.VALID)
        if prod(scores) != prod(labels) * self.classes:
            raise self.bad(
                f"expected a label for each row of {self.described(0)}, got {self.described(1)}"
            )
        self._matrix = None
        if len(self.bottoms) == 2:
            if not param.source:
                raise self.bad("expected a source, or a third bottom with the matrix, got neither")
            self._matrix = self._checked(self.setting.read_blob(param.source), param.source)
        elif prod(self.bottoms[2]) != self.classes**2:
            raise self.bad(
                f"expected a matrix of {self.classes} x {self.classes}, got {self.described(2)}"
            )
        return ((), scores)[: len(self.spec.top)]

    def compute(self, bottoms: Arrays, weights: Arrays, moment: StepKey) -> Arrays:
        moved = np.moveaxis(bottoms[0], self._axis, -1)
        x, classes = moved.reshape(-1, self.classes), self.classes
        matrix = self._matrix if self._matrix is not None else bottoms[2].reshape(classes, classes)
        labels = self.labels(bottoms[1], self._ignored)
        counted = np.ones(len(x), bool) if self._ignored is None else labels != self._ignored
        gain = matrix[np.where(counted, labels, 0)] * counted[:, None]
        p = on_host.softmax(x.astype(np.float32), self.work)
        by = divisor(self._mode, len(x), int(counted.sum()), len(bottoms[0]))
        loss = -(gain * np.log(np.maximum(p, SMALLEST).astype(np.float64))).sum() / by
        dx = (p * gain.sum(axis=1, keepdims=True) - gain) / by
        self._dx = np.moveaxis(dx.reshape(moved.shape), -1, self._axis)
        top = np.moveaxis(p.reshape(moved.shape), -1, self._axis)
        return (np.asarray(loss), top)[: len(self.spec.top)]

    def _checked(self, matrix: Array, source: str) -> Array:
        if matrix.size != self.classes**2:
            raise self.bad(
                f"{source}: expected {self.classes} x {self.classes} numbers, got {matrix.shape}"
            )
        return matrix.reshape(self.classes, self.classes)


class SigmoidCrossEntropyLoss(_HostLoss):
    """The cross-entropy of sigmoid(x) and targets in [0, 1], over the number of rows by default."""

    SUPPORTED_FIELDS: ClassVar[Takes] = {"loss_param": _LOSS}
    TOPS = range(1, 3)

    def set_up(self) -> tuple[Shape, ...]:
        scores, targets = self.bottoms
        self.axis(0, scores)
        if prod(scores) != prod(targets):
            raise self.bad(
                f"expected as many targets as scores, got {self.described(1)} and"
                f" {self.described(0)}"
            )
        default = LossParameter.BATCH_SIZE
        self._mode, self._ignored = mode_of(self.spec.loss_param, default)
        return ((), scores)[: len(self.spec.top)]

    def compute(self, bottoms: Arrays, weights: Arrays, moment: StepKey) -> Arrays:
        x, target = bottoms[0].astype(np.float64), bottoms[1].reshape(bottoms[0].shape)
        counted = np.ones(x.shape, bool) if self._ignored is None else target != self._ignored
        by = divisor(self._mode, x.size, int(counted.sum()), len(x))
        losses = np.logaddexp(0, x) - x * target
        sigmoid = np.exp(-np.logaddexp(0, -x))
        self._dx = ((sigmoid - target) * counted / by).astype(np.float32)
        top = np.asarray((losses * counted).sum() / by)
        return (top, losses * counted)[: len(self.spec.top)]


class ContrastiveLoss(HostLayer):
    """Half the mean of d^2 for similar pairs (label 1), of max(margin - d, 0)^2 for others.

    d is the distance of two rows; with legacy_version, others give max(margin - d^2, 0).
    """

    SUPPORTED_FIELDS: ClassVar[Takes] = {
        "contrastive_loss_param": frozenset({"margin", "legacy_version"})
    }
    BOTTOMS = range(3, 4)
    LOSS = True
    LABELS = frozenset({2})

    def set_up(self) -> tuple[Shape, ...]:
        a, b, labels = self.bottoms
        self.axis(0, a)
        if a != b or prod(labels) != a[0]:
            raise self.bad(
                "expected two bottoms of one shape and a label a row, got"
                f" {self.described(0)}, {self.described(1)} and {self.described(2)}"
            )
        return ((),)

    def compute(self, bottoms: Arrays, weights: Arrays, moment: StepKey) -> Arrays:
        param, rows = self.spec.contrastive_loss_param, len(bottoms[0])
        apart = (bottoms[0] - bottoms[1]).reshape(rows, -1).astype(np.float64)
        similar = bottoms[2].reshape(rows, 1) != 0
        square = np.square(apart).sum(axis=1, keepdims=True)
        if param.legacy_version:
            short = np.maximum(param.margin - square, 0)
            other, slope = short, np.where(short > 0, -1.0, 0.0)
        else:
            distance = np.sqrt(square)
            short = np.maximum(param.margin - distance, 0)
            other, slope = np.square(short), -short / (distance + 1e-4)
        self._dx = (np.where(similar, 1.0, slope) * apart / rows).reshape(bottoms[0].shape)
        return (np.asarray(np.where(similar, square, other).sum() / (2 * rows)),)

    def gradients(self, dtops: Gradients, weights: Arrays, out: Gradients) -> Gradients:
        assert dtops[0] is not None
        dx = self._dx * float(dtops[0])
        return [dx, -dx, None]


ROWS: Mapping[str, type[Layer]] = {
    "EuclideanLoss": EuclideanLoss,
    "HingeLoss": HingeLoss,
    "MultinomialLogisticLoss": MultinomialLogisticLoss,
    "InfogainLoss": InfogainLoss,
    "SigmoidCrossEntropyLoss": SigmoidCrossEntropyLoss,
    "ContrastiveLoss": ContrastiveLoss,
}
