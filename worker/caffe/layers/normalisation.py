"""Layers that normalise: LRN, BatchNorm and MVN."""

from collections.abc import Mapping
from typing import ClassVar

from cupy_kernels import backends
from cupy_kernels.ops import batch_norm, channels, eltwise, lrn, mvn
from cupy_kernels.ops.batch_norm.running_statistics import RunningStatistics
from cupy_kernels.ops.lrn.window import Lrn
from cupy_kernels.types import AnyArray, Array
from worker.caffe.caffe_pb2 import LRNParameter
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
    by_channel,
    caffe_shape,
    flat,
    from_channel,
)
from worker.caffe.layers.window_fields import image_of


class LRN(Unary):
    """Local response normalisation, across channels or within each."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "lrn_param": frozenset({"local_size", "alpha", "beta", "norm_region", "k", "engine"})
    }

    def set_up(self) -> tuple[Shape, ...]:
        param = self.spec.lrn_param
        image_of(self)
        if param.local_size % 2 == 0:
            raise self.bad(f"expected an odd local_size, got {param.local_size}")
        self._within = param.norm_region == LRNParameter.WITHIN_CHANNEL
        # As in Caffe, k is 1 within a channel, whatever the file says.
        k = 1.0 if self._within else param.k
        self._rule = Lrn(param.local_size, param.alpha, param.beta, k)
        return super().set_up()

    def apply(self, x: Array, step_key: StepKey) -> Array:
        self._x = x
        if not self._within:
            return lrn.across(x, self._rule, self.work)
        y, self._scale = lrn.within(x, self._rule, self.work)
        return y

    def differentiate(self, dy: Array) -> Array:
        if not self._within:
            return lrn.across_backward(dy, self._x, self._rule, self.work)
        return lrn.within_backward(dy, self._x, self._scale, self._rule, self.work)


class BatchNorm(Layer):
    """Zero mean and unit variance by channel; scale and shift belong to a Scale layer behind it.

    Its three buffers are sums of means and of variances, and of their weights. A training step uses
    the batch's own statistics and adds them to the buffers; a test uses the buffers. The update of
    a buffer travels with the gradients, as the difference between its old and new value.
    """

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "batch_norm_param": frozenset({"use_global_stats", "moving_average_fraction", "eps"})
    }

    def set_up(self) -> tuple[Shape, ...]:
        param, (bottom,) = self.spec.batch_norm_param, self.bottoms
        self._global = (
            param.use_global_stats if param.HasField("use_global_stats") else not self.training
        )
        if len(bottom) < 2:
            raise self.bad(f"expected a bottom of at least two axes, got {self.describe_bottom(0)}")
        for shape in ((bottom[1],), (bottom[1],), (1,)):
            self.add_buffer(shape)
        self._changes: dict[int, Array] = {}
        self._deferred = False
        return (bottom,)

    def defer(self) -> bool:
        """Leave everything but the statistics to the Scale behind, if they are the batch's own.

        From now on the top is the bottom, and its gradient is the bottom's. Returns whether so.
        """
        self._deferred = not self._global
        return self._deferred

    def forward(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        param = self.spec.batch_norm_param
        self._shape = caffe_shape(bottoms[0])
        x = by_channel(bottoms[0], 1, 1, self.work, "x")
        fraction = param.moving_average_fraction
        if self._global:
            statistics = RunningStatistics(weights[0], weights[1], weights[2], fraction)
            self.statistics = batch_norm.running_statistics(statistics, param.eps, self.work)
        else:
            copies = [self._copy(weight, f"buffer{i}") for i, weight in enumerate(weights)]
            statistics = RunningStatistics(copies[0], copies[1], copies[2], fraction)
            self.statistics = batch_norm.statistics(x, param.eps, statistics, self.work)
            self._note(weights, copies)
        if self._deferred:
            return bottoms
        self._x = x
        y = batch_norm.forward(x, *self.statistics, None, None, self.work)
        return (from_channel(y, self._shape, 1, 1, self.work, "top"),)

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, needs_grad: NeedsGrad
    ) -> Gradients:
        assert gradients[0] is not None
        if not needs_grad[0] or self._deferred:
            return gradients if needs_grad[0] else [None]
        dy = by_channel(gradients[0], 1, 1, self.work, "dy")
        if self._global:
            dx = channels.scale_backward(dy, self._x, self.statistics[1], None, None, self.work)
        else:
            dx = batch_norm.backward(dy, self._x, *self.statistics, None, None, None, self.work)
        return [from_channel(dx, self._shape, 1, 1, self.work, "bottom")]

    def buffer_changes(self) -> Mapping[int, AnyArray]:
        return self._changes

    def _copy(self, array: Array, role: str) -> Array:
        copy = self.work.take(role, array.shape, array)
        backends.copy(array, copy)
        return copy

    def _note(self, old: Arrays, new: Arrays) -> None:
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            change = self._copy(before, f"change{index}")
            eltwise.accumulate(after, change, -1.0)
            self._changes[index] = change


class MVN(Unary):
    """Each image's channel (or image) minus its mean, and over its standard deviation plus eps."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "mvn_param": frozenset({"normalize_variance", "across_channels", "eps"})
    }

    def set_up(self) -> tuple[Shape, ...]:
        image_of(self)
        param = self.spec.mvn_param
        self._axis = 1 if param.across_channels else 2
        self._epsilon = param.eps if param.normalize_variance else None
        return super().set_up()

    def apply(self, x: Array, step_key: StepKey) -> AnyArray:
        self._shape = caffe_shape(x)
        rows = flat(x, self._axis, self.work, "x in order")
        y, self._saved = mvn.forward(rows, self._epsilon, self.work)
        return as_stored(y.reshape(self._shape), self.work, "top")

    def differentiate(self, dy: Array) -> AnyArray:
        rows = flat(dy, self._axis, self.work, "dy in order")
        dx = mvn.backward(rows, self._saved, self._epsilon, self.work)
        return as_stored(dx.reshape(self._shape), self.work, "bottom")


ROWS: Mapping[str, type[Layer]] = {"LRN": LRN, "BatchNorm": BatchNorm, "MVN": MVN}
