"""A Caffe network on a device: the same table, start and gradients as `CaffeModel`.

The first step compiles the kernels and allocates the workspaces, so the second one is captured, and
from then on the host launches a step as a whole. The inputs of a step, which are the weights, the
batch and the step number, are stored at fixed addresses (worker/training/device_pipeline.py). Each
shape of a batch has its own network, because a captured step keeps using its workspaces, and a step
of another shape might replace them by larger ones.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from cupy_kernels import backends
from cupy_kernels.types import AnyArray
from ps.logs import logger
from shards.tables import DenseTable
from worker.caffe.layer import StepKey
from worker.caffe.net import Description, Network
from worker.training.device import CannotCapture, Device
from worker.training.device_pipeline import DevicePipeline, Packet
from worker.training.model import Batch

_LOG = logger(__name__)
_STEP = "step number"  # in the packet; no column has this name


class DeviceModel:
    """See `worker.model.Ahead`. It serves one thread."""

    def __init__(self, description: Description, device: Device) -> None:
        self.net = Network(description)
        self.device = device
        self._arena = DevicePipeline(device, self.net.table.size, len(self.net.loss_weights))
        self._steps: dict[object, _Step] = {}

    @property
    def table(self) -> DenseTable:
        """The tensors in Caffe's order, as `CaffeModel` has them."""
        return self.net.table

    def initial(self, seed: int) -> NDArray[np.float32]:
        """A new arena of starting weights, in the host's memory."""
        return self.net.initial(seed)

    def allocate(self, size: int) -> NDArray[np.float32]:
        """Zeroed page-locked memory."""
        with self.device.use():
            return self.device.allocate_pinned((size,), np.float32)

    def gradient(
        self,
        weights: NDArray[np.float32],
        batch: Batch,
        out: NDArray[np.float32],
        *,
        step: int,
        seed: int,
    ) -> float:
        """See `worker.model.Model`; arenas from `allocate` are copied faster."""
        self.begin(weights, batch, out, step=step, seed=seed)
        return self.finish()

    def begin(
        self,
        weights: NDArray[np.float32],
        batch: Batch,
        out: NDArray[np.float32],
        *,
        step: int,
        seed: int,
    ) -> None:
        """See `worker.model.Ahead`."""
        prepared = self.net.prepare(self.net.columns(batch), StepKey(step, seed))
        columns = {name: _as_kernels_take(column) for name, column in prepared.items()}
        key = (seed, _layout(columns))
        if key not in self._steps:
            self._steps[key] = _Step(self.net.description, self._arena, columns, seed)
        compute = self._steps[key]
        arrays = columns | {_STEP: np.array([step], np.uint64)}
        self._arena.begin(weights, compute.packet, arrays, compute, out)

    def finish(self) -> float:
        """See `worker.model.Ahead`."""
        return float(np.dot(self.net.loss_weights, self._arena.finish()))


class _Step:
    """Forward and backward over one shape of batch: at first eagerly, then captured."""

    def __init__(
        self,
        description: Description,
        arena: DevicePipeline,
        columns: Mapping[str, AnyArray],
        seed: int,
    ) -> None:
        self._net = Network(description)
        self._arena = arena
        self._seed = seed
        layout = {name: (array.shape, array.dtype) for name, array in columns.items()}
        layout[_STEP] = (1,), np.dtype(np.uint64)
        with arena.device.use():
            self.packet = Packet(arena.device, layout)
        self._columns = {name: self.packet.fixed[name] for name in columns}
        self._next = self._first

    def __call__(self) -> None:
        """Queue the step on the stream in use."""
        self._next()

    def _first(self) -> None:
        self._compute()
        self._next = self._second

    def _second(self) -> None:
        bound = [node.layer.where for node in self._net.nodes if not node.layer.captures]
        try:
            if bound:
                raise CannotCapture(f"{bound[0]} has work on the host")
            self._next = self._arena.device.capture(self._compute)
        except CannotCapture as error:
            rows = next(iter(self._columns.values())).shape[0]
            _LOG.warning(
                "%s: steps on %d rows are not captured, and run kernel by kernel: %s",
                self._arena.device,
                rows,
                error,
            )
            self._next = self._compute
        self._next()

    def _compute(self) -> None:
        arena, net = self._arena, self._net
        step_key = StepKey(step=self.packet.fixed[_STEP], seed=self._seed)
        net.forward(arena.weights, self._columns, step_key)
        for index, value in enumerate(net.losses()):
            backends.copy(value.reshape(1), arena.losses[index : index + 1])
        net.backward(arena.weights, arena.gradient)


def _as_kernels_take(column: AnyArray) -> AnyArray:
    """Bytes as they are, other whole numbers as int64, all else as float32."""
    if column.dtype == np.uint8:
        return column
    return column.astype(np.int64 if column.dtype.kind in "bui" else np.float32, copy=False)


def _layout(columns: Mapping[str, AnyArray]) -> tuple[object, ...]:
    return tuple((name, array.shape, array.dtype.str) for name, array in columns.items())
