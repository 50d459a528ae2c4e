"""Layers at a net's end: Softmax, SoftmaxWithLoss and Accuracy.

Labels come as numbers of any type and must be whole ones within [0, classes), except that the
ignored label may be any. The scores' class axis is moved last and the rest flattened to rows.
"""

from collections.abc import Sequence
from math import prod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from cupy_kernels import softmax
from cupy_kernels.types import AnyArray, Array, Labels
from worker.caffe.caffe_pb2 import LossParameter
from worker.caffe.layer import Layer, Moment, Shape, Takes, outward, settle

Counted = NDArray[np.bool_] | None


class Softmax(Layer):
    """exp(x) over its sum, along an axis."""

    TAKES: ClassVar[Takes] = {"softmax_param": frozenset({"axis", "engine"})}

    def set_up(self) -> tuple[Shape, ...]:
        self._axis = self.axis(self.spec.softmax_param.axis, self.bottoms[0])
        return (self.bottoms[0],)

    def forward(
        self, bottoms: Sequence[AnyArray], weights: Sequence[Array], moment: Moment
    ) -> tuple[AnyArray, ...]:
        x = np.moveaxis(outward(bottoms[0]), self._axis, -1)
        self._p = softmax.softmax(x, self.work)
        return (settle(np.moveaxis(self._p, -1, self._axis), self.work, "top"),)

    def backward(
        self,
        gradients: Sequence[Array | None],
        weights: Sequence[Array],
        out: Sequence[Array],
        wanted: Sequence[bool],
    ) -> Sequence[Array | None]:
        assert gradients[0] is not None
        dy = np.moveaxis(outward(gradients[0]), self._axis, -1)
        dx = softmax.softmax_backward(dy, self._p, self.work)
        return [settle(np.moveaxis(dx, -1, self._axis), self.work, "bottom")]


class _Labelled(Layer):
    """Two bottoms, scores and labels, as rows of classes and one label a row."""

    BOTTOMS = range(2, 3)
    TOPS = range(1, 3)

    def set_up_rows(self, axis: int, ignored: int | None) -> None:
        """Check that there is a label for each row of scores."""
        scores, labels = self.bottoms
        self._axis = self.axis(axis, scores)
        self._ignored = ignored
        self.classes = scores[self._axis]
        if prod(scores) != prod(labels) * self.classes:
            raise self.bad(
                f"expected a label for each of {prod(scores) // self.classes} rows of scores of"
                f" shape {scores}, got labels of shape {labels}"
            )

    def scores(self, bottom: AnyArray) -> Array:
        """(..., classes), the other axes in Caffe's order; (n, c, h, w) is not even copied."""
        return np.moveaxis(outward(bottom), self._axis, -1)

    def labels(self, bottom: AnyArray) -> tuple[Labels, Counted]:
        """The labels as indices, and which rows count, None for all; an ignored label reads 0."""
        flat = outward(bottom).reshape(-1)
        with np.errstate(invalid="ignore"):  # what is no number differs from what it is cast to
            labels = flat.astype(np.int64)
        counted = None if self._ignored is None else labels != self._ignored
        wrong = (labels != flat) | (labels < 0) | (labels >= self.classes)
        if counted is not None:
            wrong &= counted
            labels = np.where(counted, labels, 0)
        if wrong.any():
            raise self.bad(
                f"{self.spec.bottom[1]}: expected whole labels in [0, {self.classes}),"
                f" got {flat[wrong][0]}"
            )
        return labels, counted


class SoftmaxWithLoss(_Labelled):
    """Softmax and cross-entropy in one: mean -log p(label), its second top p itself."""

    TAKES: ClassVar[Takes] = {
        "loss_param": frozenset({"ignore_label", "normalize", "normalization"}),
        "softmax_param": frozenset({"axis", "engine"}),
    }
    LOSS = True
    LABELS = 1

    def set_up(self) -> tuple[Shape, ...]:
        param = self.spec.loss_param
        ignored = param.ignore_label if param.HasField("ignore_label") else None
        self.set_up_rows(self.spec.softmax_param.axis, ignored)
        self._mode = param.normalization
        if param.HasField("normalize") and not param.HasField("normalization"):
            self._mode = LossParameter.VALID if param.normalize else LossParameter.BATCH_SIZE
        if len(self.spec.loss_weight) > 1 and self.spec.loss_weight[1] != 0:
            raise self.bad("expected no loss_weight for the second top, which is no loss")
        return ((), self.bottoms[0])[: len(self.spec.top)]

    def forward(
        self, bottoms: Sequence[AnyArray], weights: Sequence[Array], moment: Moment
    ) -> tuple[AnyArray, ...]:
        self._p = softmax.softmax(self.scores(bottoms[0]), self.work)
        self._labels, self._counted = self.labels(bottoms[1])
        self._divisor = self._divide_by(prod(self._p.shape[: self._axis]))
        rows = self._p.reshape(-1, self.classes)
        total = softmax.cross_entropy(rows, self._labels, self._counted)
        loss = np.asarray(total / self._divisor)
        return (loss, self._back(self._p, "top"))[: len(self.spec.top)]

    def backward(
        self,
        gradients: Sequence[Array | None],
        weights: Sequence[Array],
        out: Sequence[Array],
        wanted: Sequence[bool],
    ) -> Sequence[Array | None]:
        if gradients[0] is None or not wanted[0]:
            return [None, None]
        scale = float(gradients[0]) / self._divisor
        rows = self._p.reshape(-1, self.classes)
        dx = softmax.cross_entropy_backward(rows, self._labels, self._counted, scale, self.work)
        return [self._back(dx.reshape(self._p.shape), "bottom"), None]

    def _back(self, moved: Array, role: str) -> Array:
        return settle(np.moveaxis(moved, -1, self._axis), self.work, role)

    def _divide_by(self, outer: int) -> float:
        rows = len(self._labels)
        match self._mode:
            case LossParameter.FULL:
                return rows
            case LossParameter.VALID:
                return max(1, rows if self._counted is None else int(self._counted.sum()))
            case LossParameter.BATCH_SIZE:
                return outer
            case _:
                return 1


class Accuracy(_Labelled):
    """The share of rows whose true class is among the best; its second top a share a class."""

    TAKES: ClassVar[Takes] = {"accuracy_param": frozenset({"top_k", "axis", "ignore_label"})}

    def set_up(self) -> tuple[Shape, ...]:
        param = self.spec.accuracy_param
        ignored = param.ignore_label if param.HasField("ignore_label") else None
        self.set_up_rows(param.axis, ignored)
        if not 1 <= param.top_k <= self.classes:
            raise self.bad(f"expected a top_k in [1, {self.classes}], got {param.top_k}")
        return ((), (self.classes,))[: len(self.spec.top)]

    def forward(
        self, bottoms: Sequence[AnyArray], weights: Sequence[Array], moment: Moment
    ) -> tuple[AnyArray, ...]:
        labels, counted = self.labels(bottoms[1])
        scores = self.scores(bottoms[0]).reshape(-1, self.classes)
        if counted is not None:
            scores, labels = scores[counted], labels[counted]
        good = softmax.hits(scores, labels, self.spec.accuracy_param.top_k)
        share = np.asarray(good.sum() / max(1, len(good)))
        if len(self.spec.top) == 1:
            return (share,)
        each = np.bincount(labels, minlength=self.classes)
        right = np.bincount(labels[good], minlength=self.classes)
        return share, (right / np.maximum(each, 1)).astype(np.float32)
