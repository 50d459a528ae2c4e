"""The figures of the progress display, computed from successive statuses of the shards.

Statuses are counters, so a speed needs two of them: the latest, and the oldest of the last ten
seconds, which is long enough for a steady figure and short enough to show a change. This module has
no clock and no terminal: the display (deploy/run/progress.py) passes the time in and formats the
result.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from statistics import median

import msgspec
import numpy as np

from shards.shard_status import Histogram, ShardStatus, Standing, WorkerStatus
from worker.training.figures import RecentLoss, Rows, UpdateTally
from worker.training.worker_times import TimesTally, count_restarts, goodput

WINDOW_S = 10.0


class WorkerReading(msgspec.Struct, frozen=True):
    """A worker as the shards see it; `loss` is that of its last push, None before the first.

    `goodput` is the share of its time so far that went into useful steps.
    """

    name: str
    clock: int
    step: int
    standing: str
    waits: bool
    loss: float | None
    restarts: int
    goodput: float | None = None


class ShardReading(msgspec.Struct, frozen=True):
    """A shard; its rates are None until there is an earlier status to compare with.

    `apply_ms` is the time that its process spent on requests, for each push; `busy` the share of
    the wall time. `queue` messages came in its latest turn; `waiting` requests wait at the gate.
    The p99 are those of the last seconds; the histograms are since its process began.
    """

    shard: int
    version: int
    updates_per_s: float | None
    bytes_in_per_s: float | None
    bytes_out_per_s: float | None
    max_clock_gap: int
    apply_ms: float | None = None
    busy: float | None = None
    queue: int = 0
    waiting: int = 0
    apply_p99_ms: float | None = None
    queue_p99: float | None = None
    waiting_p99: float | None = None
    apply_s: Histogram = Histogram()
    queues: Histogram = Histogram()
    parked: Histogram = Histogram()


class LinkReading(msgspec.Struct, frozen=True):
    """The links from the workers of one host to the shards of another.

    `rtt_ms` is the median round trip of their connections, as the systems of the workers measure
    it; None where no TCP is used or none was measured. `bytes_per_s` of pushes arrive over them.
    """

    worker_host: str
    shard_host: str
    rtt_ms: float | None
    bytes_per_s: float | None


class Readings(msgspec.Struct, frozen=True, kw_only=True):
    """All figures at one moment; None means unknown.

    `loss` is the mean of the updates of the last seconds, or of the meter's `average`; `epoch`
    counts passes over the training data. All workers together have taken `steps` of `planned`
    steps; `absent` workers have not joined yet. `staleness_mean` and `staleness_max` are over all
    updates so far.
    """

    elapsed_s: float
    steps: int
    planned: int
    remaining_s: float | None
    samples_per_s: float | None
    loss: float | None
    rate: float
    epoch: float | None
    staleness_mean: float | None
    staleness_max: int | None
    bound: int | None
    absent: int
    workers: tuple[WorkerReading, ...]
    shards: tuple[ShardReading, ...]
    links: tuple[LinkReading, ...] = ()

    @property
    def waiting(self) -> list[str]:
        """Names of the workers that wait at the bound, or for the warm start."""
        return [worker.name for worker in self.workers if worker.waits]

    @property
    def max_clock_gap(self) -> int:
        return max(shard.max_clock_gap for shard in self.shards)


class _Look(msgspec.Struct, frozen=True):
    """The shards' statuses at `time`, and the updates of shard 0 since the previous ones.

    `pushed` are the bytes of these updates, by worker at each shard.
    """

    time: float
    statuses: Sequence[ShardStatus]
    fresh: UpdateTally
    pushed: Sequence[Mapping[str, int]]


class Meter:
    """Computes readings from the statuses of the last seconds.

    `steps`: the steps of each worker; `workers`: their number; `bound`: the staleness bound;
    `rows`: the rows of the training data, if known. The loss is the mean of the last `average`
    updates (None: of those of the last seconds).
    """

    def __init__(
        self,
        *,
        steps: int,
        workers: int,
        bound: int | None,
        started: float,
        rows: int | None = None,
        average: int | None = None,
    ) -> None:
        self._steps, self._workers, self._bound, self._rows = steps, workers, bound, rows
        self._recent = RecentLoss(average) if average else None
        self._started = started
        self._looks: deque[_Look] = deque()
        self._tally = UpdateTally()
        self._times = TimesTally()
        self._loss: float | None = None

    def update(
        self, statuses: Sequence[ShardStatus], records: Sequence[Rows], now: float
    ) -> Readings:
        """The readings at `now`, from each shard's status and its records since the last look."""
        self._tally += UpdateTally.of(records)
        if self._looks and _others(self._looks[-1].statuses, statuses):
            self._looks.clear()
        pushed = [_bytes_by_worker(rows) for rows in records]
        self._looks.append(_Look(now, statuses, UpdateTally.of(records[:1]), pushed))
        while len(self._looks) > 2 and self._looks[1].time <= now - WINDOW_S:
            self._looks.popleft()
        self._loss = self._mean_loss(records)
        earlier = self._looks[0]
        first, planned = statuses[0], self._steps * self._workers
        restarts = count_restarts(statuses)
        self._times.add(records, restarts, now - self._started)
        workers = self._read_workers(statuses, restarts)
        steps_per_s = _rate(earlier.statuses[0].steps, first.steps, now - earlier.time)
        return Readings(
            elapsed_s=now - self._started,
            steps=first.steps,
            planned=planned,
            remaining_s=max(0, planned - first.steps) / steps_per_s if steps_per_s else None,
            samples_per_s=_rate(earlier.statuses[0].samples, first.samples, now - earlier.time),
            loss=self._loss,
            rate=first.rate,
            epoch=first.samples / self._rows if self._rows else None,
            staleness_mean=self._tally.staleness_mean,
            staleness_max=self._tally.largest_staleness,
            bound=first.settings.bound if first.settings.revision else self._bound,
            absent=max(0, self._workers - len(workers)),
            workers=workers,
            shards=tuple(
                _read_shard(before, status, now - earlier.time)
                for before, status in zip(earlier.statuses, statuses, strict=True)
            ),
            links=self._read_links(statuses, now - earlier.time),
        )

    def _mean_loss(self, records: Sequence[Rows]) -> float | None:
        """The mean over the last updates; NaN while some of the last seconds have none."""
        window = sum((look.fresh for look in self._looks), UpdateTally())
        mean = window.loss_mean
        if self._recent is not None:
            self._recent.add(records)
            mean = self._recent.mean
        if window.not_finite:
            return math.nan
        return self._loss if mean is None else mean

    def _read_links(
        self, statuses: Sequence[ShardStatus], seconds: float
    ) -> tuple[LinkReading, ...]:
        """The links between each two hosts, sorted by name; a host that is not known has none."""
        trips: dict[tuple[str, str], list[float]] = {}
        pushed: Counter[tuple[str, str]] = Counter()
        recent = list(self._looks)[1:]  # the first look's updates are from before its time
        for number, status in enumerate(statuses):
            for worker in status.workers:
                if not (status.host and worker.host):
                    continue
                pair = worker.host, status.host
                measured = trips.setdefault(pair, [])
                if worker.rtt_s > 0 and worker.standing is Standing.ACTIVE:
                    measured.append(1000 * worker.rtt_s)
                pushed[pair] += sum(
                    look.pushed[number].get(worker.worker, 0)
                    for look in recent
                    if number < len(look.pushed)
                )
        return tuple(
            LinkReading(
                *pair,
                median(measured) if measured else None,
                pushed[pair] / seconds if seconds > 0 else None,
            )
            for pair, measured in sorted(trips.items())
        )

    def _read_workers(
        self, statuses: Sequence[ShardStatus], restarts: Mapping[str, int]
    ) -> tuple[WorkerReading, ...]:
        """One reading per worker: it waits if it waits at any shard; the rest is from shard 0."""
        seen: dict[str, list[WorkerStatus]] = {}
        for status in statuses:
            for worker in status.workers:
                seen.setdefault(worker.worker, []).append(worker)
        times_s = self._times.times_s
        return tuple(
            self._read_worker(
                seen[name], restarts[name], goodput([times_s[name]] if name in times_s else [])
            )
            for name in sorted(seen, key=_natural)
        )

    def _read_worker(
        self, views: Sequence[WorkerStatus], restarts: int, useful: float | None
    ) -> WorkerReading:
        first, waits = views[0], any(view.waiting for view in views)
        return WorkerReading(
            name=first.worker,
            clock=first.clock,
            step=first.step,
            standing=_standing(first, waits, self._steps),
            waits=waits,
            loss=first.loss if first.seq else None,
            restarts=restarts,
            goodput=useful,
        )


def _standing(worker: WorkerStatus, waits: bool, steps: int) -> str:
    """A worker's standing in words."""
    match worker.standing:
        case Standing.KNOWN:
            return "waits for the warm start" if waits else "joins"
        case Standing.ACTIVE:
            return "waits at the bound" if waits else "runs"
        case Standing.LEFT:
            return "is done" if worker.step >= steps else "has left"
        case Standing.EXPIRED:
            return "is silent, no longer waited for"


def _others(before: Sequence[ShardStatus], now: Sequence[ShardStatus]) -> bool:
    """True if the counters are not comparable: the job was resharded, or a shard rolled back."""
    return len(before) != len(now) or any(
        (new.version, new.pushes) < (old.version, old.pushes)
        for old, new in zip(before, now, strict=True)
    )


def _read_shard(before: ShardStatus, now: ShardStatus, seconds: float) -> ShardReading:
    busy_s, pushes = now.busy_s - before.busy_s, now.pushes - before.pushes
    return ShardReading(
        shard=now.shard,
        version=now.version,
        updates_per_s=_rate(before.version, now.version, seconds),
        bytes_in_per_s=_rate(before.bytes_in, now.bytes_in, seconds),
        bytes_out_per_s=_rate(before.bytes_out, now.bytes_out, seconds),
        max_clock_gap=now.max_clock_gap,
        apply_ms=1000 * busy_s / pushes if pushes and busy_s else None,
        busy=busy_s / seconds if seconds > 0 and busy_s else None,
        queue=now.queue,
        waiting=now.waiting,
        apply_p99_ms=_in_ms(quantile(before.apply_s, now.apply_s, 0.99)),
        queue_p99=quantile(before.queues, now.queues, 0.99),
        waiting_p99=quantile(before.parked, now.parked, 0.99),
        apply_s=now.apply_s,
        queues=now.queues,
        parked=now.parked,
    )


def quantile(before: Histogram, now: Histogram, share: float) -> float | None:
    """The bound below which `share` of the values are that came between two histograms.

    A first one without counts has none yet. None if no value came; the largest bound if values were
    above it.
    """
    earlier = before.counts or (0,) * len(now.counts)
    counts = [new - old for old, new in zip(earlier, now.counts, strict=True)]
    if before.counts == now.counts:  # the same status twice, at the first look
        counts = list(now.counts)
    total, reached = sum(counts), 0
    if total <= 0 or min(counts) < 0:
        return None
    for bound, count in zip(now.bounds, counts, strict=False):
        reached += count
        if reached >= share * total:
            return bound
    return now.bounds[-1]


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _bytes_by_worker(rows: Rows) -> dict[str, int]:
    """The payload bytes of the pushes in these records."""
    names, indices = np.unique(rows["worker"], return_inverse=True)
    sums = np.bincount(indices, rows["bytes"], len(names))
    return {
        bytes(name).decode(errors="replace"): int(count)
        for name, count in zip(names, sums, strict=True)
    }


def _rate(before: int, now: int, seconds: float) -> float | None:
    return (now - before) / seconds if seconds > 0 else None


def _natural(name: str) -> tuple[int, str]:
    """A sort key that puts w2 before w10."""
    return len(name), name
