"""Layers over the image plane: Convolution and Pooling."""

from collections.abc import Sequence
from typing import ClassVar

from cupy_kernels import conv_shapes, convolution, pooling
from cupy_kernels.types import AnyArray, Array
from worker.caffe.caffe_pb2 import ConvolutionParameter, PoolingParameter
from worker.caffe.layer import Layer, Shape, StepKey, Takes

Pair = tuple[int, int]


class Convolution(Layer):
    """Weights (out, in/group, kh, kw), then a bias (out,) unless bias_term is false."""

    SUPPORTED_FIELDS: ClassVar[Takes] = {
        "convolution_param": frozenset({
            "num_output", "bias_term", "pad", "kernel_size", "group", "stride", "weight_filler",
            "bias_filler", "pad_h", "pad_w", "kernel_h", "kernel_w", "stride_h", "stride_w",
            "engine", "axis", "force_nd_im2col", "dilation",
        })
    }  # fmt: skip

    def set_up(self) -> tuple[Shape, ...]:
        param, (n, c, h, w) = self.spec.convolution_param, _image(self)
        if self.axis(param.axis, self.bottoms[0]) != 1:
            raise self.bad(f"axis {param.axis} is not supported; expected 1")
        out, group = param.num_output, param.group
        if out < 1 or group < 1 or out % group or c % group:
            raise self.bad(
                f"expected num_output and {c} input channels to be multiples of group,"
                f" got num_output {out}, group {group}"
            )
        self._rectifies = False
        self._shape = conv_shapes.Convolution(
            _pair(self, param, "kernel", "kernel_size", None),
            _pair(self, param, "stride", "stride", 1),
            _pair(self, param, "pad", "pad", 0),
            self._dilation(),
            group,
            self.setting.precision,
        )
        size = self._shape.output(h, w)
        if min(size) < 1:
            raise self.bad(f"{self._shape} does not fit into a bottom of shape {self.bottoms[0]}")
        self.add_parameter((out, c // group, *self._shape.kernel), param.weight_filler)
        if param.bias_term:
            self.add_parameter((out,), param.bias_filler)
        return ((n, out, *size),)

    def fuse_relu(self) -> bool:
        self._rectifies = True
        return True

    def _dilation(self) -> Pair:
        given = list(self.spec.convolution_param.dilation) or [1]
        if len(given) > 2 or min(given) < 1:
            raise self.bad(f"expected 1 or 2 dilations of at least 1, got {given}")
        return given[0], given[-1]

    def forward(
        self, bottoms: Sequence[AnyArray], weights: Sequence[Array], moment: StepKey
    ) -> tuple[AnyArray, ...]:
        x = bottoms[0]
        self._x_shape = x.shape
        bias = weights[1] if len(weights) > 1 else None
        y, self._kept = convolution.forward(
            x, weights[0], bias, self._shape, self.work, relu=self._rectifies
        )
        return (y,)

    def backward(
        self,
        gradients: Sequence[Array | None],
        weights: Sequence[Array],
        out: Sequence[Array],
        wanted: Sequence[bool],
    ) -> Sequence[Array | None]:
        dy = gradients[0]
        assert dy is not None
        into = [tensor if self.trains(index) else None for index, tensor in enumerate(out)]
        return [
            convolution.backward(
                dy,
                self._kept,
                self._x_shape,
                weights[0],
                into[0],
                into[1] if len(into) > 1 else None,
                self._shape,
                self.work,
                wanted=wanted[0],
            )
        ]


class Pooling(Layer):
    """MAX and AVE, with Caffe's rounding and border rules."""

    SUPPORTED_FIELDS: ClassVar[Takes] = {
        "pooling_param": frozenset({
            "pool", "pad", "pad_h", "pad_w", "kernel_size", "kernel_h", "kernel_w", "stride",
            "stride_h", "stride_w", "engine", "global_pooling", "round_mode",
        })
    }  # fmt: skip

    def set_up(self) -> tuple[Shape, ...]:
        param, (n, c, h, w) = self.spec.pooling_param, _image(self)
        if param.pool == PoolingParameter.STOCHASTIC:
            raise self.bad("pool STOCHASTIC is not supported; expected MAX or AVE")
        self._max = param.pool == PoolingParameter.MAX
        self._shape = conv_shapes.Pooling(
            self._kernel(h, w),
            _pair(self, param, "stride", "stride", 1),
            _pair(self, param, "pad", "pad", 0),
            param.round_mode == PoolingParameter.CEIL,
        )
        size = self._shape.output(h, w)
        for axis, extent in enumerate((h, w)):
            kernel, stride, pad = (
                self._shape.kernel[axis], self._shape.stride[axis], self._shape.pad[axis],
            )  # fmt: skip
            if pad >= kernel:
                raise self.bad(f"expected a pad smaller than the kernel, got {pad} and {kernel}")
            if size[axis] < 1 or (size[axis] - 1) * stride - pad >= extent:
                raise self.bad(f"{self._shape} does not fit a bottom of shape {self.bottoms[0]}")
        return ((n, c, *size),)

    def _kernel(self, h: int, w: int) -> Pair:
        param = self.spec.pooling_param
        if not param.global_pooling:
            return _pair(self, param, "kernel", "kernel_size", None)
        if (
            param.HasField("kernel_size")
            or param.HasField("kernel_h")
            or param.HasField("kernel_w")
        ):
            raise self.bad("global_pooling sets the kernel; expected no kernel_size with it")
        return h, w

    def forward(
        self, bottoms: Sequence[AnyArray], weights: Sequence[Array], moment: StepKey
    ) -> tuple[AnyArray, ...]:
        x = bottoms[0]
        self._x_shape = x.shape
        if not self._max:
            return (pooling.average_forward(x, self._shape, self.work),)
        y, self._where = pooling.max_forward(x, self._shape, self.work)
        return (y,)

    def backward(
        self,
        gradients: Sequence[Array | None],
        weights: Sequence[Array],
        out: Sequence[Array],
        wanted: Sequence[bool],
    ) -> Sequence[Array | None]:
        dy = gradients[0]
        assert dy is not None
        if not wanted[0]:
            return [None]
        if not self._max:
            return [pooling.average_backward(dy, self._x_shape, self._shape, self.work)]
        return [pooling.max_backward(dy, self._where, self._x_shape, self._shape, self.work)]


def _image(layer: Layer) -> tuple[int, int, int, int]:
    shape = layer.bottoms[0]
    if len(shape) != 4:
        raise layer.bad(f"expected a bottom of shape (n, c, h, w), got {shape}")
    n, c, h, w = shape
    return n, c, h, w


def _pair(
    layer: Layer,
    param: ConvolutionParameter | PoolingParameter,
    sided: str,
    plain: str,
    default: int | None,
) -> Pair:
    """(vertical, horizontal) from `sided`_h and `sided`_w, or from `plain`: one form, not both."""
    # A convolution's sizes are lists, of one entry for both directions or one for each.
    value = getattr(param, plain)
    given = list(value) if not isinstance(value, int) else [value] * param.HasField(plain)
    sides = [
        getattr(param, f"{sided}_{side}") for side in "hw" if param.HasField(f"{sided}_{side}")
    ]
    if sides:
        if len(sides) != 2 or given:
            raise layer.bad(f"expected {plain}, or both {sided}_h and {sided}_w")
        found = sides
    else:
        found = given or ([] if default is None else [default])
    least = 0 if plain == "pad" else 1
    if len(found) not in {1, 2} or min(found) < least:
        raise layer.bad(f"{plain}: expected 1 or 2 numbers of at least {least}, got {found}")
    return found[0], found[-1]
