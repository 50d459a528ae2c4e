"""Layers without an image plane: InnerProduct, ReLU and Dropout."""

from collections.abc import Sequence
from hashlib import blake2b
from math import prod
from typing import ClassVar

from cupy_kernels import activation, dropout, inner_product
from cupy_kernels.rng_keys import RngKey
from cupy_kernels.types import AnyArray, Array
from worker.caffe.layer import Layer, Shape, StepKey, Takes, as_stored, flat, to_nchw


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

    def forward(
        self, bottoms: Sequence[AnyArray], weights: Sequence[Array], moment: StepKey
    ) -> tuple[AnyArray, ...]:
        self._x_shape = to_nchw(bottoms[0]).shape
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
        self,
        gradients: Sequence[Array | None],
        weights: Sequence[Array],
        out: Sequence[Array],
        wanted: Sequence[bool],
    ) -> Sequence[Array | None]:
        assert gradients[0] is not None
        dx = inner_product.backward(
            flat(gradients[0], self._axis, self.work, "dy"),
            self._x,
            self._turn(weights[0]),
            self._turn(out[0]) if self.trains(0) else None,
            out[1] if len(out) > 1 and self.trains(1) else None,
            self.work,
            self.setting.precision,
            wanted=wanted[0],
        )
        return [None if dx is None else as_stored(dx.reshape(self._x_shape), self.work, "bottom")]

    def _turn(self, weight: Array) -> Array:
        return weight.T if self._transposed else weight


class ReLU(Layer):
    """max(x, 0), or with a negative slope for x below 0."""

    SUPPORTED_FIELDS: ClassVar[Takes] = {"relu_param": frozenset({"negative_slope", "engine"})}

    def set_up(self) -> tuple[Shape, ...]:
        self._slope = self.spec.relu_param.negative_slope
        self._done = False
        return (self.bottoms[0],)

    def fuse_into(self, before: Layer) -> bool:
        # A ReLU's gradient can be computed from its output, so `backward` stays the same.
        self._done = self._slope == 0 and before.fuse_relu()
        return self._done

    def forward(
        self, bottoms: Sequence[AnyArray], weights: Sequence[Array], moment: StepKey
    ) -> tuple[AnyArray, ...]:
        self._x = bottoms[0]
        if self._done:
            return (self._x,)
        return (activation.relu(self._x, self._slope, self.work),)

    def backward(
        self,
        gradients: Sequence[Array | None],
        weights: Sequence[Array],
        out: Sequence[Array],
        wanted: Sequence[bool],
    ) -> Sequence[Array | None]:
        assert gradients[0] is not None
        if not wanted[0]:
            return [None]
        return [activation.relu_backward(gradients[0], self._x, self._slope, self.work)]


class Dropout(Layer):
    """Sets some activations to zero while training and scales the others up; no effect in tests."""

    SUPPORTED_FIELDS: ClassVar[Takes] = {"dropout_param": frozenset({"dropout_ratio"})}

    def set_up(self) -> tuple[Shape, ...]:
        self._ratio = self.spec.dropout_param.dropout_ratio
        if not 0 < self._ratio < 1:
            raise self.bad(f"expected a dropout_ratio between 0 and 1, got {self._ratio}")
        digest = blake2b(self.name.encode(), digest_size=8).digest()
        self._number = int.from_bytes(digest, "little")
        return (self.bottoms[0],)

    def forward(
        self, bottoms: Sequence[AnyArray], weights: Sequence[Array], moment: StepKey
    ) -> tuple[AnyArray, ...]:
        x = bottoms[0]
        if not self.training:
            return (x,)
        draw = RngKey(moment.seed, moment.step, self._number)
        y, self._kept = dropout.forward(x, self._ratio, draw, self.work)
        return (y,)

    def backward(
        self,
        gradients: Sequence[Array | None],
        weights: Sequence[Array],
        out: Sequence[Array],
        wanted: Sequence[bool],
    ) -> Sequence[Array | None]:
        assert gradients[0] is not None
        if not self.training or not wanted[0]:
            return [gradients[0]]
        return [dropout.backward(gradients[0], self._kept, self.work)]
