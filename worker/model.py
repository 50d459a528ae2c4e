"""What the worker loop asks of a model, and all that it knows about one.

The loop holds a flat arena of weights, which came from the shards and is never written, and an
arena for the gradient. A model fills the second from the first and a batch. Caffe networks live in
`worker.caffe`; an adapter for another library is one file with one class of this shape.

A model is built again inside each worker's process, so what describes it must be plain values that
travel (a network's text, a shape), never the model itself.

A model that can compute on a GPU says so by `on`, which gives its like there, and that one can be
asked for a step before the last is done.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from shards.tables import DenseTable

if TYPE_CHECKING:
    from worker.device import Device

Batch = Mapping[str, NDArray[Any]]
"""Columns by name, each an array whose leading axis is the batch: "data" (n, c, h, w), "label"."""


class Model(Protocol):
    """A loss of weights and a batch, and its gradient."""

    @property
    def table(self) -> DenseTable:
        """The parameters: their names, shapes and places in the arena."""
        ...

    def initial(self, seed: int) -> NDArray[np.float32]:
        """A new arena of starting weights; one seed always gives the same."""
        ...

    def gradient(
        self,
        weights: NDArray[np.float32],
        batch: Batch,
        out: NDArray[np.float32],
        *,
        step: int,
        seed: int,
    ) -> float:
        """Return the batch's loss at `weights` and write its gradient into every float of `out`.

        Both arenas are float32 of the table's size; padding becomes zero. `step` and `seed` alone
        decide what is random (dropout), so that a repeated step repeats.
        """
        ...


@runtime_checkable
class Ahead(Model, Protocol):
    """A model that computes beside its caller, on a device: a step begins while the last one runs.

    `gradient` is `begin` and `finish`.
    """

    @property
    def device(self) -> "Device":
        """What it computes on."""
        ...

    def allocate(self, size: int) -> NDArray[np.float32]:
        """Zeroed memory for the arenas it is given: such as its device copies from by itself."""
        ...

    def begin(
        self,
        weights: NDArray[np.float32],
        batch: Batch,
        out: NDArray[np.float32],
        *,
        step: int,
        seed: int,
    ) -> None:
        """Begin what `gradient` does. Two steps may be under way, no more.

        Neither arena may change before the step is finished; the caller may drop them, though.
        """
        ...

    def finish(self) -> float:
        """Wait for the oldest step begun; its gradient is in its arena then. Returns the loss."""
        ...


@runtime_checkable
class Movable(Model, Protocol):
    """A model that can compute on a device."""

    def on(self, device: "Device") -> Ahead:
        """Its like on `device`: the same table, start and gradients, up to rounding."""
        ...
