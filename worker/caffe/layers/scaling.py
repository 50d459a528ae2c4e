"""Scale and Bias: factors and terms that are learnt, or computed by another layer."""

from collections.abc import Mapping
from math import prod
from typing import ClassVar

from cupy_kernels.ops import batch_norm, channels
from cupy_kernels.types import AnyArray, Array
from worker.caffe.caffe_pb2 import BiasParameter, FillerParameter, ScaleParameter
from worker.caffe.layer import (
    Arrays,
    Gradients,
    Layer,
    NeedsGrad,
    Shape,
    StepKey,
    SupportedFields,
    as_stored,
    by_channel,
    caffe_shape,
    flat,
    from_channel,
)
from worker.caffe.layers.normalisation import BatchNorm


class _Broadcasting(Layer):
    """A tensor, or the second bottom, spread over some axes of the first bottom."""

    BOTTOMS = range(1, 3)
    OVERWRITABLE = True

    def read_axes(self, param: ScaleParameter | BiasParameter) -> Shape:
        """Set the axes from the entry, and return the shape of the tensor."""
        bottom = self.bottoms[0]
        self._axis = self.axis(param.axis, bottom) if bottom else 0
        if len(self.bottoms) == 2:
            shape = self.bottoms[1]
            matching = bottom[self._axis : self._axis + len(shape)]
            if matching != shape:
                raise self.bad(
                    f"expected the second bottom's shape from axis {self._axis} on in the first,"
                    f" got {self.describe_bottom(1)} and {self.describe_bottom(0)}"
                )
        else:
            count = len(bottom) - self._axis if param.num_axes == -1 else param.num_axes
            if count < 0 or self._axis + count > len(bottom):
                raise self.bad(
                    f"expected num_axes that fit axis {self._axis} of {self.describe_bottom(0)},"
                    f" got {param.num_axes}"
                )
            shape = bottom[self._axis : self._axis + count]
        self._count = len(shape)
        if not shape:  # one number for all
            self._axis, self._count = len(bottom), 0
        return shape

    def spread(self, array: AnyArray, role: str) -> Array:
        """The array with the axes of the tensor last."""
        return by_channel(array, self._axis, self._count, self.work, role)

    def gather(self, moved: Array, role: str) -> AnyArray:
        """The inverse of `spread`."""
        return from_channel(moved, self._shape, self._axis, self._count, self.work, role)

    def operand(self, bottoms: Arrays, weights: Arrays) -> Array:
        """The tensor or the second bottom, flat."""
        if len(bottoms) == 2:
            return flat(bottoms[1], 0, self.work, "operand").reshape(-1)
        return weights[0].reshape(-1)

    def place(self, out: Gradients, needs_grad: NeedsGrad, like: Array) -> Array | None:
        """Where to write the operand's gradient, flat; None if it is not needed."""
        if len(self.bottoms) == 2:
            size = prod(self._operand_shape)
            return self.work.take("doperand", (size,), like) if needs_grad[1] else None
        return None if out[0] is None else out[0].reshape(-1)

    def store_operand(self, gradient: Array | None) -> AnyArray | None:
        """The second bottom's gradient, from `gradient`."""
        if gradient is None:
            return None
        return as_stored(gradient.reshape(self._operand_shape), self.work, "second bottom")

    def note(self, bottoms: Arrays) -> None:
        self._shape = caffe_shape(bottoms[0])
        self._operand_shape = caffe_shape(bottoms[1]) if len(bottoms) == 2 else ()


class Scale(_Broadcasting):
    """x times a tensor or the second bottom, plus a bias with bias_term."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "scale_param": frozenset({"axis", "num_axes", "filler", "bias_term", "bias_filler"})
    }

    def set_up(self) -> tuple[Shape, ...]:
        param = self.spec.scale_param
        shape = self.read_axes(param)
        if len(self.bottoms) == 1:
            ones = FillerParameter(value=1.0)
            self.add_parameter(shape, param.filler if param.HasField("filler") else ones)
        if param.bias_term:
            self.add_parameter(shape, param.bias_filler)
        self._norm: BatchNorm | None = None
        return (self.bottoms[0],)

    def fuse_into(self, before: Layer) -> bool:
        # One pass over the image in place of two, and one image less to keep.
        alike = len(self.bottoms) == 1 and (self._axis, self._count) == (1, 1)
        if alike and isinstance(before, BatchNorm) and before.defer():
            self._norm = before
        return self._norm is not None

    def forward(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        self.note(bottoms)
        self._x = self.spread(bottoms[0], "x")
        self._factors = self.operand(bottoms, weights)
        bias = weights[-1].reshape(-1) if self.spec.scale_param.bias_term else None
        if self._norm is None:
            y = channels.scale(self._x, self._factors, bias, self.work)
        else:
            known = *self._norm.statistics, self._factors, bias
            y = batch_norm.forward(self._x, *known, self.work)
        return (self.gather(y, "top"),)

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, needs_grad: NeedsGrad
    ) -> Gradients:
        assert gradients[0] is not None
        dbias = out[-1] if self.spec.scale_param.bias_term else None
        doperand = self.place(out, needs_grad, gradients[0])
        dy, dbias = self.spread(gradients[0], "dy"), None if dbias is None else dbias.reshape(-1)
        if self._norm is None:
            dx = channels.scale_backward(dy, self._x, self._factors, doperand, dbias, self.work)
        else:
            known = *self._norm.statistics, self._factors
            dx = batch_norm.backward(dy, self._x, *known, doperand, dbias, self.work)
        dbottoms = [self.gather(dx, "bottom") if needs_grad[0] else None]
        return dbottoms if len(needs_grad) == 1 else [*dbottoms, self.store_operand(doperand)]


class Bias(_Broadcasting):
    """x plus a tensor or the second bottom."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "bias_param": frozenset({"axis", "num_axes", "filler"})
    }

    def set_up(self) -> tuple[Shape, ...]:
        shape = self.read_axes(self.spec.bias_param)
        if len(self.bottoms) == 1:
            self.add_parameter(shape, self.spec.bias_param.filler)
        return (self.bottoms[0],)

    def forward(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        self.note(bottoms)
        x = self.spread(bottoms[0], "x")
        return (
            self.gather(channels.scale(x, None, self.operand(bottoms, weights), self.work), "top"),
        )

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, needs_grad: NeedsGrad
    ) -> Gradients:
        assert gradients[0] is not None
        doperand = self.place(out, needs_grad, gradients[0])
        dy = self.spread(gradients[0], "dy")
        channels.scale_backward(dy, dy, None, None, doperand, self.work)
        dbottoms: list[AnyArray | None] = [gradients[0] if needs_grad[0] else None]
        return dbottoms if len(needs_grad) == 1 else [*dbottoms, self.store_operand(doperand)]


ROWS: Mapping[str, type[Layer]] = {"Scale": Scale, "Bias": Bias}
