"""The figures of a running job as files: the newest reading, and a series that stays small.

`newest.json` is replaced once a second. `series.jsonl` has a point for each second at first. When
it has 4,000 points, every second point is dropped and the interval doubles, so a job of months
needs the same space, and its whole course can be drawn at any time. A job that recovers continues
from a snapshot: the points after it are void, and `read_series` leaves them out.
"""

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from deploy.run.progress_model import Readings
from deploy.runner.job_folder import NEWEST, SERIES
from ps.whole_files import whole_file
from shards.errors import UNDECODABLE
from worker.training.figures import Rows, StalenessCounts, UpdateTally
from worker.training.worker_times import TimesTally, WorkerTimes, goodput

MAX_POINTS = 4000
Value = TypeVar("Value")


class SeriesPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One point of a job's series. Unknown figures are None.

    `goodput` is the share of the workers' time so far that went into useful steps.
    """

    time: float
    seconds: float
    steps: int
    samples: int
    loss: float | None
    samples_per_s: float | None
    staleness_p50: float | None
    staleness_p99: float | None
    staleness_max: int | None
    clock_gap: int
    waiting: int
    accuracy: float | None = None
    goodput: float | None = None


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The newest figures of a job.

    `staleness[n]` counts the updates with staleness n; the last entry counts all from there on.
    `times_s` are the times of each worker, `holds` how often each worker was the slowest while
    others waited; `diverged` is whether the loss is not finite, which JSON cannot say.
    """

    time: float
    attempt: int
    readings: Readings
    point: SeriesPoint
    staleness: list[int]
    times_s: dict[str, WorkerTimes]
    holds: dict[str, int]
    diverged: bool = False


class FigureTally:
    """The figures that readings need from all update records of an attempt, in constant memory."""

    def __init__(self) -> None:
        self._staleness = StalenessCounts()
        self._times = TimesTally()
        self._holds: Counter[str] = Counter()
        self._tally = UpdateTally()
        self._updated: set[int] = set()

    def add(self, readings: Readings, records: Sequence[Rows]) -> None:
        """Count the records since the last call, one array a shard."""
        self._tally += UpdateTally.of(records)
        for shard, rows in enumerate(records):
            if not len(rows):
                continue
            self._updated.add(shard)
            self._staleness.add(rows)
        restarts = {worker.name: worker.restarts for worker in readings.workers}
        self._times.add(records, restarts, readings.elapsed_s)
        if readings.waiting:
            running = [worker for worker in readings.workers if worker.standing == "runs"]
            if running:
                slowest = min(running, key=lambda worker: worker.clock)
                self._holds[slowest.name] += len(readings.waiting)

    def every_shard_updated(self, shards: int) -> bool:
        """Return whether each shard has applied an update in this attempt."""
        return len(self._updated) >= shards

    def reading(
        self, attempt: int, now: float, readings: Readings, samples: int, accuracy: float | None
    ) -> Reading:
        times_s = self._times.times_s
        return Reading(
            time=now,
            attempt=attempt,
            readings=readings,
            point=SeriesPoint(
                time=now,
                seconds=readings.elapsed_s,
                steps=readings.steps,
                samples=samples,
                loss=readings.loss,
                samples_per_s=readings.samples_per_s,
                staleness_p50=self._staleness.quantile(0.5),
                staleness_p99=self._staleness.quantile(0.99),
                staleness_max=self._tally.largest_staleness,
                clock_gap=readings.max_clock_gap,
                waiting=len(readings.waiting),
                accuracy=accuracy,
                goodput=goodput([*times_s.values()]),
            ),
            staleness=np.trim_zeros(self._staleness.counts, "b").tolist(),
            times_s=times_s,
            holds=dict(self._holds),
            diverged=readings.loss is not None and not math.isfinite(readings.loss),
        )


class ReadingFiles:
    """Writes the readings of an attempt; the series continues that of earlier attempts.

    A disk that is full costs readings and nothing else.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self._newest = folder / NEWEST
        self._series = folder / SERIES
        points = read_series(self._series)
        self._count = len(points)
        self._interval = points[-1].time - points[-2].time if len(points) > 1 else 0.0
        self._interval = self._interval if self._count >= MAX_POINTS // 2 else 0.0
        self._last = 0.0

    def write(self, reading: Reading) -> None:
        with suppress(OSError):
            with whole_file(self._newest) as partial:
                partial.write_bytes(msgspec.json.encode(reading))
            if reading.point.steps and reading.time - self._last >= self._interval:
                self._add(reading.point)

    def _add(self, point: SeriesPoint) -> None:
        with self._series.open("ab") as file:
            file.write(msgspec.json.encode(point) + b"\n")
        self._last = point.time
        self._count += 1
        if self._count >= MAX_POINTS:
            points = read_series(self._series)
            remaining = thin_out(points, len(points) // 2)
            with whole_file(self._series) as partial:
                partial.write_bytes(
                    b"".join(msgspec.json.encode(point) + b"\n" for point in remaining)
                )
            self._count = len(remaining)
            self._interval = 2 * max(1.0, self._interval)


def read_newest(folder: Path) -> Reading | None:
    """The newest reading below a job's folder of readings; None if there is none."""
    try:
        return msgspec.json.decode((folder / NEWEST).read_bytes(), type=Reading)
    except (OSError, *UNDECODABLE):
        return None


def read_series(path: Path) -> list[SeriesPoint]:
    """The points of a series that count, in order; `steps` never falls from one to the next.

    A rollback makes the points void that are beyond where the job continued. A torn last line is
    left out.
    """
    points: list[SeriesPoint] = []
    with suppress(OSError):
        for line in path.read_bytes().splitlines():
            with suppress(*UNDECODABLE):
                point = msgspec.json.decode(line, type=SeriesPoint)
                while points and points[-1].steps > point.steps:
                    points.pop()
                points.append(point)
    return points


def thin_out(values: Sequence[Value], most: int) -> list[Value]:
    """At most `most` of the values, evenly spread, with the first and the last; `most` is >= 2."""
    if len(values) <= most:
        return list(values)
    step = (len(values) - 1) / (most - 1)
    return [values[round(n * step)] for n in range(most)]
