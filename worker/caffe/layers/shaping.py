"""Layers that change shapes: Flatten, Reshape, Crop and Tile."""

from abc import abstractmethod
from collections.abc import Mapping
from math import prod
from typing import ClassVar

from cupy_kernels.ops import channels, eltwise
from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace
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
    caffe_shape,
    flat,
    memory_axis,
)


class _Reshaping(Unary):
    """Base of the layers that give the same numbers, in Caffe's order, another shape."""

    def set_up(self) -> tuple[Shape, ...]:
        return (self.find_shape(self.bottoms[0]),)

    @abstractmethod
    def find_shape(self, bottom: Shape) -> Shape:
        """The top's shape for a bottom's, of any batch size."""

    def apply(self, x: Array, step_key: StepKey) -> Array:
        self._shape = caffe_shape(x)
        return self._move(x, self.find_shape(self._shape), "top")

    def differentiate(self, dy: Array) -> Array:
        return self._move(dy, self._shape, "bottom")

    def _move(self, array: Array, shape: Shape, role: str) -> Array:
        ordered = flat(array, 0, self.work, f"{role} in order")
        return as_stored(ordered.reshape(shape), self.work, role)


class Flatten(_Reshaping):
    """The axes from `axis` to `end_axis` as one."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {"flatten_param": frozenset({"axis", "end_axis"})}

    def find_shape(self, bottom: Shape) -> Shape:
        param = self.spec.flatten_param
        start, end = self.axis(param.axis, bottom), self.axis(param.end_axis, bottom)
        if start > end:
            raise self.bad(
                f"expected an axis up to end_axis of {self.describe_bottom(0)}, got {start} and"
                f" {end}"
            )
        return (*bottom[:start], prod(bottom[start : end + 1]), *bottom[end + 1 :])


class Reshape(_Reshaping):
    """The axes from `axis` on in a given shape: 0 copies a size, -1 is what remains."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "reshape_param": frozenset({"shape", "axis", "num_axes"})
    }

    def find_shape(self, bottom: Shape) -> Shape:
        param, axes = self.spec.reshape_param, len(bottom)
        start = param.axis if param.axis >= 0 else axes + 1 + param.axis
        end = axes if param.num_axes == -1 else start + param.num_axes
        dims = list(param.shape.dim)
        if not 0 <= start <= end <= axes:
            raise self.bad(
                f"axis and num_axes do not fit a bottom of shape {self.describe_bottom(0)}"
            )
        if dims.count(-1) > 1 or any(dim < -1 for dim in dims):
            raise self.bad(f"expected sizes, 0, or one -1, got {dims}")
        for index, dim in enumerate(dims):
            if dim == 0:
                if start + index >= axes:
                    raise self.bad(f"no axis {start + index} to copy in {self.describe_bottom(0)}")
                dims[index] = bottom[start + index]
        known = prod(dim for dim in (*bottom[:start], *dims, *bottom[end:]) if dim != -1)
        if -1 in dims:
            dims[dims.index(-1)] = prod(bottom) // known
        shape = (*bottom[:start], *dims, *bottom[end:])
        if prod(shape) != prod(bottom):
            less = "" if bottom == self.bottoms[0] else f" in a batch of shape {bottom}"
            hint = "; a dim of 0 copies the number of rows" if less else ""
            raise self.bad(
                f"expected the {prod(bottom)} numbers of {self.describe_bottom(0)}{less}, got"
                f" {shape}{hint}"
            )
        return shape


class Crop(Layer):
    """A window of the first bottom, of the second bottom's sizes from `axis` on."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {"crop_param": frozenset({"axis", "offset"})}
    BOTTOMS = range(2, 3)

    def set_up(self) -> tuple[Shape, ...]:
        param, (bottom, like) = self.spec.crop_param, self.bottoms
        start = self.axis(param.axis, bottom)
        if len(like) != len(bottom):
            raise self.bad(
                f"expected bottoms of as many axes, got {self.describe_bottom(0)} and"
                f" {self.describe_bottom(1)}"
            )
        offsets = list(param.offset) or [0]
        if len(offsets) not in {1, len(bottom) - start}:
            raise self.bad(f"expected 1 or {len(bottom) - start} offsets, got {len(offsets)}")
        if len(offsets) == 1:
            offsets *= len(bottom) - start
        top = (*bottom[:start], *like[start:])
        for axis, offset in enumerate(offsets, start):
            if offset + top[axis] > bottom[axis]:
                raise self.bad(
                    f"an offset of {offset} and the size of {self.describe_bottom(1)} do not fit"
                    f" axis {axis} of {self.describe_bottom(0)}"
                )
        # (axis in memory, floats before the window, in it, behind it) of each axis that shrinks
        self._cuts = [
            (memory_axis(axis, len(bottom)), offset, top[axis], bottom[axis] - offset - top[axis])
            for axis, offset in enumerate(offsets, start)
            if top[axis] != bottom[axis]
        ]
        return (top,)

    def forward(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        y = bottoms[0]
        for axis, *sizes in self._cuts:
            y = channels.split(y, sizes, axis, self.works[f"cut{axis}"])[1]
        return (y,)

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, needs_grad: NeedsGrad
    ) -> Gradients:
        dx = gradients[0]
        assert dx is not None
        if not needs_grad[0]:
            return [None, None]
        for axis, before, _, after in reversed(self._cuts):
            parts = [self._zeros(dx, axis, before), dx, self._zeros(dx, axis, after)]
            dx = channels.concatenate(parts, axis, self.works[f"back{axis}"])
        return [dx, None]

    def _zeros(self, like: Array, axis: int, size: int) -> Array:
        shape = (*like.shape[:axis], size, *like.shape[axis + 1 :])
        return self.works[f"zeros{axis}"].zeros(f"{size}", shape, like)


class Tile(Unary):
    """The bottom, repeated along an axis."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {"tile_param": frozenset({"axis", "tiles"})}

    def set_up(self) -> tuple[Shape, ...]:
        param, bottom = self.spec.tile_param, self.bottoms[0]
        axis = self.axis(param.axis, bottom)
        if param.tiles < 1:
            raise self.bad(f"expected at least 1 tiles, got {param.tiles}")
        self._sums = Workspace(self.context.pool)  # the top must outlive the backward pass
        self._tiles, self._axis = param.tiles, memory_axis(axis, len(bottom))
        return ((*bottom[:axis], bottom[axis] * param.tiles, *bottom[axis + 1 :]),)

    def apply(self, x: Array, step_key: StepKey) -> Array:
        self._size = x.shape[self._axis]
        return channels.concatenate([x] * self._tiles, self._axis, self.work)

    def differentiate(self, dy: Array) -> Array:
        parts = channels.split(dy, [self._size] * self._tiles, self._axis, self.work)
        return eltwise.weighted_sum(parts, [1.0] * self._tiles, self._sums)


ROWS: Mapping[str, type[Layer]] = {
    "Flatten": Flatten,
    "Reshape": Reshape,
    "Crop": Crop,
    "Tile": Tile,
}
