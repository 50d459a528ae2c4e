"""The progress display of an attempt: prints what Progress prints, and records events, readings.

The health of a job is judged here, from readings and the time that is passed in: a job is degraded
after fewer workers than planned have been alive for `DEGRADED_AFTER_S`.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.run.progress import Progress
from deploy.run.progress_model import Readings
from deploy.run.summary import Rows
from deploy.runner.job_folder import READINGS
from deploy.runner.journal import Journal
from deploy.runner.readings import FigureTally, ReadingFiles, read_newest
from shards.errors import GiveUp
from shards.live_settings import describe_settings
from shards.messages import LiveSettings
from shards.shard_status import ShardStatus
from worker.training.evaluation import Evaluation

DEGRADED_AFTER_S = 30.0
_EVERY_S = 1.0
_MAX_UNWRITTEN = 1000


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

    def __init__(self, journal: Journal, folder: Path, attempt: int, **figures: Any) -> None:
        super().__init__(**figures)
        self._journal = journal
        self._attempt = attempt
        self._files = ReadingFiles(folder / READINGS)
        self._tally = FigureTally()
        self._health = Health()
        self._unwritten: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_MAX_UNWRITTEN)
        self._writing = threading.RLock()
        self._runs = False
        self._written_at = -_EVERY_S
        self._samples = 0
        former = read_newest(folder / READINGS)
        self._accuracy = None if former is None else former.point.accuracy

    @classmethod
    def into(cls, journal: Journal, folder: Path, attempt: int) -> Callable[..., Progress]:
        """Return a display factory that records into this journal, for `deploy.run.train.run`."""
        return lambda **figures: cls(journal, folder, attempt, **figures)

    def starting(self, subject: str) -> None:
        super().starting(subject)
        self._record("starting", what=subject)

    def update(self, statuses: Sequence[ShardStatus], records: Sequence[Rows] = ()) -> None:
        super().update(statuses, records)
        assert self.readings is not None
        self._tally.add(self.readings, records)
        self._samples = statuses[0].samples
        if not self._runs and self._tally.every_shard_updated(len(statuses)):
            self._runs = True
            self._record("running")
        self._write_events()
        now = time.monotonic()  # the system's clock may be set back
        for kind in self._health.update(self.readings, now):
            self._record(kind, text=_health_text(kind, self.readings))
        if now - self._written_at >= _EVERY_S:
            self._write()

    def show_evaluation(self, result: Evaluation) -> None:
        super().show_evaluation(result)
        self._accuracy = result.figures.get("accuracy", self._accuracy)
        self._record("tested", iteration=result.iteration, figures=dict(result.figures))
        if self.readings is not None:
            self._write()

    def note(self, text: str) -> None:
        super().note(text)
        self._record("notice", text=text)

    def settings_changed(self, settings: LiveSettings, changed: Mapping[str, object]) -> None:
        text = describe_settings(settings)
        Progress.note(self, text)  # its own `note` would record a second event
        self._record("settings", settings=dict(changed), text=text)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._write_events()
        if self.readings is not None:
            self._write()

    def _write(self) -> None:
        assert self.readings is not None
        self._written_at, now = time.monotonic(), time.time()
        self._files.write(
            self._tally.reading(self._attempt, now, self.readings, self._samples, self._accuracy)
        )

    def _record(self, kind: str, **data: Any) -> None:
        self._unwritten.append((kind, data))
        self._write_events()

    def _write_events(self) -> None:
        """Append the events that wait. A disk that cannot be written now delays them, no more."""
        with self._writing:  # tests of the weights are reported by another thread
            while self._unwritten:
                kind, data = self._unwritten.popleft()
                try:
                    self._journal.append(kind, self._attempt, **data)
                except GiveUp:
                    self._unwritten.appendleft((kind, data))
                    return


def _health_text(kind: str, readings: Readings) -> str:
    if kind == "diverged":
        return "the loss is not a finite number: lower the learning rate, or clip gradients"
    planned = len(readings.workers) + readings.absent
    lost = [worker.name for worker in readings.workers if worker.standing.startswith("is silent")]
    alive = planned - readings.absent - len(lost)
    return f"{alive} of {planned} workers are alive"
