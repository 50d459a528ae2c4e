"""Embed, a table of weights with a row for each index."""

from collections.abc import Mapping
from typing import ClassVar

from cupy_kernels.ops import channels, embedding
from cupy_kernels.types import AnyArray, Labels
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


class Embed(Layer):
    """The row of a table (input_dim, num_output) for each index, plus a bias (num_output,)."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "embed_param": frozenset({
            "num_output", "input_dim", "bias_term", "weight_filler", "bias_filler",
        })
    }  # fmt: skip
    LABELS = frozenset({0})

    def set_up(self) -> tuple[Shape, ...]:
        param = self.spec.embed_param
        if param.num_output < 1 or param.input_dim < 1:
            raise self.bad(
                "expected a num_output and an input_dim of at least 1, got"
                f" {param.num_output} and {param.input_dim}"
            )
        self.add_parameter((param.input_dim, param.num_output), param.weight_filler)
        if param.bias_term:
            self.add_parameter((param.num_output,), param.bias_filler)
        return ((*self.bottoms[0], param.num_output),)

    def forward(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        self._ids = self._indices(bottoms[0])
        y = embedding.gather(weights[0], self._ids, self.work)
        if len(weights) > 1:
            y = channels.scale(y, None, weights[1], self.work)
        return (as_stored(y.reshape(*caffe_shape(bottoms[0]), -1), self.work, "top"),)

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, needs_grad: NeedsGrad
    ) -> Gradients:
        assert gradients[0] is not None
        dy = flat(gradients[0], gradients[0].ndim - 1, self.work, "dy")
        if len(out) > 1 and out[1] is not None:
            channels.scale_backward(dy, dy, None, None, out[1], self.work)
        if out[0] is not None:
            embedding.gather_backward(dy, self._ids, out[0], self.work)
        return [None]

    def check_column(self, bottom: int, column: AnyArray) -> None:
        self._indices(column)

    def _indices(self, values: AnyArray) -> Labels:
        return self.indices(0, values, self.spec.embed_param.input_dim, "indices")


ROWS: Mapping[str, type[Layer]] = {"Embed": Embed}
