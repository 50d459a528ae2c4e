"""What a worker writes down of its life: one line of JSON for each event, in the order they happen.

A line is written by one write(2), so it outlives a kill -9 of its writer. Times are those of
CLOCK_MONOTONIC, which all processes of a machine share: what one worker's journal dates can be
compared with what another one's does. An event that promises something is dated before the promise
can take effect (`asked`), one that reports something after it has (`at`).

Clocks are those of the wire: what the shards are given, with what a worker was put ahead when the
others had continued without it.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ps.session.row_requests import Gather, GatheredRows
from shards.tables import ShardMap
from tests.chaos.rows import contradicts


class Content(msgspec.Struct, frozen=True, array_like=True):
    """What one shard's part of a read holds: for each worker how many pushes, and their marks.

    `torn` is true when keys of the shard disagree, or its rows and its keys.
    """

    version: int
    counts: tuple[int, ...]
    marks: tuple[int, ...]
    torn: bool = False


class Began(msgspec.Struct, frozen=True, tag=True):
    """A life is about to greet the shards."""

    at: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """All shards have registered this life of the worker, which is numbered from 1.

    It continues after push `seq`, and counts from `clock`.
    """

    at: float
    seq: int
    clock: int
    life: int


class Pushes(msgspec.Struct, frozen=True, tag=True):
    """Push `seq` is about to be sent."""

    at: float
    seq: int


class Acked(msgspec.Struct, frozen=True, tag=True):
    """Every shard has acknowledged all pushes up to `seq`, the last of which reached `clock`.

    The first of those that were acknowledged with it was sent after `asked`.
    """

    asked: float
    at: float
    seq: int
    clock: int


class Reads(msgspec.Struct, frozen=True, tag=True):
    """A pull for the step at `clock` was answered; all own pushes up to `seq` were acknowledged.

    `shards` is what it holds, shard by shard of the map of this epoch.
    """

    asked: float
    at: float
    clock: int
    seq: int
    epoch: int
    shards: tuple[Content, ...]


class Reports(msgspec.Struct, frozen=True, tag=True):
    """Report `seq`, on a table or on none, is about to be sent: for a round of each shard."""

    at: float
    seq: int
    table: str
    rounds: dict[int, int]


class Judged(msgspec.Struct, frozen=True, tag=True):
    """Every shard has acknowledged report `seq`; this number of them have dropped it."""

    at: float
    seq: int
    dropped: int


class Leaves(msgspec.Struct, frozen=True, tag=True):
    """The worker is about to leave."""

    at: float


Event = Began | Ready | Pushes | Acked | Reads | Reports | Judged | Leaves
_LINES = msgspec.json.Decoder(Event)


class Journal:
    """One worker's file, to write to."""

    def __init__(self, folder: Path, worker: str) -> None:
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        self._file = os.open(folder / f"{worker}.journal", flags, 0o600)

    def write(self, event: Event) -> None:
        os.write(self._file, msgspec.json.encode(event) + b"\n")

    def close(self) -> None:
        os.close(self._file)


def read_journal(folder: Path, worker: str) -> list[Event]:
    """Every whole line that a worker has written."""
    path = folder / f"{worker}.journal"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [_LINES.decode(line) for line in lines if line.endswith(b"\n")]


def contents(
    weights: NDArray[np.float32],
    versions: Sequence[int],
    shard_map: ShardMap,
    workers: int,
    rows: tuple[Gather, GatheredRows] | None = None,
) -> tuple[Content, ...]:
    """What weights hold, shard by shard; record.py has the pattern.

    A shard whose `rows` say other than its weights is torn, too.
    """
    return tuple(
        _content(weights, version, shard_map, shard, workers, rows)
        for shard, version in enumerate(versions)
    )


def _content(
    weights: NDArray[np.float32],
    version: int,
    shard_map: ShardMap,
    shard: int,
    workers: int,
    rows: tuple[Gather, GatheredRows] | None,
) -> Content:
    period = 2 * workers
    lows, highs = np.full(period, np.inf), np.full(period, -np.inf)
    keys = shard_map.ranges[shard]
    for start in range(keys.start, min(keys.start + period, keys.stop)):
        column, place = weights[start : keys.stop : period], start % period
        lows[place] = min(lows[place], column.min())
        highs[place] = max(highs[place], column.max())
    counts, marks = tuple(map(int, lows[::2])), tuple(map(int, lows[1::2]))
    torn = bool((lows != highs).any())
    if rows is not None:
        pattern = [*zip(counts, marks, strict=True)]
        torn = torn or contradicts(*rows, shard_map, shard, pattern)
    return Content(version, counts, marks, torn)
