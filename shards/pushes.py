"""Checks a push and decodes its gradient.

Everything about a push is checked before anything changes: that it covers the shard's keys, that it
was computed from an existing version, that its payload is valid, and that its gradient is finite.
Finiteness follows from the norm, which costs a pass over the gradient. Code that applies several
pushes in one pass computes their norms on the way, so the norm is a separate step (`measured`).

The ledger (ledger.py) decides whether a push is its worker's next.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cupy_kernels.backends import as_host
from cupy_kernels.updates import squared_norm
from shards import payloads, wire_format
from shards.errors import BadInput, BadMessage
from shards.gradient_guard import Guard
from shards.messages import Push
from shards.parameters import ParameterStore
from shards.spec import ShardSpec
from shards.versions import Buffers
from shards.wire_format import Buffer


class Arrived(msgspec.Struct, frozen=True):
    """A valid push to be applied; `norm` is 0 until `measured` has found it finite."""

    sender: bytes
    message: Push
    frames: tuple[Buffer, ...]
    gradient: NDArray[np.float32]
    payload_bytes: int
    time: float
    norm: float = 0.0


class Pushes:
    """The checks of one shard's pushes against its parameters `held`."""

    def __init__(self, spec: ShardSpec, held: ParameterStore) -> None:
        self._shard = spec.shard
        self._ranges = spec.map.ranges[spec.shard]
        self._keys = wire_format.flatten(self._ranges)
        self._held = held
        self._decoded = Buffers(held.size)

    def examine(
        self, sender: bytes, message: Push, frames: Sequence[Buffer], now: float
    ) -> Arrived:
        """Check everything about a push but its norm, and decode its gradient into one array.

        Raises Retry if there are no weights yet, BadMessage, and BadInput.
        """
        self._held.weights()
        if message.keys != self._keys:
            raise BadMessage(
                f"push covers keys {wire_format.show(message.keys)};"
                f" shard {self._shard} owns {wire_format.show(self._keys)}"
            )
        if message.read_version > self._held.version:
            raise BadMessage(
                f"push {message.seq} of worker {message.worker} was computed from version"
                f" {message.read_version}; shard {self._shard} is at {self._held.version}"
            )
        what = f"push {message.seq}"
        parts = payloads.checked(what, message.kind, message.zstd, self._ranges, frames)
        gradient = payloads.values(message.kind, parts, self._ranges, self._decoded.take)
        payload_bytes = sum([memoryview(frame).nbytes for frame in frames])
        placed = self._held.placed(gradient)
        return Arrived(sender, message, tuple(frames), placed, payload_bytes, now)


def measured(arrived: Arrived, guard: Guard) -> Arrived:
    """The push with its norm; raises BadInput if `guard` refuses the norm."""
    message = arrived.message
    squares = squared_norm(arrived.gradient)
    if not squares <= guard.most_squares:
        finite = bool(np.isfinite(as_host(arrived.gradient)).all())
        fault = guard.describe(squares, finite=finite)
        raise BadInput(
            f"push {message.seq} of worker {message.worker} {fault}"
            f" (loss {message.loss:g}); is the rate too high?"
        )
    return msgspec.structs.replace(arrived, norm=squares**0.5)
