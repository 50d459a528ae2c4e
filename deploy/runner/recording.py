"""The progress display of an attempt: prints what Progress prints, and records events, readings.

The health of a job is judged here, from readings and the time that is passed in: a job is degraded
after fewer workers than planned have been alive for `DEGRADED_AFTER_S`.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.run.progress import Progress
from deploy.run.progress_model import Readings
from deploy.runner.job_folder import READINGS
from deploy.runner.journal import PatientJournal
from deploy.runner.readings import FigureTally, ReadingFiles, read_newest
from shards.shard_status import ShardStatus
from worker.training.evaluation import Evaluation
from worker.training.figures import Rows

DEGRADED_AFTER_S = 30.0
_EVERY_S = 1.0


class Health:
    """Watches whether a job has all its workers; `update` returns the events that are due."""

    def __init__(self) -> None:
        self._short_since: float | None = None
        self._degraded = self._diverged = False

    def update(self, readings: Readings, now: float) -> list[str]:
        due = []
        lost = any(worker.standing.startswith("is silent") for worker in readings.workers)
        if not (lost or readings.absent):
            self._short_since = None
            if self._degraded:
                due.append("restored")
            self._degraded = False
        elif self._short_since is None:
            self._short_since = now
        elif not self._degraded and now - self._short_since >= DEGRADED_AFTER_S:
            self._degraded = True
            due.append("degraded")
        if not self._diverged and readings.loss is not None and not math.isfinite(readings.loss):
            self._diverged = True
            due.append("diverged")
        return due


class RecordingProgress(Progress):
    """A display that also appends events to a journal and writes readings once a second.

    Until an attempt has tested the weights, it shows the accuracy of the last test of those before.
    """

    def __init__(self, events: PatientJournal, folder: Path, attempt: int, **figures: Any) -> None:
        super().__init__(**figures)
        self._events = events
        self._attempt = attempt
        self._files = ReadingFiles(folder / READINGS)
        self._tally = FigureTally()
        self._health = Health()
        self._runs = False
        self._written_at = -_EVERY_S
        self._samples = 0
        former = read_newest(folder / READINGS)
        self._accuracy = None if former is None else former.point.accuracy

    @classmethod
    def into(cls, events: PatientJournal, folder: Path, attempt: int) -> Callable[..., Progress]:
        """Return a display factory that records into this journal, for `deploy.run.train.run`."""
        return lambda **figures: cls(events, folder, attempt, **figures)

    def starting(self, subject: str) -> None:
        super().starting(subject)
        self._events.append("starting", what=subject)

    def update(self, statuses: Sequence[ShardStatus], records: Sequence[Rows] = ()) -> None:
        super().update(statuses, records)
        assert self.readings is not None
        self._tally.add(self.readings, records)
        self._samples = statuses[0].samples
        if not self._runs and self._tally.every_shard_updated(len(statuses)):
            self._runs = True
            self._events.append("running")
        self._events.flush()
        now = time.monotonic()  # the system's clock may be set back
        for kind in self._health.update(self.readings, now):
            self._events.append(kind, text=_health_text(kind, self.readings))
        if now - self._written_at >= _EVERY_S:
            self._write()

    def show_evaluation(self, result: Evaluation) -> None:
        super().show_evaluation(result)
        self._accuracy = result.figures.get("accuracy", self._accuracy)
        self._events.append("tested", iteration=result.iteration, figures=dict(result.figures))
        if self.readings is not None:
            self._write()

    def note(self, text: str) -> None:
        super().note(text)
        self._events.append("notice", text=text)

    def options_changed(self, text: str, changed: Mapping[str, object]) -> None:
        Progress.note(self, text)  # its own `note` would record a second event
        self._events.append("settings", settings=dict(changed), text=text)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._events.flush()
        if self.readings is not None:
            self._write()

    def _write(self) -> None:
        assert self.readings is not None
        self._written_at, now = time.monotonic(), time.time()
        self._files.write(
            self._tally.reading(self._attempt, now, self.readings, self._samples, self._accuracy)
        )


def _health_text(kind: str, readings: Readings) -> str:
    if kind == "diverged":
        return "the loss is not a finite number: lower the learning rate, or clip gradients"
    planned = len(readings.workers) + readings.absent
    lost = [worker.name for worker in readings.workers if worker.standing.startswith("is silent")]
    alive = planned - readings.absent - len(lost)
    return f"{alive} of {planned} workers are alive"
