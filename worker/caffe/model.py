"""A Caffe network with the interface of the worker loop (table, start, gradient) and inference.

A model is built from a `Description`, which holds plain values, in each process that needs it.
Inputs are columns with the names of the data layer's tops; outputs are in Caffe's order.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.types import AnyArray
from shards.tables import DenseTable
from worker.caffe.device_model import DeviceModel
from worker.caffe.layer import StepKey
from worker.caffe.net import START, Description, Network
from worker.training.device import Device
from worker.training.model import Batch


class CaffeModel:
    """A network with its loss. It keeps buffers between calls, so one model serves one thread."""

    def __init__(self, description: Description) -> None:
        self.net = Network(description)

    @property
    def table(self) -> DenseTable:
        """The tensors in Caffe's order: "conv1/0" its weights, "conv1/1" its bias, and so on."""
        return self.net.table

    def initial(self, seed: int) -> NDArray[np.float32]:
        """A new arena of initial weights, drawn by the prototxt's fillers."""
        return self.net.initial(seed)

    def gradient(
        self,
        weights: NDArray[np.float32],
        batch: Batch,
        out: NDArray[np.float32],
        *,
        step: int,
        seed: int,
    ) -> float:
        """See `worker.Model`. The batch may be of any size, not only the prototxt's."""
        self.net.check(batch)
        step_key = StepKey(step, seed)
        self.net.forward(weights, self.net.prepare(batch, step_key), step_key, release=True)
        self.net.backward(weights, out)
        return self.net.loss()

    def forward(
        self, weights: NDArray[np.float32], batch: Batch, blobs: Sequence[str]
    ) -> dict[str, AnyArray]:
        """Copies of the named blobs, (n, c, h, w) or in the shape that the prototxt gives.

        Only the layers that the blobs depend on run, and the batch needs only their columns.
        """
        self.net.check(batch)
        self.net.forward(weights, self.net.prepare(batch, START), blobs=set(blobs))
        return {name: self.net.blob(name) for name in blobs}

    def outputs(self, weights: NDArray[np.float32], batch: Batch) -> dict[str, float]:
        """The net's scalar outputs for one batch, such as loss and accuracy."""
        blobs = self.forward(weights, batch, self.net.figures)
        return {name: float(value) for name, value in blobs.items()}

    def on(self, device: Device) -> DeviceModel:
        """An equivalent model that computes on `device`."""
        return DeviceModel(self.net.description, device)
