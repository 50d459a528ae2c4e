"""The alarms about a job or a disk: rules over figures and the time that is passed in.

An alert is on or off; each change is an entry in the job's journal, so that a restarted service
repeats none. Rules that ask how long something has been so begin again after a restart.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from deploy.run.disk_space import existing, free_bytes, megabytes
from deploy.runner.readings import Reading
from deploy.service.job_rows import JobRow
from deploy.service.states import TRAINING, JobState

RESERVE_BYTES = 512 << 20
"""Disk space that is kept back for journals and last snapshots."""
UNWRITABLE = "unwritable"  # the alert that holds a recovery back
_AT_BOUND_S, _DEGRADED_S = 60.0, 300.0
_HOLDS_SHARE, _HOLDS_MIN = 0.5, 100


class AlertChange(msgspec.Struct, frozen=True):
    """An alert that begins or ends; `alerts` are those that are on from now on."""

    alert: str
    on: bool
    text: str
    alerts: list[str]


ALERTS = {
    "silent": "The job's process has shown no sign of life for 30 s, or as --limit silent-s says.",
    "diverged": "The loss is not a finite number.",
    "at_bound": "Half of the workers or more have waited at the staleness bound for 60 s.",
    "held_up": "One worker is the slowest in more than half of all waits at the gate.",
    "degraded": "Fewer workers than planned have been alive for 5 min.",
    "disk": "The job is paused because the disk is nearly full.",
    UNWRITABLE: "The job's run folder, snapshots or logs cannot be written.",
}
"""What each alert means."""


class JobWatch:
    """The alerts of all jobs. `check` returns what has changed for one of them."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], float] = {}

    def check(self, row: JobRow, reading: Reading | None, now: float) -> Iterator[AlertChange]:
        """Compare the job with its alerts; the caller stores each change before the next one."""
        present = list(row.alerts)
        due = dict(self._due(row, reading, now))
        for name in ALERTS:
            if (name in due) != (name in present):
                if name in due:
                    present.append(name)
                else:
                    present.remove(name)
                text = due.get(name, "over")
                yield AlertChange(name, name in due, text, list(present))

    def forget(self, job: str) -> None:
        """Drop what is kept about an attempt that is over."""
        for key in [key for key in self._since if key[0] == job]:
            del self._since[key]

    def _due(self, row: JobRow, reading: Reading | None, now: float) -> Iterator[tuple[str, str]]:
        if row.contact:
            yield "silent", f"contact {row.contact}"
        if row.code == "disk":
            yield "disk", row.reason
        if trouble := _find_unwritable(row):
            yield UNWRITABLE, trouble
        if self._lasts(row.id, "degraded", row.state is JobState.DEGRADED, now) >= _DEGRADED_S:
            yield "degraded", row.reason
        if reading is None or reading.attempt != row.attempt or row.state not in TRAINING:
            return
        if reading.diverged:
            yield "diverged", "the loss is not a finite number"
        figures = reading.readings
        waiting = figures.bound is not None and 2 * len(figures.waiting) >= len(figures.workers) > 0
        if self._lasts(row.id, "at_bound", waiting, now) >= _AT_BOUND_S:
            yield "at_bound", f"{len(figures.waiting)} of {len(figures.workers)} workers wait"
        total = sum(reading.holds.values())
        name, most = max(reading.holds.items(), key=lambda hold: hold[1], default=("", 0))
        if total >= _HOLDS_MIN and most > _HOLDS_SHARE * total and len(figures.workers) > 2:
            yield "held_up", f"{name} is the slowest in {most / total:.0%} of all waits"

    def _lasts(self, job: str, name: str, holds: bool, now: float) -> float:
        """For how many seconds a condition has held; -1 if it does not."""
        if not holds:
            self._since.pop((job, name), None)
            return -1.0
        return now - self._since.setdefault((job, name), now)


def unwritable(folder: Path) -> str:
    """Why a folder cannot be written; empty if it can."""
    if os.access(folder, os.W_OK | os.X_OK):
        return ""
    return f"{folder} cannot be written, as on a disk that was mounted read-only, or not at all"


def _find_unwritable(row: JobRow) -> str:
    """Which place of a job that trains, or is to train again, cannot be written; empty if none.

    The run folder of a job with a snapshot is missing if its disk is not mounted: another attempt
    would begin from the start.
    """
    if row.state not in TRAINING | {JobState.RECOVERING}:
        return ""
    out = Path(row.settings["out"])
    folders = [out if row.snapshot is not None else existing(out)]
    for name in ("snapshots", "logs"):
        location = row.settings.get(name)
        if location is not None and "://" not in location:
            folders.append(existing(Path(location)))
    return next(filter(None, map(unwritable, folders)), "")


class DiskWatch:
    """Watches the room on disks: below twice the reserve no job starts, below it jobs pause."""

    def __init__(self, reserve_bytes: int, free: Callable[[Path], int | None] = free_bytes) -> None:
        self.reserve_bytes = reserve_bytes
        self._free = free

    def halts_queue(self, folder: Path) -> str:
        """Why no job may start that writes into this folder; empty if it may."""
        return self._short(folder, 2 * self.reserve_bytes)

    def pauses(self, folder: Path) -> str:
        """Why a job that writes into this folder has to pause; empty if it need not."""
        return self._short(folder, self.reserve_bytes)

    def _short(self, folder: Path, needed: int) -> str:
        free = self._free(folder)
        if free is None or free >= needed:
            return ""
        return f"the disk of {folder} has {megabytes(free)} free; expected {megabytes(needed)}"
