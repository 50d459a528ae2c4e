"""The protocol of a problem to train: weights, batches, gradients and a measurement.

Batches are drawn with replacement from the whole training set, by a stream that seed and worker
decide; so the data of a worker's n-th step does not depend on the order of events.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from shards.tables import DenseTable
from worker.strategies.base import Floats

Batch = NDArray[Any]
Rows = NDArray[np.int64]

BLOCK = 256
"""How many batches are drawn at a time."""


class Measurement(NamedTuple):
    """The loss and the error of weights on held-out data; the error is a share in percent."""

    loss: float
    error: float


class Workload(Protocol):
    """A problem to train."""

    @property
    def table(self) -> DenseTable:
        """The table of its weights."""

    @property
    def worst_error(self) -> float:
        """The error in percent of a guess, which a diverged run counts with."""

    def start(self, seed: int) -> Floats:
        """Initial weights, an arena of the table."""

    def batches(self, seed: int, worker: int) -> Iterator[Batch]:
        """The batches of a worker's gradients, without end."""

    def gradient(self, weights: Floats, batch: Batch, out: Floats) -> float:
        """Write the gradient at `weights` to `out`, zeros in the padding included; returns the
        loss."""

    def measure(self, weights: Floats) -> Measurement:
        """Test the weights."""


class Places:
    """Where the tensors of a table are in its arena, worked out once."""

    def __init__(self, table: DenseTable) -> None:
        self._slices = [
            (tensor.name, slice(start, start + tensor.size), tensor.shape)
            for tensor, start in zip(table.tensors, table.offsets, strict=True)
        ]

    def views(self, arena: Floats) -> dict[str, Floats]:
        """A view of each tensor by name."""
        return {name: arena[part].reshape(shape) for name, part, shape in self._slices}


@runtime_checkable
class BatchedWorkload(Workload, Protocol):
    """A problem that computes the gradients of several models in one call."""

    def gradients(self, weights: Floats, batches: Batch, out: Floats) -> None:
        """Write the gradient of each model at its weights, for its batch, to `out`.

        `weights` and `out` are float32 (models, arena), `batches` has a row for each model. The
        arithmetic is that of `gradient`.
        """


def cross_entropy(
    scores: Floats, rows: Rows, right: NDArray[Any], batch: int | None = None
) -> tuple[float, Floats]:
    """The mean cross-entropy of a batch, and its slope in the scores, float32 of their shape.

    `scores` has a row for each example, and is overwritten; `rows` numbers them, and `right` has
    the right class of each. With `batch` they are several batches of this size, and the slope is
    that of each one's own mean.
    """
    scores -= scores.max(1, keepdims=True)
    slope = np.exp(scores)
    slope /= slope.sum(1, keepdims=True)
    hit = slope[rows, right]
    slope[rows, right] -= 1
    slope *= np.float32(1 / (batch or len(rows)))
    return -float(np.log(np.maximum(hit, 1e-30)).mean()), slope
