"""Layers that pick or reduce: Reduction, ArgMax, Filter and BatchReindex. They have no kernels."""

from collections.abc import Mapping
from math import prod
from typing import ClassVar

import numpy as np

from cupy_kernels import backends, channels, reduction
from cupy_kernels.reduction import Term
from cupy_kernels.types import AnyArray, Array
from worker.caffe.caffe_pb2 import ReductionParameter
from worker.caffe.layer import (
    Arrays,
    Gradients,
    HostLayer,
    Layer,
    Shape,
    StepKey,
    Takes,
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

    SUPPORTED_FIELDS: ClassVar[Takes] = {
        "reduction_param": frozenset({"operation", "axis", "coeff"})
    }

    def set_up(self) -> tuple[Shape, ...]:
        self._axis = self.axis(self.spec.reduction_param.axis, self.bottoms[0])
        return (self.bottoms[0][: self._axis],)

    def apply(self, x: Array, moment: StepKey) -> AnyArray:
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

    SUPPORTED_FIELDS: ClassVar[Takes] = {
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

    def apply(self, x: Array, moment: StepKey) -> AnyArray:
        param, shape = self.spec.argmax_param, caffe_shape(x)
        if self._axis is not None:
            rows = by_channel(x, self._axis, 1, self.work, "x")
            found = reduction.row_largest(rows.reshape(-1, rows.shape[-1]), param.top_k, self.work)
            kept = found[param.out_max_val].reshape(*rows.shape[:-1], param.top_k)
            top = (*shape[: self._axis], param.top_k, *shape[self._axis + 1 :])
            return from_channel(kept, top, self._axis, 1, self.work, "top")
        rows = flat(x, 1, self.work, "x in order")
        found = reduction.row_largest(rows, param.top_k, self.work)
        both = channels.concatenate(found[: 1 + param.out_max_val], 1, self.work)
        return as_stored(both.reshape(len(rows), *self.tops[0][1:]), self.work, "top")

    def differentiate(self, dy: Array) -> None:
        return None


class Filter(HostLayer):
    """Of every other bottom, the rows where the last bottom is not zero."""

    BOTTOMS = range(2, 1025)
    TOPS = range(1, 1024)

    def set_up(self) -> tuple[Shape, ...]:
        *bottoms, selector = self.bottoms
        for shape in self.bottoms:
            self.axis(0, shape)
        if len(self.spec.top) != len(bottoms):
            raise self.bad(f"expected {len(bottoms)} tops, got {len(self.spec.top)}")
        if prod(selector) != selector[0] or any(shape[0] != selector[0] for shape in bottoms):
            raise self.bad(
                f"expected one number a row in the last bottom, got {self.described(-1)} for"
                f" {self.described(0)}"
            )
        return tuple(bottoms)

    def compute(self, bottoms: Arrays, weights: Arrays, moment: StepKey) -> Arrays:
        *blobs, selector = bottoms
        self._kept = selector.reshape(-1) != 0
        self._shapes = [blob.shape for blob in blobs]
        if not self._kept.any():
            raise self.bad("expected at least one row with a selector other than 0, got none")
        return tuple(blob[self._kept] for blob in blobs)

    def gradients(self, dtops: Gradients, weights: Arrays, out: Gradients) -> Gradients:
        found: list[AnyArray | None] = []
        for dy, shape in zip(dtops, self._shapes, strict=True):
            dx = np.zeros(shape, np.float32)
            if dy is not None:
                dx[self._kept] = dy
            found.append(dx)
        return [*found, None]


class BatchReindex(HostLayer):
    """The rows of the first bottom at the places that the second bottom lists."""

    BOTTOMS = range(2, 3)
    LABELS = frozenset({1})

    def set_up(self) -> tuple[Shape, ...]:
        bottom, places = self.bottoms
        if len(places) != 1 or not bottom:
            raise self.bad(f"expected a list of rows, got {self.described(1)}")
        return ((*places, *bottom[1:]),)

    def compute(self, bottoms: Arrays, weights: Arrays, moment: StepKey) -> Arrays:
        x, places = bottoms
        self._shape, rows = x.shape, places.astype(np.int64)
        wrong = (rows != places) | (rows < 0) | (rows >= len(x))
        if wrong.any():
            raise self.bad(f"expected whole row numbers in [0, {len(x)}), got {places[wrong][0]}")
        self._rows = rows
        return (x[rows],)

    def gradients(self, dtops: Gradients, weights: Arrays, out: Gradients) -> Gradients:
        assert dtops[0] is not None
        dx = np.zeros(self._shape, np.float32)
        np.add.at(dx, self._rows, dtops[0])
        return [dx, None]


ROWS: Mapping[str, type[Layer]] = {
    "Reduction": Reduction,
    "ArgMax": ArgMax,
    "Filter": Filter,
    "BatchReindex": BatchReindex,
}
