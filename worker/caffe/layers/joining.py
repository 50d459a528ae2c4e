"""Layers that join blobs, or give one to several: Concat, Slice, Split, Eltwise and Silence."""

from collections.abc import Mapping
from itertools import pairwise
from typing import ClassVar

from cupy_kernels.ops import channels, eltwise
from cupy_kernels.types import Array
from worker.caffe.caffe_pb2 import EltwiseParameter
from worker.caffe.layer import (
    Arrays,
    Gradients,
    Layer,
    NeedsGrad,
    Shape,
    StepKey,
    SupportedFields,
    memory_axis,
)

_MANY = 1025
_MAX_MAXIMA = 256  # a maximum's origin is kept in a byte


class Concat(Layer):
    """The bottoms, joined along an axis."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "concat_param": frozenset({"axis", "concat_dim"})
    }
    BOTTOMS = range(1, _MANY)

    def set_up(self) -> tuple[Shape, ...]:
        param, first = self.spec.concat_param, self.bottoms[0]
        dimension = param.concat_dim if param.HasField("concat_dim") else param.axis
        axis = self.axis(dimension, first)
        self.check_alike(but=axis)
        self._axis = memory_axis(axis, len(first))
        joined = sum(shape[axis] for shape in self.bottoms)
        return ((*first[:axis], joined, *first[axis + 1 :]),)

    def forward(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        self._sizes = [x.shape[self._axis] for x in bottoms]
        return (channels.concatenate(bottoms, self._axis, self.work),)

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, needs_grad: NeedsGrad
    ) -> Gradients:
        assert gradients[0] is not None
        return channels.split(gradients[0], self._sizes, self._axis, self.work)


class Slice(Layer):
    """The bottom, cut along an axis at the slice points, or into equal parts."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "slice_param": frozenset({"axis", "slice_dim", "slice_point"})
    }
    TOPS = range(1, _MANY)

    def set_up(self) -> tuple[Shape, ...]:
        param, bottom, count = self.spec.slice_param, self.bottoms[0], len(self.spec.top)
        axis = self.axis(param.slice_dim if param.HasField("slice_dim") else param.axis, bottom)
        whole, points = bottom[axis], list(param.slice_point)
        if not points:
            if whole % count:
                raise self.bad(
                    f"expected axis {axis} of {self.describe_bottom(0)} to be a multiple of {count}"
                    " tops"
                )
            points = [whole // count * number for number in range(1, count)]
        edges = [0, *points, whole]
        self._sizes = [stop - start for start, stop in pairwise(edges)]
        if len(self._sizes) != count or min(self._sizes) < 1:
            raise self.bad(
                f"expected {count - 1} rising slice_points below {whole} for {count} tops, got"
                f" {points}"
            )
        self._axis, self._caffe_axis = memory_axis(axis, len(bottom)), axis
        return tuple((*bottom[:axis], size, *bottom[axis + 1 :]) for size in self._sizes)

    def forward(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        x = bottoms[0]
        self._like, sizes = x, self._sizes
        if self._caffe_axis == 0 and x.shape[0] != sum(sizes):
            raise self.bad(f"slices rows: expected {sum(sizes)} rows, got {x.shape[0]}")
        return tuple(channels.split(x, sizes, self._axis, self.work))

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, needs_grad: NeedsGrad
    ) -> Gradients:
        shape = list(self._like.shape)
        parts = []
        for number, (gradient, size) in enumerate(zip(gradients, self._sizes, strict=True)):
            shape[self._axis] = size
            zeros = f"zeros{number}"
            parts.append(
                self.work.zeros(zeros, tuple(shape), self._like) if gradient is None else gradient
            )
        return [channels.concatenate(parts, self._axis, self.work)]


class Split(Layer):
    """The bottom, once for each top. Nets need none: a blob may be read by several layers."""

    TOPS = range(1, _MANY)

    def set_up(self) -> tuple[Shape, ...]:
        return (self.bottoms[0],) * len(self.spec.top)

    def forward(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        return (bottoms[0],) * len(self.spec.top)

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, needs_grad: NeedsGrad
    ) -> Gradients:
        present = [dy for dy in gradients if dy is not None]
        if len(present) == 1:
            return present
        return [eltwise.weighted_sum(present, [1.0] * len(present), self.work)]


class Eltwise(Layer):
    """The sum of the bottoms (with a factor for each), their product, or their maximum."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "eltwise_param": frozenset({"operation", "coeff", "stable_prod_grad"})
    }
    BOTTOMS = range(2, _MANY)
    OVERWRITABLE = True

    def set_up(self) -> tuple[Shape, ...]:
        param, count = self.spec.eltwise_param, len(self.bottoms)
        self._operation = param.operation
        if param.coeff and (len(param.coeff) != count or param.operation != EltwiseParameter.SUM):
            raise self.bad(
                f"expected a coeff for each of {count} bottoms of a SUM, or none, got"
                f" {len(param.coeff)}"
            )
        if param.operation == EltwiseParameter.MAX and count > _MAX_MAXIMA:
            raise self.bad(f"expected at most {_MAX_MAXIMA} bottoms of a MAX, got {count}")
        self._factors = list(param.coeff) or [1.0] * count
        self.check_alike()
        return (self.bottoms[0],)

    def forward(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        if self._operation == EltwiseParameter.SUM:
            return (eltwise.weighted_sum(bottoms, self._factors, self.work),)
        self._bottoms = bottoms
        if self._operation == EltwiseParameter.PROD:
            return (eltwise.product(bottoms, self.work),)
        y, self._saved = eltwise.maximum(bottoms, self.work)
        return (y,)

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, needs_grad: NeedsGrad
    ) -> Gradients:
        dy = gradients[0]
        assert dy is not None
        return [
            self._gradient(dy, index) if want else None for index, want in enumerate(needs_grad)
        ]

    def _gradient(self, dy: Array, index: int) -> Array:
        if self._operation == EltwiseParameter.SUM:
            return eltwise.weighted_sum_backward(dy, self._factors[index], index, self.work)
        if self._operation == EltwiseParameter.PROD:
            return eltwise.product_backward(dy, self._bottoms, index, self.work)
        return eltwise.maximum_backward(dy, self._saved, index, self.work)


class Silence(Layer):
    """Reads blobs, so that they are no outputs of the net."""

    BOTTOMS = range(1, _MANY)
    TOPS = range(1)

    def set_up(self) -> tuple[Shape, ...]:
        return ()

    def forward(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        return ()


ROWS: Mapping[str, type[Layer]] = {
    "Concat": Concat,
    "Slice": Slice,
    "Split": Split,
    "Eltwise": Eltwise,
    "Silence": Silence,
}
