"""The values of a session: what it asks its driver to send, and what it tells of.

session.py changes them; a driver only carries `Send`s out and reads `Event`s.
"""

from typing import Any

import msgspec
from numpy.typing import NDArray

from shards.codec import Buffer
from shards.errors import GiveUp
from shards.messages import FromWorker, Kind, Push

Frames = tuple[NDArray[Any], ...]


class Send(msgspec.Struct, frozen=True):
    """A message for `shard`; `frames` go out after its header, without a copy."""

    shard: int
    message: FromWorker
    frames: Frames = ()


class Ready(msgspec.Struct, frozen=True):
    """The worker is registered with every shard: go on after push `seq` and step `step`.

    `clock` is what it counts with at the gate; it rises by one a step from here.
    """

    seq: int
    step: int
    clock: int
    lease_s: float


class Pulled(msgspec.Struct, frozen=True):
    """Pull `request` is answered: for each shard its version and its frames.

    The frames are payloads of `kind` (payloads.py), checked and unpacked, one a key range.
    """

    request: int
    versions: tuple[int, ...]
    frames: tuple[tuple[Buffer, ...], ...]
    waited_s: float
    kind: Kind = Kind.F4


class Pushed(msgspec.Struct, frozen=True):
    """Push `seq` is applied on every shard; `staleness` is the largest any of them saw."""

    request: int
    seq: int
    staleness: int
    duplicates: int
    rtt_s: float


class Departed(msgspec.Struct, frozen=True):
    """Every shard knows that this worker has left."""


class Relocated(msgspec.Struct, frozen=True):
    """The job has moved to the shards that `cluster` describes (Cluster.decode).

    This session is over; another one goes on there, after `follow`.
    """

    cluster: bytes


Noted = dict[int, dict[int, tuple[Push, Frames]]]
"""Pushes by number; of each the message and frames to the shards that may lack it."""


class RolledBack(msgspec.Struct, frozen=True):
    """A shard died and goes on, as life `boot`, from `version`, which it had saved.

    `lost` pushes of this worker that it had acknowledged are in it no more, and stay so.
    """

    shard: int
    boot: int
    version: int
    lost: int


class Usurped(msgspec.Struct, frozen=True):
    """A shard had a push already that left here once: another client speaks for this worker.

    Unless the network itself delivers twice, which TCP does not. `text` says it to people.
    """

    text: str


class Exported(msgspec.Struct, frozen=True):
    """All shards have given away a state: with this worker's pushes up to `base`, and not `noted`.

    One that only some of the shards have is among those, for a worker goes on after the smallest.
    """

    base: int
    noted: Noted


Event = Ready | Pulled | Pushed | Departed | Relocated | Exported | RolledBack | Usurped


class Unreachable(GiveUp):
    """A shard has been silent for longer than the session's patience."""

    def __init__(self, text: str, shard: int = 0) -> None:
        super().__init__(text)
        self.shard = shard


class NotReady(GiveUp):
    """A shard answers, but has put the worker off for longer than the session's patience.

    It has no weights yet, or no copy of it serves; the text says which, and what to do.
    """
