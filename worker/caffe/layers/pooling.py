"""Pooling, and SPP, a pyramid of poolings."""

from collections.abc import Mapping
from math import ceil
from typing import ClassVar

from cupy_kernels.ops import channels, eltwise, pooling
from cupy_kernels.ops.dropout.rng_keys import RngKey
from cupy_kernels.ops.pooling import window
from cupy_kernels.types import AnyArray, Array
from cupy_kernels.workspace import Workspace
from worker.caffe.caffe_pb2 import PoolingParameter, SPPParameter
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
    flat,
)
from worker.caffe.layers.dropout import number_of
from worker.caffe.layers.window_fields import Pair, image_of, misfit, pair


class Pooling(Unary):
    """MAX, AVE and STOCHASTIC, with Caffe's rounding and border rules.

    STOCHASTIC (Zeiler and Fergus 2013) draws one element of each window with a probability
    proportional to its value while training, and is the mean with those weights in tests. It needs
    a bottom without negative values.
    """

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "pooling_param": frozenset({
            "pool", "pad", "pad_h", "pad_w", "kernel_size", "kernel_h", "kernel_w", "stride",
            "stride_h", "stride_w", "engine", "global_pooling", "round_mode",
        })
    }  # fmt: skip
    OVERWRITABLE = True

    def set_up(self) -> tuple[Shape, ...]:
        param, (n, c, h, w) = self.spec.pooling_param, image_of(self)
        self._kind = param.pool
        self._shape = window.Pooling(
            self._kernel(h, w),
            pair(self, param, "stride", "stride", 1),
            pair(self, param, "pad", "pad", 0),
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
                raise misfit(self, self._shape)
        if self._kind == PoolingParameter.STOCHASTIC and any(self._shape.pad):
            raise self.bad(f"expected no pad with pool STOCHASTIC, got {self._shape.pad}")
        return ((n, c, *size),)

    def _kernel(self, h: int, w: int) -> Pair:
        param = self.spec.pooling_param
        if not param.global_pooling:
            return pair(self, param, "kernel", "kernel_size", None)
        if any(param.HasField(field) for field in ("kernel_size", "kernel_h", "kernel_w")):
            raise self.bad("global_pooling sets the kernel; expected no kernel_size with it")
        return h, w

    def apply(self, x: Array, step_key: StepKey) -> AnyArray:
        self._x_shape = x.shape
        if self._kind == PoolingParameter.AVE:
            return pooling.average_forward(x, self._shape, self.work)
        if self._kind == PoolingParameter.MAX:
            y, self._where = pooling.max_forward(x, self._shape, self.work)
            return y
        if self.training:
            draw = RngKey(step_key.seed, step_key.step, number_of(self.key))
            y, self._where = pooling.stochastic_forward(x, self._shape, draw, self.work)
            return y
        self._x = x
        # The sum of squares over the sum: both windows have the same number of elements.
        squares = eltwise.product([x, x], self.works["squares"])
        self._means = pooling.average_forward(x, self._shape, self.works["means"])
        means = pooling.average_forward(squares, self._shape, self.work)
        return eltwise.quotient(means, self._means, self.works["top"])

    def differentiate(self, dy: Array) -> AnyArray:
        known = self._x_shape, self._shape, self.work
        if self._kind == PoolingParameter.AVE:
            return pooling.average_backward(dy, *known)
        if self._kind == PoolingParameter.MAX:
            return pooling.max_backward(dy, self._where, *known)
        if self.training:
            return pooling.stochastic_backward(dy, self._where, *known)
        # As in Caffe, the weights of the mean are constants.
        shares = eltwise.quotient(dy, self._means, self.works["shares"])
        spread = pooling.average_backward(shares, *known)
        return eltwise.product([spread, self._x], self.works["squares"])


class SPP(Layer):
    """Spatial pyramid pooling (He et al. 2014): 1x1, 2x2, 4x4, ... windows, joined."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "spp_param": frozenset({"pyramid_height", "pool", "engine"})
    }

    def set_up(self) -> tuple[Shape, ...]:
        param, (n, c, h, w) = self.spec.spp_param, image_of(self)
        if param.pool == SPPParameter.STOCHASTIC:
            raise self.bad("pool STOCHASTIC is not supported here; expected MAX or AVE")
        if not 1 <= param.pyramid_height <= 16:
            raise self.bad(f"expected a pyramid_height in [1, 16], got {param.pyramid_height}")
        self._max = param.pool == SPPParameter.MAX
        self._levels = [self._level(2**level, h, w) for level in range(param.pyramid_height)]
        self._works = [Workspace(self.context.pool) for _ in self._levels]
        self._sizes = [c * bins * bins for bins in (2**n for n in range(len(self._levels)))]
        return ((n, sum(self._sizes)),)

    def _level(self, bins: int, h: int, w: int) -> window.Pooling:
        """The pooling that makes bins x bins windows."""
        kernel = ceil(h / bins), ceil(w / bins)
        pad = (kernel[0] * bins - h + 1) // 2, (kernel[1] * bins - w + 1) // 2
        shape = window.Pooling(kernel, kernel, pad)
        if shape.output(h, w) != (bins, bins) or pad[0] >= kernel[0] or pad[1] >= kernel[1]:
            raise self.bad(
                f"{bins} x {bins} windows do not fit a bottom of shape {self.describe_bottom(0)}"
            )
        return shape

    def forward(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        x, parts = bottoms[0], []
        self._x_shape = x.shape
        self._where = []
        for shape, work in zip(self._levels, self._works, strict=True):
            if self._max:
                y, where = pooling.max_forward(x, shape, work)
                self._where.append(where)
            else:
                y = pooling.average_forward(x, shape, work)
            parts.append(flat(y, 1, work, "flat"))
        return (channels.concatenate(parts, 1, self.work),)

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, needs_grad: NeedsGrad
    ) -> Gradients:
        dy = gradients[0]
        assert dy is not None
        if not needs_grad[0]:
            return [None]
        dx = self.work.zeros("dx", self._x_shape, dy)
        n, h, w, c = self._x_shape
        parts = channels.split(dy, self._sizes, 1, self.work)
        for level, (shape, work, part) in enumerate(
            zip(self._levels, self._works, parts, strict=True)
        ):
            stored = as_stored(part.reshape(n, c, *shape.output(h, w)), work, "stored")
            more = (
                pooling.max_backward(stored, self._where[level], self._x_shape, shape, work)
                if self._max
                else pooling.average_backward(stored, self._x_shape, shape, work)
            )
            eltwise.accumulate(more, dx)
        return [dx]


ROWS: Mapping[str, type[Layer]] = {"Pooling": Pooling, "SPP": SPP}
