"""A shard's metrics: counters, histograms, and a record of every update.

The histograms are of turns: the messages that the shard's process handles together. The process
measures a turn, because it has the clock, and reports it here; there are three:

- `apply_s`: the seconds that a push took, with the WAL record and the answer: a turn's time divided
  by its pushes. A turn without a push does not count.
- `queues`: the messages that had come for a turn.
- `parked`: the requests that wait at the gate after a turn.

Nothing here decides anything. Records wait until an operator collects them; a shard keeps at most
the newest `MAX_RECORDS`. They are kept in the bytes that will be sent, because a row of Python
objects would take three times the memory.
"""

import struct
from bisect import bisect_left
from collections import deque

import msgspec
import numpy as np
from numpy.typing import NDArray

from shards.messages import Count, Push
from shards.shard_status import Histogram
from shards.update_records import RECORD

MAX_RECORDS = 1 << 17
MAX_READS = 64
APPLY_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0),
)
QUEUES = (1, 2, 4, 8, 16, 32, 64)
PARKED = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)

_FORMATS = {"f": "d", "i": "q", "S": "128s"}
_ROW = struct.Struct("<" + "".join(_FORMATS[RECORD[name].kind] for name in RECORD.names or ()))
assert _ROW.size == RECORD.itemsize, "a record has no gaps"


class Counts(msgspec.Struct, frozen=True):
    """The counters of a shard's metrics, from which a later incarnation of the shard continues."""

    pushes: Count
    pulls: Count
    duplicates: Count
    dropped: Count
    refused: Count
    bytes_in: Count
    bytes_out: Count
    max_clock_gap: Count


class Metrics:
    """A shard's counters over all its incarnations, and the records not yet collected.

    `bytes_in` and `bytes_out` are payload bytes, without headers. `trouble` is what fails in the
    background of the shard's process at present, in words, and `host` the name of its host: its
    driver sets both. `queue` and `busy_s` are as in ShardStatus.
    """

    def __init__(self) -> None:
        self.pushes = self.pulls = self.duplicates = self.dropped = self.refused = 0
        self.bytes_in = self.bytes_out = 0
        self.max_clock_gap = 0
        self.trouble = self.host = ""
        self.queue, self.busy_s = 0, 0.0
        self._apply_s, self._queues = [0] * (len(APPLY_S) + 1), [0] * (len(QUEUES) + 1)
        self._parked = [0] * (len(PARKED) + 1)
        self._totals = [0.0, 0, 0]
        self._records: deque[bytes] = deque(maxlen=MAX_RECORDS)
        self._first = 0
        self._reads: dict[str, dict[int, float]] = {}
        self._repeated: dict[str, int] = {}  # by worker, since its last record

    def counts(self) -> Counts:
        """The present counters."""
        return Counts(*(getattr(self, name) for name in Counts.__struct_fields__))

    def turn(self, queue: int, pushes: int, parked: int, seconds: float) -> None:
        """Count a turn of `queue` messages that took `seconds` and recorded `pushes`.

        `parked` requests wait at the gate after it. It is called at every turn: its cost is one
        call.
        """
        self.queue, self.busy_s = queue, self.busy_s + seconds
        totals = self._totals
        if pushes:
            self._apply_s[bisect_left(APPLY_S, seconds / pushes)] += pushes
            totals[0] += seconds
        self._queues[bisect_left(QUEUES, queue)] += 1
        self._parked[bisect_left(PARKED, parked)] += 1
        totals[1] += queue
        totals[2] += parked

    def histograms(self) -> tuple[Histogram, Histogram, Histogram]:
        """The histograms `apply_s`, `queues` and `parked` so far."""
        apply_s, queues, parked = self._totals
        return (
            Histogram(APPLY_S, tuple(self._apply_s), apply_s),
            Histogram(QUEUES, tuple(self._queues), queues),
            Histogram(PARKED, tuple(self._parked), parked),
        )

    def resume(self, counts: Counts) -> None:
        """Continue from these counters; a record's number is that of its push, in every
        incarnation.
        """
        for name in Counts.__struct_fields__:
            setattr(self, name, getattr(counts, name))
        self._records.clear()
        self._first = counts.pushes

    def roll_back(self, boot: int) -> None:
        """After a rollback, number records from `boot`, so that no collector sees a number twice.

        A collector may hold records of updates that were lost. `boot` is a time in microseconds, a
        number that no count of pushes reaches.
        """
        self._first = boot

    def read(self, worker: str, version: int, now: float) -> None:
        """Note when `worker` read `version`; the `wall_age_s` of its push follows from that."""
        reads = self._reads.setdefault(worker, {})
        reads[version] = now
        if len(reads) > MAX_READS:  # the worker pulls and never pushes
            del reads[next(iter(reads))]

    def forget(self, worker: str) -> None:
        """Drop the reads of a worker that left: no push of it will refer to them."""
        self._reads.pop(worker, None)
        self._repeated.pop(worker, None)

    def count_duplicate(self, worker: str) -> None:
        """Count a push of `worker` that had been applied before."""
        self.duplicates += 1
        self._repeated[worker] = self._repeated.get(worker, 0) + 1

    def record_push(
        self,
        push: Push,
        *,
        version: int,
        staleness: int,
        clock_gap: int,
        rate: float,
        scale: float,
        dropped: bool,
        norm: float,
        payload_bytes: int,
        pass_pushes: int,
        now: float,
    ) -> None:
        """Write the record of a push that is part of `version`, or was dropped.

        `norm` is that of all its tables, `rate` that of the first one, or 0 if it has none.
        `pass_pushes` is the number of pushes that one pass over the weights applied.
        """
        self.pushes += 1
        self.dropped += dropped
        self.bytes_in += payload_bytes
        self.max_clock_gap = max(self.max_clock_gap, clock_gap)
        reads = self._reads.get(push.worker)
        read_at = now
        if reads is not None:
            read_at = reads.get(push.read_version, now)
            # A worker pushes in the order of its reads, so no later push refers to an earlier one.
            for earlier in sorted(reads):
                if earlier >= push.read_version:
                    break
                del reads[earlier]
        # `append` is about to drop the oldest record, which moves the number of the first one.
        if len(self._records) == MAX_RECORDS:
            self._first += 1
        self._records.append(
            _ROW.pack(
                now,
                push.worker.encode(),
                push.incarnation,
                push.seq,
                push.clock,
                push.steps,
                push.samples,
                push.read_version,
                version,
                staleness,
                now - read_at,
                clock_gap,
                push.wait_s,
                push.compute_s,
                push.data_s,
                push.network_s,
                payload_bytes,
                push.rtt_s,
                rate,
                scale,
                dropped,
                self._repeated.pop(push.worker, 0) if self._repeated else 0,
                pass_pushes,
                norm,
                push.loss,
            )
        )

    def since(self, after: int) -> tuple[int, NDArray[np.void]]:
        """Drop the records before number `after`; return the first one's number and those left.

        The array has dtype RECORD.
        """
        # Dropped only when the next request names them, so a lost answer can be asked for again.
        while self._records and self._first < after:
            self._records.popleft()
            self._first += 1
        return self._first, np.frombuffer(b"".join(self._records), RECORD)
