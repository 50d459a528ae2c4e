"""The files that may be deleted, and when: old updates, logs and snapshots of jobs that have ended.

`plan` only looks. It never names a file of a job that is not in a terminal state, a snapshot that
another job began with, one that is pinned, the newest ones or the best one, or anything outside the
service's home. Records of jobs stay for ever.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from deploy.run.evaluations_csv import read_evaluations
from deploy.run.folder import EVALUATIONS, SNAPSHOTS, UPDATES
from deploy.run.snapshot_ref import origin_of
from deploy.runner import job_folder
from deploy.runner.job_folder import Submission
from deploy.service.job_rows import JobFilter, JobRow
from deploy.service.job_store import JobStore
from deploy.service.states import TERMINAL
from deploy.service.uploads import UPLOADS
from shards.errors import BadInput, DownpourError

_DAY_S = 86400.0
_MAX = 10**6
_Amount = Annotated[float, Meta(ge=0.0, le=_MAX)]
_Count = Annotated[int, Meta(ge=0, le=_MAX)]


class ServiceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Disk space that is kept free, the size of an upload, and how long files are kept.

    `silent_s` are seconds without a sign of life after which contact with a job counts as lost.
    Days count from the end of a job; `snapshots` is the number of the newest ones that are kept.
    """

    free_mb: _Count = 512
    upload_gb: _Amount = 20.0
    updates_days: _Amount = 30.0
    logs_days: _Amount = 90.0
    snapshots: _Count = 3
    uploads_days: _Amount = 30.0
    silent_s: _Amount = 30.0

    @staticmethod
    def of_words(words: Iterable[str]) -> "ServiceLimits":
        """The limits that words such as `logs-days=30` change; raises BadInput."""
        limits = ServiceLimits()
        for word in words:
            name, _, value = word.partition("=")
            field = name.replace("-", "_")
            if field not in ServiceLimits.__struct_fields__:
                names = ", ".join(ServiceLimits.__struct_fields__).replace("_", "-")
                raise BadInput("--limit", expected=f"one of {names}", got=word[:80])
            try:
                changed = msgspec.convert({field: value}, ServiceLimits, strict=False)
            except msgspec.ValidationError:
                kind = "whole number" if field in _WHOLE else "number"
                raise BadInput(
                    f"--limit {name}",
                    expected=f"a {kind} from 0 to {_MAX:,}",
                    got=f"{value[:80]!r}",
                ) from None
            limits = msgspec.structs.replace(limits, **{field: getattr(changed, field)})
        return limits


_WHOLE = {"free_mb", "snapshots"}


class Removal(msgspec.Struct, frozen=True):
    """A file or folder that may be deleted; `job` is empty for an upload."""

    path: str
    bytes: int
    why: str
    job: str = ""


def plan(store: JobStore, home: Path, keep: ServiceLimits, now: float) -> list[Removal]:
    """List what may be deleted now, the oldest jobs first."""
    rows = _all(store)
    origins = {origin for row in rows if (origin := _origin(store, row)) is not None}
    removals = []
    for row in rows:
        if row.state in TERMINAL:
            removals += list(_of_job(store.folder(row.id), row, keep, now, origins))
    return removals + list(_uploads(home, rows, keep, now))


def collect(removals: list[Removal]) -> int:
    """Delete what `plan` has named; returns the number of bytes."""
    freed = 0
    for removal in removals:
        path = Path(removal.path)
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
            freed += removal.bytes
    return freed


def list_dependents(store: JobStore, row: JobRow) -> list[str]:
    """The jobs under way that began with a snapshot of this one, or will begin with it."""
    shelf = _shelf(Path(row.settings["out"]) / SNAPSHOTS)
    return [
        other.id
        for other in store.list_unfinished()
        if other.id != row.id
        and (
            ((origin := _origin(store, other)) is not None and origin[0] == shelf)
            or _reads_from(other, store.folder(row.id))
        )
    ]


def _reads_from(row: JobRow, folder: Path) -> bool:
    """Return whether an input of a job, such as its first weights, is below a folder."""
    inputs = (row.settings.get(name) for name in ("solver", "data", "test_data", "weights"))
    return any(Path(str(value)).is_relative_to(folder) for value in inputs if value is not None)


def _all(store: JobStore) -> list[JobRow]:
    """Every job with its settings, the oldest first."""
    rows: list[JobRow] = []
    cursor = None
    while True:
        page = store.page(JobFilter(), 200, cursor)
        rows += [store.get(row.id) for row in page.jobs]
        if (cursor := page.cursor) is None:
            return rows[::-1]


def _shelf(location: str | Path) -> str:
    """A folder of snapshots by one name, however it is written; an object store as it is."""
    return str(location) if "://" in str(location) else os.path.realpath(location)


def _origin(store: JobStore, row: JobRow) -> tuple[str, str | None] | None:
    """The place and the number of the snapshot that a job began with; None: the newest."""
    try:
        submission = job_folder.load(store.folder(row.id) / job_folder.JOB, Submission)
        if submission is None or not submission.origin:
            return None
        origin = origin_of(submission.origin)
    except (BadInput, OSError):
        return None
    return _shelf(origin.catalog), origin.name


def _of_job(
    folder: Path, row: JobRow, keep: ServiceLimits, now: float, origins: set[tuple[str, str | None]]
) -> Iterator[Removal]:
    days, run = (now - row.updated) / _DAY_S, Path(row.settings["out"])
    in_job_folder = run.is_relative_to(folder)  # a run folder elsewhere is its owner's
    if in_job_folder and days > keep.updates_days:
        for part in sorted((run / UPDATES).glob("part-*.parquet")):
            yield _removal(part, f"updates of more than {keep.updates_days:g} days", row.id)
        for aside in sorted(folder.glob(f"{run.name}.attempt-*")):
            yield _removal(aside, "the files of an attempt that left no snapshot", row.id)
    if days > keep.logs_days:
        for log in sorted((folder / job_folder.LOGS).glob("*.log")):
            yield _removal(log, f"logs of more than {keep.logs_days:g} days", row.id)
    if in_job_folder and row.settings.get("snapshots") is None:
        numbers = [path.name for path in (run / SNAPSHOTS).glob("*") if path.name.isdecimal()]
        numbers.sort(key=int)
        retained = {
            *numbers[max(0, len(numbers) - keep.snapshots) :],
            *row.pinned,
            *_best(row, numbers),
        }
        shelf = _shelf(run / SNAPSHOTS)
        retained |= {name for name in numbers if (shelf, name) in origins}
        if (shelf, None) in origins:
            retained |= set(numbers[-1:])
        for name in numbers:
            if name not in retained:
                why = "neither new, best, pinned nor the beginning of another job"
                yield _removal(run / SNAPSHOTS / name, why, row.id)


def _best(row: JobRow, numbers: list[str]) -> set[str]:
    """The snapshot next to the test with the highest accuracy, or else with the least loss."""
    try:
        tests = read_evaluations(Path(row.settings["out"]) / EVALUATIONS)
    except (DownpourError, OSError):
        return set()
    ranked: list[tuple[float, int]] = []
    for test in tests:
        figures: dict[str, Any] = dict(test.figures)
        if (accuracy := figures.get("accuracy")) is not None:
            ranked.append((accuracy, test.iteration))
        elif (loss := figures.get("loss")) is not None:
            ranked.append((-loss, test.iteration))
    if not (ranked and numbers):
        return set()
    best = max(ranked)[1]
    return {min(numbers, key=lambda name: abs(int(name) - best))}


def _uploads(home: Path, rows: list[JobRow], keep: ServiceLimits, now: float) -> Iterator[Removal]:
    used = {str(value) for row in rows for value in row.settings.values()}
    for folder in sorted((home / UPLOADS).glob("*")):
        named = any(value.startswith(f"{folder}/") for value in used)
        age = (now - folder.stat().st_mtime) / _DAY_S
        if not named and age > keep.uploads_days:
            yield _removal(folder, f"an upload that no job names, of {age:.0f} days")


def _removal(path: Path, why: str, job: str = "") -> Removal:
    files = path.rglob("*") if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files if file.is_file())
    return Removal(str(path), size, why, job)
