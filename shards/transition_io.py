"""The inputs and outputs of a shard's transitions."""

from collections.abc import Sequence
from typing import Any

import msgspec
from numpy.typing import NDArray

from shards.errors import DownpourError, Moved
from shards.messages import FromShard, Request
from shards.refusals import refusal
from shards.shard_part import ShardPart
from shards.wire_format import Buffer


class Arrival(msgspec.Struct, frozen=True):
    """A request that has arrived, its frames, and its sender's address."""

    sender: bytes
    message: Request
    frames: Sequence[Buffer] = ()


class Outgoing(msgspec.Struct, frozen=True):
    """An answer: `to` is the address its request came from; `frames` follow the header."""

    to: bytes
    message: FromShard
    frames: tuple[NDArray[Any] | bytes, ...] = ()


def refuse_request(part: ShardPart, sender: bytes, request: int, error: DownpourError) -> Outgoing:
    """Make the Refusal for `error`, and count it in the metrics."""
    part.metrics.refused += 1
    # The description of the new shards may exceed a header, so it follows as a frame.
    where = (error.cluster,) if isinstance(error, Moved) else ()
    return Outgoing(sender, refusal(request, part.spec.shard, part.boot, error), where)
