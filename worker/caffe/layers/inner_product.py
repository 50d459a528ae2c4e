"""Layers with a matrix of weights: InnerProduct and Embed."""

from collections.abc import Mapping
from math import prod
from typing import ClassVar

import numpy as np

from cupy_kernels import backends, channels, embedding, inner_product
from cupy_kernels.types import AnyArray, Array
from cupy_kernels.workspace import Workspace
from worker.caffe.layer import (
    Arrays,
    Gradients,
    Layer,
    Shape,
    StepKey,
    Takes,
    Wanted,
    as_stored,
    caffe_shape,
    flat,
    to_nchw,
)


class InnerProduct(Layer):
    """Weights (out, in), or (in, out) with `transpose`; then a bias (out,).

    The axes from `axis` on are flattened in Caffe's order (c, h, w), so that Caffe's weights fit.
    """

    SUPPORTED_FIELDS: ClassVar[Takes] = {
        "inner_product_param": frozenset({
            "num_output", "bias_term", "weight_filler", "bias_filler", "axis", "transpose",
        })
    }  # fmt: skip

    def set_up(self) -> tuple[Shape, ...]:
        param, bottom = self.spec.inner_product_param, self.bottoms[0]
        if param.num_output < 1:
            raise self.bad(f"expected a num_output of at least 1, got {param.num_output}")
        self._axis = self.axis(param.axis, bottom)
        self._transposed = param.transpose
        self._rectifies = False
        inputs, outputs = prod(bottom[self._axis :]), param.num_output
        self.add_parameter(
            (inputs, outputs) if self._transposed else (outputs, inputs), param.weight_filler
        )
        if param.bias_term:
            self.add_parameter((outputs,), param.bias_filler)
        return ((*bottom[: self._axis], outputs),)

    def fuse_relu(self) -> bool:
        self._rectifies = True
        return True

    def forward(self, bottoms: Arrays, weights: Arrays, moment: StepKey) -> Arrays:
        self._x_shape = caffe_shape(bottoms[0])
        self._x = flat(bottoms[0], self._axis, self.work, "x")
        bias = weights[1] if len(weights) > 1 else None
        y = inner_product.forward(
            self._x,
            self._turn(weights[0]),
            bias,
            self.work,
            self.setting.precision,
            relu=self._rectifies,
        )
        return (as_stored(y.reshape(*self._x_shape[: self._axis], -1), self.work, "top"),)

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, wanted: Wanted
    ) -> Gradients:
        assert gradients[0] is not None
        dx = inner_product.backward(
            flat(gradients[0], self._axis, self.work, "dy"),
            self._x,
            self._turn(weights[0]),
            None if out[0] is None else self._turn(out[0]),
            out[1] if len(out) > 1 else None,
            self.work,
            self.setting.precision,
            wanted=wanted[0],
        )
        return [None if dx is None else as_stored(dx.reshape(self._x_shape), self.work, "bottom")]

    def _turn(self, weight: Array) -> Array:
        return weight.T if self._transposed else weight


class Embed(Layer):
    """The row of a table (input_dim, num_output) for each index, plus a bias (num_output,)."""

    SUPPORTED_FIELDS: ClassVar[Takes] = {
        "embed_param": frozenset({
            "num_output", "input_dim", "bias_term", "weight_filler", "bias_filler",
        })
    }  # fmt: skip
    LABELS = frozenset({0})
    captures = False

    def set_up(self) -> tuple[Shape, ...]:
        param = self.spec.embed_param
        if param.num_output < 1 or param.input_dim < 1:
            raise self.bad(
                "expected a num_output and an input_dim of at least 1, got"
                f" {param.num_output} and {param.input_dim}"
            )
        self._back = Workspace(self.setting.pool)  # the top must outlive the second gather
        self.add_parameter((param.input_dim, param.num_output), param.weight_filler)
        if param.bias_term:
            self.add_parameter((param.num_output,), param.bias_filler)
        return ((*self.bottoms[0], param.num_output),)

    def forward(self, bottoms: Arrays, weights: Arrays, moment: StepKey) -> Arrays:
        # The gradient sorts the indices on the host, so they are read there once.
        self._ids = self._whole(backends.as_host(to_nchw(bottoms[0])))
        ids = self._there(self._ids, "ids", weights[0])
        y = embedding.gather(weights[0], ids, self.work)
        if len(weights) > 1:
            y = channels.scale(y, None, weights[1], self.work)
        return (as_stored(y.reshape(*caffe_shape(bottoms[0]), -1), self.work, "top"),)

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, wanted: Wanted
    ) -> Gradients:
        assert gradients[0] is not None
        dy = flat(gradients[0], gradients[0].ndim - 1, self.work, "dy")
        if len(out) > 1 and out[1] is not None:
            channels.scale_backward(dy, dy, None, None, out[1], self.work)
        if out[0] is not None:
            found = embedding.segments(self._ids)
            order, starts = (
                self._there(array, role, dy)
                for array, role in ((found.order, "order"), (found.starts, "starts"))
            )
            sums = embedding.segment_sums(dy, order, starts, self.work)
            # The sum for each row of the table; -1 is no row, and gives zeros.
            places = np.full(len(weights[0]), -1, np.int64)
            places[found.ids] = np.arange(len(found.ids))
            into = embedding.gather(sums, self._there(places, "places", dy), self._back)
            backends.copy(into, out[0])
        return [None]

    def check_column(self, bottom: int, column: AnyArray) -> None:
        self._whole(column)

    def _whole(self, values: AnyArray) -> AnyArray:
        """The indices as int64, flat; raises BadInput for one that is no row of the table."""
        size = self.spec.embed_param.input_dim
        seen = values.reshape(-1)
        with np.errstate(invalid="ignore"):  # a NaN differs from what it is cast to
            ids = seen.astype(np.int64)
        wrong = (ids != seen) | (ids < 0) | (ids >= size)
        if wrong.any():
            raise self.bad(f"expected whole indices in [0, {size}), got {seen[wrong][0]}")
        return ids

    def _there(self, array: AnyArray, role: str, like: AnyArray) -> AnyArray:
        there = self.work.take_as(role, array.shape, np.int64, like)
        backends.copy(array, there)
        return there


ROWS: Mapping[str, type[Layer]] = {"InnerProduct": InnerProduct, "Embed": Embed}
