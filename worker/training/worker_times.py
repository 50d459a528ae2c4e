"""Where the workers' time goes, from their update records: useful steps, waiting, lost work.

A push says how long its worker computed, waited for data and at the gate, and exchanged since the
push before. Two kinds of work are lost and have to be done again. Computing for a push that a shard
dropped changed no weights. And after a death, a worker's next life repeats the steps since its last
push: what passes from that push to the beginning of the next life's first one is lost, too.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from shards.shard_status import ShardStatus
from worker.training.figures import Rows

_RECENT = 256  # pushes of a worker: another shard's record of a dropped one comes soon
_MEASURED = ("compute", "data", "wait", "network")


class WorkerTimes(msgspec.Struct):
    """Where a worker's time went, in seconds, as its pushes say; the rest is its own loop.

    `compute` is that of useful steps. `lost` is the computing for pushes that were dropped, and the
    time from the last push of a life that died to the start of the next one's first step.
    """

    compute: float = 0.0
    data: float = 0.0
    wait: float = 0.0
    network: float = 0.0
    lost: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it together."""
        return self.compute + self.data + self.wait + self.network + self.lost


def goodput(times: Sequence[WorkerTimes]) -> float | None:
    """The share of these workers' time in useful steps; None before any was measured."""
    total = sum(part.seconds for part in times)
    return sum(part.compute for part in times) / total if total > 0 else None


def count_restarts(statuses: Sequence[ShardStatus]) -> dict[str, int]:
    """The takeovers of each worker by a next life, as the shard says that knows of most."""
    restarts: dict[str, int] = {}
    for status in statuses:
        for worker in status.workers:
            restarts[worker.worker] = max(worker.takeovers, restarts.get(worker.worker, 0))
    return restarts


class _Account:
    """One worker's sums, and its last push."""

    def __init__(self) -> None:
        self.sums = dict.fromkeys(_MEASURED, 0.0)
        self.dropped_s = self.repeated_s = 0.0
        self.dropped: deque[tuple[int, int]] = deque(maxlen=_RECENT)
        self.incarnation, self.last_at, self.restarts = -1, 0.0, 0

    @property
    def times(self) -> WorkerTimes:
        # Shards are read one after another: one may say that a push was dropped, which shard 0 has
        # yet to report.
        useful_s = max(0.0, self.sums["compute"] - self.dropped_s)
        rest = {part: seconds for part, seconds in self.sums.items() if part != "compute"}
        return WorkerTimes(compute=useful_s, **rest, lost=self.dropped_s + self.repeated_s)


class TimesTally:
    """The times of all workers, from the records of all shards, in constant memory."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def add(self, records: Sequence[Rows], restarts: Mapping[str, int], elapsed_s: float) -> None:
        """Count the records since the last call, one array a shard; each has all pushes.

        `restarts` are the deaths of each worker so far. No loss exceeds the run's `elapsed_s`.
        """
        for rows in records:
            self._add_dropped(rows[rows["dropped"] != 0])
        for name in np.unique(records[0]["worker"]) if records else ():
            rows = records[0][records[0]["worker"] == name]
            account = self._account(name)
            for part in _MEASURED:
                account.sums[part] += float(rows[f"{part}_s"].sum())
            self._add_repeated(account, rows, restarts.get(_text(name), 0), elapsed_s)

    @property
    def times_s(self) -> dict[str, WorkerTimes]:
        """The times by worker."""
        return {name: account.times for name, account in self._accounts.items()}

    def _account(self, name: bytes) -> _Account:
        return self._accounts.setdefault(_text(name), _Account())

    def _add_dropped(self, rows: Rows) -> None:
        for row in rows:
            account, push = self._account(row["worker"]), (int(row["incarnation"]), int(row["seq"]))
            if push not in account.dropped:  # another shard may have dropped it as well
                account.dropped.append(push)
                account.dropped_s += float(row["compute_s"])

    def _add_repeated(self, account: _Account, rows: Rows, restarts: int, elapsed_s: float) -> None:
        first = rows[0]
        began_s = float(first["time"]) - sum(float(first[f"{part}_s"]) for part in _MEASURED)
        # A worker that left and joined again has lost nothing; a restart counts as a death.
        if 0 <= account.incarnation < first["incarnation"] and restarts > account.restarts:
            account.repeated_s += min(max(0.0, began_s - account.last_at), elapsed_s)
        account.incarnation = int(rows["incarnation"].max())
        account.last_at, account.restarts = float(rows["time"].max()), restarts


def _text(name: bytes) -> str:
    return bytes(name).decode(errors="replace")
