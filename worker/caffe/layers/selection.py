"""Layers that pick or reduce: Reduction, ArgMax, Filter and BatchReindex."""

from collections.abc import Mapping
from math import prod
from typing import ClassVar

import numpy as np

from cupy_kernels import backends
from cupy_kernels.ops import channels, embedding, reduction
from cupy_kernels.ops.reduction.spec import Term
from cupy_kernels.types import AnyArray, Array, Labels
from worker.caffe.caffe_pb2 import ReductionParameter
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
    by_channel,
    caffe_shape,
    flat,
    from_channel,
)

_TERMS = {
    ReductionParameter.SUM: Term.VALUES,
    ReductionParameter.MEAN: Term.VALUES,
    ReductionParameter.ASUM: Term.MAGNITUDES,
    ReductionParameter.SUMSQ: Term.SQUARES,
}


class Reduction(Unary):
    """The sum, mean, sum of absolute values or of squares over the axes from `axis` on."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "reduction_param": frozenset({"operation", "axis", "coeff"})
    }

    def set_up(self) -> tuple[Shape, ...]:
        self._axis = self.axis(self.spec.reduction_param.axis, self.bottoms[0])
        return (self.bottoms[0][: self._axis],)

    def apply(self, x: Array, step_key: StepKey) -> AnyArray:
        param, self._shape = self.spec.reduction_param, caffe_shape(x)
        self._x = flat(x, self._axis, self.work, "x in order")
        mean = param.operation == ReductionParameter.MEAN
        factor = param.coeff / self._x.shape[1] if mean else param.coeff
        self._rule = _TERMS[param.operation], factor, self.work
        sums = reduction.row_sums(self._x, *self._rule)
        return as_stored(sums.reshape(self._shape[: self._axis]), self.work, "top")

    def differentiate(self, dy: Array) -> AnyArray:
        rows = flat(dy, dy.ndim, self.work, "dy in order").reshape(-1)
        if dy.ndim == 0:  # a loss weight, which stays on the host
            rows = self.work.take("weight", (1,), self._x)
            rows.fill(float(backends.as_host(dy)))
        dx = reduction.row_sums_backward(rows, self._x, *self._rule)
        return as_stored(dx.reshape(self._shape), self.work, "bottom")


class ArgMax(Unary):
    """The places of the top_k largest values, or these values, or both. It has no gradient."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "argmax_param": frozenset({"out_max_val", "top_k", "axis"})
    }

    def set_up(self) -> tuple[Shape, ...]:
        param, bottom = self.spec.argmax_param, self.bottoms[0]
        self.axis(0, bottom)
        self._axis = self.axis(param.axis, bottom) if param.HasField("axis") else None
        size = prod(bottom[1:]) if self._axis is None else bottom[self._axis]
        if not 1 <= param.top_k <= size:
            raise self.bad(f"expected a top_k in [1, {size}], got {param.top_k}")
        if self._axis is not None:
            return ((*bottom[: self._axis], param.top_k, *bottom[self._axis + 1 :]),)
        blank = (1,) * max(0, len(bottom) - 3)
        return ((bottom[0], 2 if param.out_max_val else 1, param.top_k, *blank),)

    def apply(self, x: Array, step_key: StepKey) -> AnyArray:
        param, shape = self.spec.argmax_param, caffe_shape(x)
        if self._axis is not None:
            rows = by_channel(x, self._axis, 1, self.work, "x")
            largest = reduction.row_largest(
                rows.reshape(-1, rows.shape[-1]), param.top_k, self.work
            )
            values = largest[param.out_max_val].reshape(*rows.shape[:-1], param.top_k)
            top = (*shape[: self._axis], param.top_k, *shape[self._axis + 1 :])
            return from_channel(values, top, self._axis, 1, self.work, "top")
        rows = flat(x, 1, self.work, "x in order")
        largest = reduction.row_largest(rows, param.top_k, self.work)
        both = channels.concatenate(largest[: 1 + param.out_max_val], 1, self.work)
        return as_stored(both.reshape(len(rows), *self.tops[0][1:]), self.work, "top")

    def differentiate(self, dy: Array) -> None:
        return None


class Filter(Layer):
    """Of every other bottom, the rows where the last bottom is not zero.

    The host reads the last bottom, because the tops' sizes depend on it; so a step is not captured.
    """

    BOTTOMS = range(2, 1025)
    TOPS = range(1, 1024)
    captures = False

    def set_up(self) -> tuple[Shape, ...]:
        *bottoms, selector = self.bottoms
        for shape in self.bottoms:
            self.axis(0, shape)
        if len(self.spec.top) != len(bottoms):
            raise self.bad(f"expected {len(bottoms)} tops, got {len(self.spec.top)}")
        if prod(selector) != selector[0] or any(shape[0] != selector[0] for shape in bottoms):
            raise self.bad(
                f"expected one number a row in the last bottom, got {self.describe_bottom(-1)} for"
                f" {self.describe_bottom(0)}"
            )
        return tuple(bottoms)

    def forward(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        *blobs, selector = bottoms
        chosen = backends.as_host(selector).reshape(-1) != 0
        if not chosen.any():
            raise self.bad("expected at least one row with a selector other than 0, got none")
        self._rows = self._to_device(np.flatnonzero(chosen), "kept", selector)
        # The place of each row among the chosen ones; -1 is no row, and its gradient is zero.
        positions = np.where(chosen, np.cumsum(chosen) - 1, -1)
        self._positions = self._to_device(positions, "places", selector)
        return [self._gather(n, "top", blob, self._rows) for n, blob in enumerate(blobs)]

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, needs_grad: NeedsGrad
    ) -> Gradients:
        dbottoms: list[AnyArray | None] = [
            None if dy is None or not want else self._gather(top, "bottom", dy, self._positions)
            for top, (dy, want) in enumerate(zip(gradients, needs_grad[:-1], strict=True))
        ]
        return [*dbottoms, None]

    def _gather(self, blob: int, side: str, array: AnyArray, rows: Labels) -> AnyArray:
        """The rows of an array at these places, in memory of its own for each blob and side."""
        gathered = embedding.gather(array.reshape(len(array), -1), rows, self.works[side, blob])
        return gathered.reshape(len(rows), *array.shape[1:])

    def _to_device(self, rows: AnyArray, role: str, like: AnyArray) -> Labels:
        device_rows = self.work.take_as(role, rows.shape, np.int64, like)
        backends.copy(rows, device_rows)
        return device_rows


class BatchReindex(Layer):
    """The rows of the first bottom at the places that the second bottom lists."""

    BOTTOMS = range(2, 3)
    LABELS = frozenset({1})

    def set_up(self) -> tuple[Shape, ...]:
        bottom, rows = self.bottoms
        if len(rows) != 1 or not bottom:
            raise self.bad(f"expected a list of rows, got {self.describe_bottom(1)}")
        return ((*rows, *bottom[1:]),)

    def forward(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        x = bottoms[0]
        self._shape = x.shape
        self._rows = self.indices(1, bottoms[1], len(x), "row numbers")
        y = embedding.gather(x.reshape(len(x), -1), self._rows, self.work)
        return (y.reshape(-1, *x.shape[1:]),)

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, needs_grad: NeedsGrad
    ) -> Gradients:
        dy = gradients[0]
        assert dy is not None
        if not needs_grad[0]:
            return [None, None]
        dx = self.work.take("dx", self._shape, dy)
        rows = dx.reshape(len(dx), -1)
        embedding.gather_backward(dy.reshape(len(dy), -1), self._rows, rows, self.work)
        return [dx, None]

    def check_column(self, bottom: int, column: AnyArray) -> None:
        if bottom == 1:
            self.indices(1, column, self.bottoms[0][0], "row numbers")


ROWS: Mapping[str, type[Layer]] = {
    "Reduction": Reduction,
    "ArgMax": ArgMax,
    "Filter": Filter,
    "BatchReindex": BatchReindex,
}
