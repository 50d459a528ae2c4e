"""InnerProduct, a layer with a matrix of weights."""

from collections.abc import Mapping
from math import prod
from typing import ClassVar

from cupy_kernels.ops import inner_product
from cupy_kernels.types import Array
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


class InnerProduct(Layer):
    """Weights (out, in), or (in, out) with `transpose`; then a bias (out,).

    The axes from `axis` on are flattened in Caffe's order (c, h, w), so that Caffe's weights fit.
    """

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
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

    def forward(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        self._x_shape = caffe_shape(bottoms[0])
        self._x = flat(bottoms[0], self._axis, self.work, "x")
        bias = weights[1] if len(weights) > 1 else None
        y = inner_product.forward(
            self._x,
            self._turn(weights[0]),
            bias,
            self.work,
            self.context.precision,
            relu=self._rectifies,
        )
        return (as_stored(y.reshape(*self._x_shape[: self._axis], -1), self.work, "top"),)

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, needs_grad: NeedsGrad
    ) -> Gradients:
        assert gradients[0] is not None
        dx = inner_product.backward(
            flat(gradients[0], self._axis, self.work, "dy"),
            self._x,
            self._turn(weights[0]),
            None if out[0] is None else self._turn(out[0]),
            out[1] if len(out) > 1 else None,
            self.work,
            self.context.precision,
            needs_dx=needs_grad[0],
        )
        return [None if dx is None else as_stored(dx.reshape(self._x_shape), self.work, "bottom")]

    def _turn(self, weight: Array) -> Array:
        return weight.T if self._transposed else weight


ROWS: Mapping[str, type[Layer]] = {"InnerProduct": InnerProduct}
