"""What a worker sends, what it keeps of it on disk, and what the weights then prove.

The rule is plain SGD at rate 1 and every gradient holds small integers, so a weight is a sum that
float32 holds exactly. Each worker has two keys of its own in every stretch of the table:

- one counts: every push takes 1 from it;
- one marks: push number seq of a life takes `mark(seq, life)` from it, 0 to 7. A push that is lost
  and another that is applied twice leave the count as it was, and the marks not. Nor do half a push
  of one life and half of another life's push under the same number.

The pattern repeats over the whole table, so an update that was applied in part shows as keys that
disagree.

A worker writes down the number of each push before it sends it, and the number of each that was
acknowledged. Both files outlive a kill -9: what was written is the kernel's. With them, and the
weights, for every shard:

    acknowledged <= applied       nothing acknowledged is lost
    applied <= sent               nothing is applied that nobody sent
    marks == mark(1) + ... + mark(applied)        each push once, none in place of another

The marks are those of the lives that made these pushes: of each number, the last life that began
before it.
"""

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ps import DenseTable, ShardState, TensorSpec
from shards.shard_state import of_table
from shards.tables import ShardMap
from tests.chaos.journal import Event, Ready, read_journal
from tests.chaos.rows import PLAIN, row_faults

_ACK = struct.Struct("<dq")
_SENT = struct.Struct("<q")
_ACKS = np.dtype([("at", "<f8"), ("seq", "<i8")])  # as _ACK
_RECENT = 1 << 16
_PERIOD = 512  # of the marks of a life
_KINDS = 8  # of marks, and of lives


class LifeStart(NamedTuple):
    """A life of a worker makes the pushes `after` this number; lives are numbered from 1."""

    after: int
    life: int


def mark(seq: int, life: int) -> int:
    """What push `seq` of a life is known by, 0 to 7.

    Neighbours differ, and so do those 8 or 64 apart, and those of two lives less than 8 apart.
    """
    return (seq + seq // 8 + seq // 64 + 3 * life) % _KINDS


_MARKS = tuple(
    tuple(accumulate(mark(seq, life) for seq in range(1, _PERIOD + 1))) for life in range(_KINDS)
)


def marks_to(last: int, lives: Sequence[LifeStart]) -> int:
    """The sum of the marks of pushes 1 to `last`; the last of `lives` to begin before one made it.

    Lives are in the order of time. One may begin before the end of the life before it, where shards
    have lost pushes.
    """
    total, until = 0, last
    for start in reversed(lives):
        if start.after < until:
            total += _marks_of(start.life, until) - _marks_of(start.life, start.after)
            until = start.after
    assert until == 0, "the first life makes push 1"
    return total


def _marks_of(life: int, last: int) -> int:
    """The marks of pushes 1 to `last`, had this life made them all."""
    marks = _MARKS[life % _KINDS]
    periods, rest = divmod(last, _PERIOD)
    return periods * marks[-1] + (marks[rest - 1] if rest else 0)


TABLE = "chaos"


def table_for(workers: int, floats: int) -> DenseTable:
    """A table of about `floats` floats, in which every worker has its keys on every shard."""
    return DenseTable(TABLE, (TensorSpec(f"of {workers} workers", (floats,)),))


def two_tables(workers: int, floats: int) -> tuple[DenseTable, DenseTable]:
    """The same in two tables, a quarter and the rest, so that a shard of two has parts of both."""
    first, rest = floats // 4, floats - floats // 4
    text = f"of {workers} workers"
    return (
        DenseTable(TABLE, (TensorSpec(text, (first,)),)),
        DenseTable("more", (TensorSpec(text, (rest,)),)),
    )


def gradient(into: NDArray[np.float32], worker: int, workers: int, seq: int, life: int) -> None:
    """Write push `seq` of a life of worker number `worker` into an array of the table's size."""
    into[:] = 0.0
    into[2 * worker :: 2 * workers] = -1.0
    into[2 * worker + 1 :: 2 * workers] = -float(mark(seq, life))


class Verdict(NamedTuple):
    """What one shard's weights say of one worker's pushes.

    `counted` is what the shard's ledger numbers; `marked` the sum of the marks, `expected` what it
    has to be for pushes 1 to `applied`; `torn` whether keys disagree. `rows` is what is wrong with
    its rows of sparse tables, in words.
    """

    worker: str
    shard: int
    acknowledged: int
    applied: int
    sent: int
    counted: int
    marked: int
    expected: int
    torn: bool
    rows: tuple[str, ...] = ()

    @property
    def lost(self) -> int:
        """Acknowledged pushes that the weights lack."""
        return max(0, self.acknowledged - self.applied)

    @property
    def doubled(self) -> int:
        """Pushes in the weights beyond those that the shard's ledger numbers."""
        return max(0, self.applied - self.counted)

    @property
    def whole(self) -> bool:
        """Whether the weights are what the ledger's pushes make, each in every key, each once.

        So are the rows.
        """
        counted = self.applied == self.counted and self.marked == self.expected
        return counted and not self.torn and not self.rows

    @property
    def kept(self) -> bool:
        """Whether the promise was kept: whole, nothing lost, nothing that nobody sent."""
        return self.whole and self.acknowledged <= self.applied <= self.sent


def judge(
    state: ShardState,
    shard: int,
    shard_map: ShardMap,
    names: Sequence[str],
    records: Path,
    lacking: Mapping[tuple[int, int], tuple[int, int]],
) -> list[Verdict]:
    """What the weights of one shard prove, for each worker.

    `lacking` is what deaths took back for good, by shard and worker: pushes, and their marks.
    """
    own = shard_map.ranges[shard]
    keys = np.arange(own.start, own.stop)
    weights = np.concatenate([a for n, a in state.arrays.items() if n.endswith("/weights")])
    found = []
    for number, name in enumerate(names):
        record, lives = Record(records, name), life_starts(read_journal(records, name))
        entry = state.saved.ledger.entries.get(name)
        places = keys % (2 * len(names))
        counts, marks = (np.unique(weights[places == 2 * number + at]) for at in (0, 1))
        pushes, taken = lacking.get((shard, number), (0, 0))
        applied = int(counts[0]) + pushes
        found.append(
            Verdict(
                worker=name,
                shard=shard,
                acknowledged=record.acknowledged,
                applied=applied,
                sent=record.sent,
                counted=entry.seq if entry is not None else 0,
                marked=int(marks[0]) + taken,
                expected=marks_to(applied, lives) if lives else 0,
                torn=len(counts) > 1 or len(marks) > 1,
                rows=tuple(
                    row_faults(state, shard, shard_map, number, int(counts[0]), int(marks[0]))
                    if of_table(state.arrays, PLAIN.name)
                    else ()
                ),
            )
        )
    return found


def life_starts(events: Iterable[Event]) -> list[LifeStart]:
    """Where each life in a journal begins that was registered."""
    return [LifeStart(event.seq, event.life) for event in events if isinstance(event, Ready)]


class Record:
    """One worker's two files: every acknowledgement with its time, and the last push begun."""

    def __init__(self, folder: Path, worker: str) -> None:
        flags = os.O_CREAT | os.O_RDWR
        self._acks = os.open(folder / f"{worker}.acks", flags | os.O_APPEND, 0o600)
        self._sent = os.open(folder / f"{worker}.sent", flags, 0o600)

    def __del__(self) -> None:
        os.close(self._acks)
        os.close(self._sent)

    def sends(self, seq: int) -> None:
        """Push `seq` is about to be sent; a retried number changes nothing."""
        if seq > self.sent:
            os.pwrite(self._sent, _SENT.pack(seq), 0)

    def hears(self, seq: int, now: float) -> None:
        """Every push up to `seq` is acknowledged, at `now` on the machine's monotonic clock."""
        os.write(self._acks, _ACK.pack(now, seq))

    @property
    def sent(self) -> int:
        written = os.pread(self._sent, _SENT.size, 0)
        return int(_SENT.unpack(written)[0]) if written else 0

    @property
    def acknowledged(self) -> int:
        return self.last[1]

    @property
    def last(self) -> tuple[float, int]:
        """When the last acknowledgement came, and up to which push; before any (0, 0)."""
        size = os.fstat(self._acks).st_size // _ACK.size * _ACK.size
        written = os.pread(self._acks, _ACK.size, size - _ACK.size) if size else b""
        at, seq = _ACK.unpack(written) if written else (0.0, 0)
        return float(at), int(seq)

    def has_after(self, at: float, acks: int) -> bool:
        """Whether so many acknowledgements came after a time."""
        return bool((self._times(acks) > at).sum() == acks)

    def around(self, began: float, healed: float, acks: int) -> tuple[float, float]:
        """What a fault between those times did to this worker, in seconds.

        How long after the healing its acknowledgement number `acks` came, and the longest that it
        had none, from the fault's beginning to then. Raises IndexError if it has not come yet.
        """
        at = self._times(_RECENT)
        again = at[at > healed][acks - 1]
        before = at[at <= began][-1:]
        meanwhile = at[(at > began) & (at <= again)]
        silences = np.diff(np.concatenate([before if len(before) else [began], meanwhile]))
        return float(again - healed), float(silences.max())

    def _times(self, most: int) -> NDArray[np.float64]:
        """When the last acknowledgements came, up to so many."""
        size = os.fstat(self._acks).st_size // _ACK.size
        recent = min(size, most)
        raw = os.pread(self._acks, recent * _ACK.size, (size - recent) * _ACK.size)
        return np.frombuffer(raw, _ACKS)["at"]
