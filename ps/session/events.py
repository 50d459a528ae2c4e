"""The values that a session exchanges with its driver: messages to send and events to report.

session.py creates them; a driver only sends each `Send` and reads each `Event`.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from numpy.typing import NDArray

from ps.session.row_requests import GatheredRows
from shards.errors import GiveUp, Retry
from shards.messages import FromWorker, Kind
from shards.wire_format import Buffer

Frames = tuple[NDArray[Any], ...]


class Send(msgspec.Struct, frozen=True):
    """A message for `shard`; `frames` go out after its header, without a copy."""

    shard: int
    message: FromWorker
    frames: Frames = ()


class Ready(msgspec.Struct, frozen=True):
    """The worker is registered with every shard and continues after push `seq` and step `step`.

    `clock` is its clock at the staleness gate; it rises by one per step from here. `lease_s` is the
    length of the lease in seconds.
    """

    seq: int
    step: int
    clock: int
    lease_s: float


class Pulled(msgspec.Struct, frozen=True):
    """Pull `request` of `tables` is complete, with one version and the frames of each shard.

    The frames are payloads, checked and unpacked, one for each section of these tables that the
    shard holds; `kinds` has the kind of each table (payloads.py). `rows` are those of sparse tables
    that were asked for.
    """

    request: int
    versions: tuple[int, ...]
    frames: tuple[tuple[Buffer, ...], ...]
    waited_s: float
    tables: tuple[str, ...]
    kinds: Mapping[str, Kind]
    rows: Mapping[str, GatheredRows] = {}


class Pushed(msgspec.Struct, frozen=True):
    """Push `seq` is accepted by every shard; `versions` has the version of each that includes it.

    `staleness` is the largest that any shard measured, `scale` the smallest factor by which any
    shard scaled its rate. `dropped` counts the shards that had applied its round without it, and
    `late_s` is the longest time by which it was late there.
    """

    request: int
    seq: int
    staleness: int
    duplicates: int
    rtt_s: float
    versions: tuple[int, ...]
    scale: float = 1.0
    dropped: int = 0
    late_s: float = 0.0


class Departed(msgspec.Struct, frozen=True):
    """Every shard knows that this worker has left."""


class Relocated(msgspec.Struct, frozen=True):
    """The job has been resharded to the shards that `cluster` describes (Cluster.decode).

    This session is over; another one continues there, after `follow`.
    """

    cluster: bytes


class RolledBack(msgspec.Struct, frozen=True):
    """A shard died and was restored as incarnation `boot`, at `version`, from its last autosave.

    It has lost `lost` pushes of this worker that it had acknowledged; they are not sent again.
    """

    shard: int
    boot: int
    version: int
    lost: int


class Usurped(msgspec.Struct, frozen=True):
    """A shard already had a push that this worker sent once: another client uses the same worker
    name.

    The only other cause is a network that delivers twice, which TCP does not. `text` is the message
    for users.
    """

    text: str


class AnswerLate(msgspec.Struct, frozen=True):
    """An answer is late, and the message is about to be sent again.

    The driver, not the session, creates this event: the driver's owner may know that no answer will
    come.
    """


Event = Ready | Pulled | Pushed | Departed | Relocated | RolledBack | Usurped | AnswerLate


class ClockTimeout(Retry):
    """A pull has waited too long at the staleness bound.

    `slowest` is the clock of the slowest worker, as far as this client has heard.
    """

    def __init__(self, text: str, slowest: int | None) -> None:
        super().__init__(text)
        self.slowest = slowest


class Unreachable(GiveUp):
    """A shard has been silent for longer than the session's patience."""

    retryable = True

    def __init__(self, text: str, shard: int = 0) -> None:
        super().__init__(text)
        self.shard: int = shard


class JobEnded(GiveUp):
    """The job is known to have ended: its shards are gone, and none will answer."""


class NotReady(GiveUp):
    """A shard answers, but has deferred the worker for longer than the session's patience.

    Either it has no weights yet, or no copy of it serves; the text says which, and what to do.
    """

    retryable = True
