"""Layers at a net's end: Softmax, SoftmaxWithLoss and Accuracy.

Labels are numbers of any type and must be whole and in [0, classes), except for the ignored label,
which may be any. The scores' class axis is moved last and the rest flattened to rows.
"""

from collections.abc import Mapping
from math import prod
from typing import ClassVar

import numpy as np

from cupy_kernels import backends, softmax
from cupy_kernels.types import AnyArray, Array, Labels
from worker.caffe.caffe_pb2 import LossParameter
from worker.caffe.layer import (
    Arrays,
    Gradients,
    Layer,
    Shape,
    StepKey,
    Takes,
    Unary,
    Wanted,
    as_stored,
    contiguous,
    to_nchw,
)
from worker.caffe.layers.loss_divisor import divisor, mode_of


class Softmax(Unary):
    """exp(x) over its sum, along an axis."""

    SUPPORTED_FIELDS: ClassVar[Takes] = {"softmax_param": frozenset({"axis", "engine"})}

    def set_up(self) -> tuple[Shape, ...]:
        self._axis = self.axis(self.spec.softmax_param.axis, self.bottoms[0])
        return super().set_up()

    def apply(self, x: Array, moment: StepKey) -> AnyArray:
        scores = contiguous(np.moveaxis(to_nchw(x), self._axis, -1), self.work, "scores")
        self._p = softmax.softmax(scores, self.work)
        return as_stored(np.moveaxis(self._p, -1, self._axis), self.work, "top")

    def differentiate(self, dy: Array) -> AnyArray:
        moved = contiguous(np.moveaxis(to_nchw(dy), self._axis, -1), self.work, "dy")
        dx = softmax.softmax_backward(moved, self._p, self.work)
        return as_stored(np.moveaxis(dx, -1, self._axis), self.work, "bottom")


class Labelled(Layer):
    """A layer of scores, as rows of classes, and labels, one for each row."""

    BOTTOMS = range(2, 3)
    TOPS = range(1, 3)

    def set_up_rows(self, axis: int, ignored: int | None) -> None:
        """Set the class axis and the ignored label; check that each row of scores has a label."""
        scores, labels = self.bottoms[:2]
        self._axis = self.axis(axis, scores)
        self._ignored = ignored
        self.classes = scores[self._axis]
        if prod(scores) != prod(labels) * self.classes:
            raise self.bad(
                f"expected a label for each of {prod(scores) // self.classes} rows of scores of"
                f" shape {self.described(0)}, got labels of shape {self.described(1)}"
            )

    def scores(self, bottom: AnyArray) -> Array:
        """The scores as (rows, classes), in Caffe's order; (n, c, h, w) needs no copy."""
        moved = np.moveaxis(to_nchw(bottom), self._axis, -1)
        self._shape = moved.shape
        return contiguous(moved, self.work, "scores").reshape(-1, self.classes)

    def back(self, rows: Array, role: str) -> AnyArray:
        """The inverse of `scores`."""
        return as_stored(np.moveaxis(rows.reshape(self._shape), -1, self._axis), self.work, role)

    def divisor(self, mode: int) -> int | None:
        """The divisor of a loss over the latest scores, in a mode of normalisation."""
        rows = prod(self._shape[:-1])
        return divisor(mode, rows, prod(self._shape[: self._axis]))

    def check_column(self, bottom: int, column: AnyArray) -> None:
        if bottom == 1:
            self.labels(column)

    def labels(self, bottom: AnyArray) -> Labels:
        """The labels as indices."""
        return self.indices(1, bottom, self.classes, ignored=self._ignored)


class SoftmaxWithLoss(Labelled):
    """Softmax and cross-entropy in one: the mean of -log p(label). The second top is p itself."""

    SUPPORTED_FIELDS: ClassVar[Takes] = {
        "loss_param": frozenset({"ignore_label", "normalize", "normalization"}),
        "softmax_param": frozenset({"axis", "engine"}),
    }
    LOSS = True
    LABELS = frozenset({1})

    def set_up(self) -> tuple[Shape, ...]:
        self._mode, ignored = mode_of(self.spec.loss_param, LossParameter.VALID)
        self.set_up_rows(self.spec.softmax_param.axis, ignored)
        if len(self.spec.loss_weight) > 1 and self.spec.loss_weight[1] != 0:
            raise self.bad("expected no loss_weight for the second top, which is no loss")
        return ((), self.bottoms[0])[: len(self.spec.top)]

    def forward(self, bottoms: Arrays, weights: Arrays, moment: StepKey) -> Arrays:
        x, labels = self.scores(bottoms[0]), self.labels(bottoms[1])
        self._x, by = x, self.divisor(self._mode)
        loss, self._kept = softmax.cross_entropy(x, labels, self._ignored, by, self.work)
        if len(self.spec.top) == 1:
            return (loss,)
        return loss, self.back(softmax.softmax(x, self.work), "top")

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, wanted: Wanted
    ) -> Gradients:
        if gradients[0] is None or not wanted[0]:
            return [None, None]
        weight = float(backends.as_host(gradients[0]))
        dx = softmax.cross_entropy_backward(self._x, self._kept, weight, self.work)
        return [self.back(dx, "bottom"), None]


class Accuracy(Labelled):
    """The share of rows with the true class among the `top_k` best; the second top is by class."""

    SUPPORTED_FIELDS: ClassVar[Takes] = {
        "accuracy_param": frozenset({"top_k", "axis", "ignore_label"})
    }

    def set_up(self) -> tuple[Shape, ...]:
        param = self.spec.accuracy_param
        ignored = param.ignore_label if param.HasField("ignore_label") else None
        self.set_up_rows(param.axis, ignored)
        if not 1 <= param.top_k <= self.classes:
            raise self.bad(f"expected a top_k in [1, {self.classes}], got {param.top_k}")
        return ((), (self.classes,))[: len(self.spec.top)]

    def forward(self, bottoms: Arrays, weights: Arrays, moment: StepKey) -> Arrays:
        x, labels = self.scores(bottoms[0]), self.labels(bottoms[1])
        rule = (self._ignored, self.spec.accuracy_param.top_k, self.work)
        share = softmax.accuracy(x, labels, *rule)
        if len(self.spec.top) == 1:
            return (share,)
        return share, softmax.class_accuracies(x, labels, *rule)


ROWS: Mapping[str, type[Layer]] = {
    "Softmax": Softmax,
    "SoftmaxWithLoss": SoftmaxWithLoss,
    "Accuracy": Accuracy,
}
