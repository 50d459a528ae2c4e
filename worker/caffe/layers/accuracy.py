"""Accuracy, which compares scores with labels and has no gradient."""

from collections.abc import Mapping
from typing import ClassVar

from cupy_kernels.ops import softmax
from worker.caffe.layer import Arrays, Layer, Shape, StepKey, SupportedFields
from worker.caffe.layers.labelled import Labelled


class Accuracy(Labelled):
    """The share of rows with the true class among the `top_k` best; the second top is by class."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "accuracy_param": frozenset({"top_k", "axis", "ignore_label"})
    }

    def set_up(self) -> tuple[Shape, ...]:
        param = self.spec.accuracy_param
        ignored = param.ignore_label if param.HasField("ignore_label") else None
        self.set_up_rows(param.axis, ignored)
        if not 1 <= param.top_k <= self.classes:
            raise self.bad(f"expected a top_k in [1, {self.classes}], got {param.top_k}")
        return ((), (self.classes,))[: len(self.spec.top)]

    def forward(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        x, labels = self.scores(bottoms[0]), self.labels(bottoms[1])
        rule = (self._ignored, self.spec.accuracy_param.top_k, self.work)
        share = softmax.accuracy(x, labels, *rule)
        if len(self.spec.top) == 1:
            return (share,)
        return share, softmax.class_accuracies(x, labels, *rule)


ROWS: Mapping[str, type[Layer]] = {"Accuracy": Accuracy}
