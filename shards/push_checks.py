"""Checks a push and decodes its gradients.

Everything about a push is checked before anything changes: that each part covers the shard's keys
of its table, that the push was computed from an existing version, that its payloads are valid, and
that its gradients are finite. Finiteness follows from the norm, which costs a pass over the
gradient. Code that applies a gradient computes its norm on the way (parameters.py).

The ledger (ledger.py) decides whether a push is its worker's next.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from shards.errors import BadMessage
from shards.messages import Push
from shards.parameters import ParameterStore
from shards.table_part import TablePart
from shards.wire_format import Buffer


class Arrived(msgspec.Struct, frozen=True):
    """A valid push to be applied: the gradient of each of its tables.

    `norm` is 0 until they have been found finite.
    """

    sender: bytes
    message: Push
    frames: tuple[Buffer, ...]
    gradients: dict[str, Any]
    payload_bytes: int
    norm: float = 0.0


def examine(
    sender: bytes, message: Push, frames: Sequence[Buffer], parameters: ParameterStore, shard: int
) -> Arrived:
    """Check everything about a push but its norm, and decode its gradients.

    Raises Retry if there are no weights yet, and BadMessage.
    """
    parameters.weights()
    # Such a version never existed here, and its push would count as fresher than the weights.
    if message.read_version > parameters.version:
        raise BadMessage(
            f"push {message.seq} of worker {message.worker} was computed from version"
            f" {message.read_version}; shard {shard} is at {parameters.version}"
        )
    table_parts: dict[str, TablePart] = {}
    expected = 0
    for part in message.parts:
        table_part = parameters.parts.get(part.table)
        if table_part is None:
            raise BadMessage(
                f"push {message.seq}: expected parts of the tables {', '.join(parameters.parts)}"
                f" of shard {shard}, got one of {part.table}"
            )
        if part.table in table_parts:  # a second part would silently replace the first
            raise BadMessage(
                f"push {message.seq}: expected one part of table {part.table}, got a second"
            )
        table_parts[part.table] = table_part
        expected += table_part.push_frames
    if len(frames) != expected:
        raise BadMessage(f"push {message.seq}: expected {expected} frames, got {len(frames)}")
    gradients: dict[str, Any] = {}
    end = payload_bytes = 0
    for part in message.parts:
        table_part = table_parts[part.table]
        start, end = end, end + table_part.push_frames
        gradients[part.table] = table_part.check(f"push {message.seq}", part, frames[start:end])
    for frame in frames:  # a loop: a generator would be a call at every push
        payload_bytes += memoryview(frame).nbytes
    # The frames are kept, because gradients in plain floats are views of them.
    return Arrived(sender, message, tuple(frames), gradients, payload_bytes)
