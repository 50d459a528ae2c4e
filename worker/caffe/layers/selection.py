"""Layers that pick or reduce: Reduction, ArgMax, Filter and BatchReindex. They have no kernels."""

from collections.abc import Mapping
from math import prod
from typing import ClassVar

import numpy as np

from cupy_kernels.types import AnyArray
from worker.caffe.caffe_pb2 import ReductionParameter
from worker.caffe.layer import Arrays, Gradients, HostLayer, Layer, Shape, StepKey, Takes


class Reduction(HostLayer):
    """The sum, mean, sum of absolute values or of squares over the axes from `axis` on."""

    SUPPORTED_FIELDS: ClassVar[Takes] = {
        "reduction_param": frozenset({"operation", "axis", "coeff"})
    }

    def set_up(self) -> tuple[Shape, ...]:
        self._axis = self.axis(self.spec.reduction_param.axis, self.bottoms[0])
        return (self.bottoms[0][: self._axis],)

    def compute(self, bottoms: Arrays, weights: Arrays, moment: StepKey) -> Arrays:
        self._x = x = bottoms[0]
        rows = x.reshape(*x.shape[: self._axis], -1).astype(np.float64)
        self._factor = self.spec.reduction_param.coeff
        match self.spec.reduction_param.operation:
            case ReductionParameter.ASUM:
                rows = np.abs(rows)
            case ReductionParameter.SUMSQ:
                rows = np.square(rows)
            case ReductionParameter.MEAN:
                self._factor /= rows.shape[-1]
        return (self._factor * rows.sum(axis=-1),)

    def gradients(self, dtops: Gradients, weights: Arrays, out: Gradients) -> Gradients:
        x, dy = self._x, dtops[0]
        assert dy is not None
        spread = dy.reshape(*dy.shape, *(1,) * (x.ndim - dy.ndim)) * np.float32(self._factor)
        match self.spec.reduction_param.operation:
            case ReductionParameter.ASUM:
                return [spread * np.sign(x)]
            case ReductionParameter.SUMSQ:
                return [spread * 2 * x]
        return [np.broadcast_to(spread, x.shape)]


class ArgMax(HostLayer):
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

    def compute(self, bottoms: Arrays, weights: Arrays, moment: StepKey) -> Arrays:
        param, x = self.spec.argmax_param, bottoms[0]
        if self._axis is not None:
            places, values = _largest(np.moveaxis(x, self._axis, -1), param.top_k)
            found = values if param.out_max_val else places
            return (np.moveaxis(found, -1, self._axis),)
        places, values = _largest(x.reshape(len(x), -1), param.top_k)
        both = np.stack((places, values) if param.out_max_val else (places,), axis=1)
        return (both.reshape(len(x), *self.tops[0][1:]),)


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


def _largest(x: AnyArray, count: int) -> tuple[AnyArray, AnyArray]:
    """(places, values) of the `count` largest along the last axis; of equals the last is first."""
    size = x.shape[-1]
    order = size - 1 - np.argsort(-x[..., ::-1], axis=-1, kind="stable")
    places = order[..., :count]
    return places, np.take_along_axis(x, places, axis=-1)


ROWS: Mapping[str, type[Layer]] = {
    "Reduction": Reduction,
    "ArgMax": ArgMax,
    "Filter": Filter,
    "BatchReindex": BatchReindex,
}
