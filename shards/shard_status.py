"""A shard's status, which the frame of a `Status` message holds (messages.py)."""

from enum import StrEnum

import msgspec

from shards.messages import LiveSettings


class Standing(StrEnum):
    """A worker's status at a shard; only an active worker counts at the gate."""

    KNOWN = "greeted"  # it has said hello, but not joined; the value is that of saved states
    ACTIVE = "active"
    LEFT = "left"
    EXPIRED = "expired"


class WorkerStatus(msgspec.Struct, frozen=True):
    worker: str
    standing: Standing
    incarnation: int
    takeovers: int
    clock: int
    step: int
    seq: int
    waiting: bool
    loss: float
    host: str = ""
    rtt_s: float = 0.0


class Histogram(msgspec.Struct, frozen=True):
    """The counts of a measured value in some fixed intervals.

    `counts[n]` values were above `bounds[n - 1]` and at most `bounds[n]`; the last of the counts
    has no bound. `total` is the sum of all values.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    total: float = 0.0


class ShardStatus(msgspec.Struct, frozen=True):
    """A shard's counters since it was installed; bytes are payload bytes, without headers.

    `trouble` is what fails in the background at present, such as autosaves; empty if nothing does.
    `waiting` requests are parked at the gate, and `queue` messages came in the latest turn;
    `busy_s` are the seconds that the shard's process has spent on requests. `settings` are those in
    force. The histograms are those of metrics.py, since the process began. `host` is the name of
    the shard's host. `rows` counts the stored rows of each sparse table.
    """

    shard: int
    version: int
    steps: int
    samples: int
    rate: float
    pushes: int
    pulls: int
    duplicates: int
    dropped: int
    refused: int
    bytes_in: int
    bytes_out: int
    max_clock_gap: int
    workers: tuple[WorkerStatus, ...]
    trouble: str = ""
    waiting: int = 0
    queue: int = 0
    busy_s: float = 0.0
    settings: LiveSettings = LiveSettings(None)
    apply_s: Histogram = Histogram()
    queues: Histogram = Histogram()
    parked: Histogram = Histogram()
    host: str = ""
    rows: dict[str, int] = {}
