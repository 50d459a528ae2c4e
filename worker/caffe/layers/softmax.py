"""Softmax, and its loss SoftmaxWithLoss."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from cupy_kernels import backends
from cupy_kernels.ops import softmax
from cupy_kernels.types import AnyArray, Array
from worker.caffe.caffe_pb2 import LossParameter
from worker.caffe.layer import (
    Arrays,
    Gradients,
    Layer,
    NeedsGrad,
    Shape,
    StepKey,
    SupportedFields,
    Unary,
    as_stored,
    contiguous,
    to_nchw,
)
from worker.caffe.layers.labelled import Labelled
from worker.caffe.layers.loss_divisor import mode_of


class Softmax(Unary):
    """exp(x) over its sum, along an axis."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {"softmax_param": frozenset({"axis", "engine"})}

    def set_up(self) -> tuple[Shape, ...]:
        self._axis = self.axis(self.spec.softmax_param.axis, self.bottoms[0])
        return super().set_up()

    def apply(self, x: Array, step_key: StepKey) -> AnyArray:
        scores = contiguous(np.moveaxis(to_nchw(x), self._axis, -1), self.work, "scores")
        self._p = softmax.softmax(scores, self.work)
        return as_stored(np.moveaxis(self._p, -1, self._axis), self.work, "top")

    def differentiate(self, dy: Array) -> AnyArray:
        moved = contiguous(np.moveaxis(to_nchw(dy), self._axis, -1), self.work, "dy")
        dx = softmax.softmax_backward(moved, self._p, self.work)
        return as_stored(np.moveaxis(dx, -1, self._axis), self.work, "bottom")


class SoftmaxWithLoss(Labelled):
    """Softmax and cross-entropy in one: the mean of -log p(label). The second top is p itself."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
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

    def forward(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        x, labels = self.scores(bottoms[0]), self.labels(bottoms[1])
        self._x, by = x, self.divisor(self._mode)
        loss, self._saved = softmax.cross_entropy(x, labels, self._ignored, by, self.work)
        if len(self.spec.top) == 1:
            return (loss,)
        return loss, self.back(softmax.softmax(x, self.work), "top")

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, needs_grad: NeedsGrad
    ) -> Gradients:
        if gradients[0] is None or not needs_grad[0]:
            return [None, None]
        weight = float(backends.as_host(gradients[0]))
        dx = softmax.cross_entropy_backward(self._saved, weight, self.work)
        return [self.back(dx, "bottom"), None]


ROWS: Mapping[str, type[Layer]] = {"Softmax": Softmax, "SoftmaxWithLoss": SoftmaxWithLoss}
