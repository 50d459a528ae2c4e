"""Pooling, and SPP, a pyramid of poolings."""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from cupy_kernels import backends, channels, conv_shapes, eltwise, pooling
from cupy_kernels.cpu.dropout import words
from cupy_kernels.rng_keys import WORD, RngKey
from cupy_kernels.types import AnyArray, Array
from cupy_kernels.workspace import Workspace
from worker.caffe.caffe_pb2 import PoolingParameter, SPPParameter
from worker.caffe.layer import (
    Arrays,
    Gradients,
    Layer,
    Shape,
    StepKey,
    Takes,
    Unary,
    Wanted,
    as_stored,
    flat,
)
from worker.caffe.layers.dropout import number_of
from worker.caffe.layers.windows import Pair, image_of, pair


class Pooling(Unary):
    """MAX, AVE and STOCHASTIC, with Caffe's rounding and border rules.

    STOCHASTIC (Zeiler and Fergus 2013) draws one element of each window with a probability
    proportional to its value while training, and is the mean with those weights in tests. It needs
    a bottom without negative values, and has no kernel.
    """

    SUPPORTED_FIELDS: ClassVar[Takes] = {
        "pooling_param": frozenset({
            "pool", "pad", "pad_h", "pad_w", "kernel_size", "kernel_h", "kernel_w", "stride",
            "stride_h", "stride_w", "engine", "global_pooling", "round_mode",
        })
    }  # fmt: skip
    OVERWRITABLE = True

    def set_up(self) -> tuple[Shape, ...]:
        param, (n, c, h, w) = self.spec.pooling_param, image_of(self)
        self._kind = param.pool
        self.captures = param.pool != PoolingParameter.STOCHASTIC
        self._shape = conv_shapes.Pooling(
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
                raise self.bad(f"{self._shape} does not fit a bottom of shape {self.described(0)}")
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

    def apply(self, x: Array, moment: StepKey) -> AnyArray:
        self._x_shape = x.shape
        if self._kind == PoolingParameter.AVE:
            return pooling.average_forward(x, self._shape, self.work)
        if self._kind == PoolingParameter.MAX:
            y, self._where = pooling.max_forward(x, self._shape, self.work)
            return y
        seen = backends.as_host(x)
        y, self._shares = stochastic(seen, self._shape, self._draw(x, moment))
        return self._there(y, "top", x)

    def differentiate(self, dy: Array) -> AnyArray:
        if self._kind == PoolingParameter.AVE:
            return pooling.average_backward(dy, self._x_shape, self._shape, self.work)
        if self._kind == PoolingParameter.MAX:
            return pooling.max_backward(dy, self._where, self._x_shape, self._shape, self.work)
        seen = backends.as_host(dy)
        dx = stochastic_backward(seen, self._shares, self._x_shape, self._shape)
        return self._there(dx, "bottom", dy)

    def _draw(self, x: Array, moment: StepKey) -> NDArray[np.float64] | None:
        """A number in [0, 1) for each window; None in tests."""
        if not self.training:
            return None
        n, h, w, c = x.shape
        shape = (n, *self._shape.output(h, w), c)
        key = RngKey(moment.seed, moment.number, number_of(self.name))
        return words(int(np.prod(shape)), key).reshape(shape) / WORD

    def _there(self, array: AnyArray, role: str, like: AnyArray) -> AnyArray:
        there = self.work.take(role, array.shape, like)
        backends.copy(array, there)
        return there


def stochastic(
    x: Array, shape: conv_shapes.Pooling, draw: NDArray[np.float64] | None
) -> tuple[Array, Array]:
    """y (n, oh, ow, c) for x (n, h, w, c), and (cells, n, oh, ow, c), each element's share of y.

    A test's gradient takes its shares as constants, as Caffe's does.
    """
    cells = _windows(x, shape)
    total = cells.sum(axis=0)
    if draw is None:
        shares = np.divide(cells, total, out=np.zeros_like(cells), where=total > 0)
    else:
        reached = np.cumsum(cells, axis=0)
        chosen = (reached <= draw * total).sum(axis=0).clip(max=len(cells) - 1)
        shares = (np.arange(len(cells)).reshape(-1, 1, 1, 1, 1) == chosen).astype(np.float32)
    return (shares * cells).sum(axis=0), shares


def stochastic_backward(
    dy: Array, shares: Array, x_shape: tuple[int, ...], shape: conv_shapes.Pooling
) -> Array:
    """dx: each window's gradient, to its elements by their shares."""
    dx = np.zeros(_wide(x_shape, shape), np.float32)
    for cell, target in enumerate(_cells(dx, x_shape, shape)):
        target += shares[cell] * dy
    _, h, w, _ = x_shape
    return dx[:, :h, :w]


def _windows(x: Array, shape: conv_shapes.Pooling) -> Array:
    wide = np.zeros(_wide(x.shape, shape), np.float32)
    wide[:, : x.shape[1], : x.shape[2]] = x
    return np.stack(_cells(wide, x.shape, shape))


def _wide(x_shape: tuple[int, ...], shape: conv_shapes.Pooling) -> tuple[int, ...]:
    n, h, w, c = x_shape
    ends = (
        (count - 1) * stride + kernel
        for count, stride, kernel in zip(
            shape.output(h, w), shape.stride, shape.kernel, strict=True
        )
    )
    tall, broad = (max(end, size) for end, size in zip(ends, (h, w), strict=True))
    return n, tall, broad, c


def _cells(wide: Array, x_shape: tuple[int, ...], shape: conv_shapes.Pooling) -> Sequence[Array]:
    """For each cell of a window, in reading order, the view of it in every window."""
    (oh, ow), (sh, sw) = shape.output(*x_shape[1:3]), shape.stride
    return [
        wide[:, i : i + (oh - 1) * sh + 1 : sh, j : j + (ow - 1) * sw + 1 : sw]
        for i in range(shape.kernel[0])
        for j in range(shape.kernel[1])
    ]


class SPP(Layer):
    """Spatial pyramid pooling (He et al. 2014): 1x1, 2x2, 4x4, ... windows, joined."""

    SUPPORTED_FIELDS: ClassVar[Takes] = {
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
        self._works = [Workspace(self.setting.pool) for _ in self._levels]
        self._sizes = [c * bins * bins for bins in (2**n for n in range(len(self._levels)))]
        return ((n, sum(self._sizes)),)

    def _level(self, bins: int, h: int, w: int) -> conv_shapes.Pooling:
        """The pooling that makes bins x bins windows."""
        kernel = ceil(h / bins), ceil(w / bins)
        pad = (kernel[0] * bins - h + 1) // 2, (kernel[1] * bins - w + 1) // 2
        shape = conv_shapes.Pooling(kernel, kernel, pad)
        if shape.output(h, w) != (bins, bins) or pad[0] >= kernel[0] or pad[1] >= kernel[1]:
            raise self.bad(
                f"{bins} x {bins} windows do not fit a bottom of shape {self.described(0)}"
            )
        return shape

    def forward(self, bottoms: Arrays, weights: Arrays, moment: StepKey) -> Arrays:
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
        self, gradients: Gradients, weights: Arrays, out: Gradients, wanted: Wanted
    ) -> Gradients:
        dy = gradients[0]
        assert dy is not None
        if not wanted[0]:
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
