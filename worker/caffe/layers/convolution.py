"""Convolution, and Deconvolution, its transpose."""

from collections.abc import Mapping
from typing import ClassVar

from cupy_kernels.ops import channels, convolution
from cupy_kernels.ops.convolution import window
from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace
from worker.caffe.layer import Arrays, Gradients, Layer, NeedsGrad, Shape, StepKey, SupportedFields
from worker.caffe.layers.window_fields import Pair, image_of, misfit, pair


class _Convolving(Layer):
    """Base of both layers: the fields that they read from their entries."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "convolution_param": frozenset({
            "num_output", "bias_term", "pad", "kernel_size", "group", "stride", "weight_filler",
            "bias_filler", "pad_h", "pad_w", "kernel_h", "kernel_w", "stride_h", "stride_w",
            "engine", "axis", "force_nd_im2col", "dilation",
        })
    }  # fmt: skip

    def read_shape(self) -> int:
        """Set `shape` from the entry, and return the number of outputs."""
        param, (_, c, _, _) = self.spec.convolution_param, image_of(self)
        if self.axis(param.axis, self.bottoms[0]) != 1:
            raise self.bad(f"axis {param.axis} is not supported; expected 1")
        out, group = param.num_output, param.group
        if out < 1 or group < 1 or out % group or c % group:
            raise self.bad(
                f"expected num_output and {c} input channels to be multiples of group,"
                f" got num_output {out}, group {group}"
            )
        self.shape = window.Convolution(
            pair(self, param, "kernel", "kernel_size", None),
            pair(self, param, "stride", "stride", 1),
            pair(self, param, "pad", "pad", 0),
            self._dilation(),
            group,
            self.context.precision,
        )
        return out

    def _dilation(self) -> Pair:
        dilations = list(self.spec.convolution_param.dilation) or [1]
        if len(dilations) > 2 or min(dilations) < 1:
            raise self.bad(f"expected 1 or 2 dilations of at least 1, got {dilations}")
        return dilations[0], dilations[-1]


class Convolution(_Convolving):
    """Weights (out, in/group, kh, kw), then a bias (out,) unless bias_term is false."""

    def set_up(self) -> tuple[Shape, ...]:
        out, (n, c, h, w) = self.read_shape(), image_of(self)
        param = self.spec.convolution_param
        self._rectifies = False
        size = self.shape.output(h, w)
        if min(size) < 1:
            raise misfit(self, self.shape)
        self.add_parameter((out, c // param.group, *self.shape.kernel), param.weight_filler)
        if param.bias_term:
            self.add_parameter((out,), param.bias_filler)
        return ((n, out, *size),)

    def fuse_relu(self) -> bool:
        self._rectifies = True
        return True

    def forward(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        x = bottoms[0]
        self._x_shape = x.shape
        bias = weights[1] if len(weights) > 1 else None
        y, self._saved = convolution.forward(
            x, weights[0], bias, self.shape, self.work, relu=self._rectifies
        )
        return (y,)

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, needs_grad: NeedsGrad
    ) -> Gradients:
        assert gradients[0] is not None
        return [
            convolution.backward(
                gradients[0],
                self._saved,
                self._x_shape,
                weights[0],
                out[0],
                out[1] if len(out) > 1 else None,
                self.shape,
                self.work,
                needs_dx=needs_grad[0],
            )
        ]


class Deconvolution(_Convolving):
    """The transpose of a convolution: weights (in, out/group, kh, kw), then a bias (out,).

    Its forward pass is that of a convolution's gradient, and the other way round.
    """

    def set_up(self) -> tuple[Shape, ...]:
        out, (n, c, h, w) = self.read_shape(), image_of(self)
        param, shape = self.spec.convolution_param, self.shape
        size = tuple(
            stride * (count - 1) + dilation * (kernel - 1) + 1 - 2 * pad
            for count, stride, dilation, kernel, pad in zip(
                (h, w), shape.stride, shape.dilation, shape.kernel, shape.pad, strict=True
            )
        )
        if min(size) < 1:
            raise misfit(self, shape)
        self._size = size
        self._back, self._bias = Workspace(self.context.pool), Workspace(self.context.pool)
        self.add_parameter((c, out // param.group, *shape.kernel), param.weight_filler)
        if param.bias_term:
            self.add_parameter((out,), param.bias_filler)
        return ((n, out, *size),)

    def forward(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        self._x = bottoms[0]
        outputs = self.spec.convolution_param.num_output
        y_shape = (len(self._x), *self._size, outputs)
        y = convolution.transpose(self._x, y_shape, weights[0], self.shape, self.work)
        return (self._add_bias(y, weights),)

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, needs_grad: NeedsGrad
    ) -> Gradients:
        dy = gradients[0]
        assert dy is not None
        if len(out) > 1 and out[1] is not None:
            channels.scale_backward(dy, dy, None, None, out[1], self.work)
        # The forward pass of the convolution keeps what its weight's gradient needs.
        dx, saved = convolution.forward(dy, weights[0], None, self.shape, self._back)
        if out[0] is not None:
            convolution.backward(
                *(self._x, saved, dy.shape, weights[0], out[0], None, self.shape, self._back),
                needs_dx=False,
            )
        return [dx if needs_grad[0] else None]

    def _add_bias(self, y: Array, weights: Arrays) -> Array:
        return channels.scale(y, None, weights[1], self._bias) if len(weights) > 1 else y


ROWS: Mapping[str, type[Layer]] = {
    "Convolution": Convolution,
    "Deconvolution": Deconvolution,
}
