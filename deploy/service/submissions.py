"""Checks what a user submits, as far as that can be known without reading data."""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from deploy.run_folder import SETTINGS, SUMMARY, writer_of
from deploy.runner import job_folder
from deploy.runner.job_folder import Submission
from deploy.service.checkpoints import checkpoints
from deploy.service.job_store import JobRow, JobStore
from deploy.service.states import JobState
from deploy.service.uploads import Uploads
from deploy.settings import TrainSettings
from deploy.snapshot_ref import origin_of
from ps.snapshots.object_store import without_secrets
from shards.errors import BadInput
from worker.strategies import strategy_named

_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,200}")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_MOST_LABELS = 32
_INPUTS = ("solver", "data", "test_data", "weights")
_PATHS = (*_INPUTS, "out", "logs")
CHANGEABLE = frozenset(
    {
        "staleness", "strategy", "on_stale", "n_push", "n_fetch", "max_iter", "prefetch",
        "compress", "compress_pull", "snapshot_every", "snapshot_aligned", "snapshot_keep",
        "snapshot_keep_for", "lease_s", "updates_every_s",
    }
)  # fmt: skip
"""Options that `:set` may change: the others decide what the job is, or what it holds."""
_ADOPTION_S = 120.0


class Submitted(BaseModel):
    """The body of a submission."""

    model_config = ConfigDict(extra="forbid")

    settings: dict[str, Any] = Field(description="Options of `downpour train`, by name.")
    name: str | None = Field(default=None, description="Default: the name of the solver's file.")
    project: str = "default"
    labels: dict[str, str] = {}
    priority: int = Field(default=0, ge=-1000, le=1000, description="Higher first, then by age.")
    resume: str | None = Field(default=None, description="A snapshot to start from, RUN@NUMBER.")


class Cloning(BaseModel):
    """The body of `:clone`: what differs from the job that is cloned."""

    model_config = ConfigDict(extra="forbid")

    settings: dict[str, Any] = Field(default={}, description="Options that change.")
    name: str | None = None
    labels: dict[str, str] | None = None
    priority: int | None = Field(default=None, ge=-1000, le=1000)
    snapshot: str | None = Field(
        default=None,
        description='A checkpoint to start from, or "newest"; default: from the beginning.',
    )


class Submissions:
    """Admits submissions. `roots` are the folders below which all paths must be; none: anywhere."""

    def __init__(
        self, store: JobStore, uploads: Uploads, *, slots: int, roots: Sequence[Path] = ()
    ) -> None:
        self._store = store
        self._uploads = uploads
        self._slots = slots
        self._roots = [root.resolve() for root in roots]

    def submit(self, request: Submitted, key: str | None = None) -> JobRow:
        """Store the job; raises BadInput that names the field. A `key` belongs to one job."""
        if key is not None and (earlier := self._store.with_key(key)) is not None:
            return earlier
        job = self._store.new_id()
        plain = dict(request.settings)
        for name in _INPUTS:
            if isinstance(plain.get(name), str):
                plain[name] = self._uploads.resolved(plain[name])
        if "strategy" in plain and "staleness" not in plain:
            plain["staleness"] = strategy_named(plain["strategy"]).usual_bound
        if "solver" not in plain:
            raise BadInput("--solver: expected a Caffe solver, got none")
        plain.setdefault("out", str(self._store.folder(job) / job_folder.RUN))
        settings = TrainSettings.of_plain(plain)
        self._check_paths(settings)
        self._check_size(settings)
        if request.resume is not None:
            self._within("resume", Path(request.resume))
            origin_of(request.resume)
        submission = Submission(
            id=job,
            name=_name(request.name or settings.solver.stem),
            created=int(job[:11], 16) / 1000,
            project=_named("project", request.project),
            labels=_labels(request.labels),
            priority=request.priority,
            origin=request.resume,
            request_key=key,
        )
        return self._store.create(submission, settings)

    def clone(self, row: JobRow, changes: Cloning, key: str | None = None) -> JobRow:
        """Submit a copy of a job, with other settings, perhaps from one of its snapshots."""
        own = str(self._store.folder(row.id) / job_folder.RUN)
        kept = {
            name: value
            for name, value in row.settings.items()
            if name not in {"out", "snapshots", "logs"}
        }
        out, resume = row.settings["out"], None
        if changes.snapshot is not None:
            number = row.snapshot if changes.snapshot == "newest" else changes.snapshot
            if number is None or not number.isdecimal():
                raise BadInput(
                    f"snapshot: expected one of job {row.id}, got {changes.snapshot};"
                    " see its checkpoints"
                )
            resume = f"{out or own}@{number}"
            kept["weights"] = None
        return self.submit(
            Submitted(
                settings=kept | changes.settings,
                name=changes.name or f"{row.name} (copy)",
                project=row.project,
                labels=row.labels if changes.labels is None else changes.labels,
                priority=row.priority if changes.priority is None else changes.priority,
                resume=resume,
            ),
            key,
        )

    def changed(self, row: JobRow, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a job with these changes; raises BadInput for one that cannot change."""
        for name in changes:
            if name not in CHANGEABLE:
                expected = ", ".join(sorted(CHANGEABLE))
                raise BadInput(f"{name[:80]}: expected one of {expected}; got another option")
        settings = TrainSettings.of_plain(row.settings | dict(changes))
        return settings.plain()

    def adopt(self, run: Path, name: str | None, project: str) -> JobRow:
        """List a run that `downpour train` has made, and that no process writes now.

        It is SUCCEEDED if it has a summary, PAUSED if it can be resumed, else CANCELLED.
        """
        self._within("run", run)
        run = run.absolute()
        if not (run / SETTINGS).is_file():
            raise BadInput(f"run: expected a run folder, got {run}")
        if writer_of(run) is not None:
            raise BadInput(f"run: expected a run that has ended, got {run}, which is under way")
        if (known := self._store.with_run(run)) is not None:
            raise BadInput(f"run: expected a run without a job, got that of job {known}")
        settings = TrainSettings.load(run / SETTINGS).replace(out=run)
        found = checkpoints(settings)
        state = JobState.CANCELLED
        if (run / SUMMARY).is_file():
            state = JobState.SUCCEEDED
        elif found:
            state = JobState.PAUSED
        job = self._store.new_id()
        submission = Submission(
            id=job,
            name=_name(name or run.name),
            created=int(job[:11], 16) / 1000,
            project=_named("project", project),
        )
        snapshot = found[-1]["name"] if found else None
        reason = f"adopted from {run}"
        row = self._store.create(
            submission, settings, state=state, reason=reason, snapshot=snapshot, attempt=1
        )
        command = [sys.executable, "-m", "deploy.runner.adoption", str(self._store.folder(job))]
        subprocess.run(command, capture_output=True, check=False, timeout=_ADOPTION_S)
        return row

    def checked(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The changes of a job's name, labels and priority, checked; raises BadInput."""
        found = dict(changes)
        if "name" in found:
            found["name"] = _name(found["name"])
        if "labels" in found:
            found["labels"] = _labels(found["labels"])
        return found

    def _check_paths(self, settings: TrainSettings) -> None:
        for name in _PATHS:
            path = getattr(settings, name)
            if path is None:
                continue
            option = f"--{name.replace('_', '-')}"
            self._within(option, path)
            if name in _INPUTS and not path.exists():
                raise BadInput(f"{option}: expected a file or folder, got {path}; it is missing")
        place = settings.snapshots
        if place is None:
            return
        if without_secrets(place) != place:
            raise BadInput(
                "--snapshots: expected a place without a key in it, got one with;"
                " give the service the key in its environment"
            )
        if "://" not in place:
            self._within("--snapshots", Path(place))

    def _within(self, what: str, path: Path) -> None:
        """Raise BadInput for a path outside the roots, symbolic links resolved."""
        target = path.resolve()
        inside = [*self._roots, self._store.folder("").resolve(), self._uploads.folder.resolve()]
        if self._roots and not any(target.is_relative_to(root) for root in inside):
            roots = ", ".join(map(str, self._roots))
            raise BadInput(f"{what}: expected a path below {roots}, got {path}")

    def _check_size(self, settings: TrainSettings) -> None:
        if settings.workers > self._slots:
            raise BadInput(
                f"--workers: expected at most {self._slots}, the slots of the service,"
                f" got {settings.workers}; start it with a larger downpour serve --slots"
            )


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise BadInput(f"name: expected 1 to 200 printable characters, got {text[:80]!r}")
    return text


def _named(what: str, text: str) -> str:
    if not _LABEL.fullmatch(text):
        raise BadInput(f"{what}: expected letters, digits and ._/-, 63 at most, got {text[:80]!r}")
    return text


def _labels(labels: Mapping[str, str]) -> dict[str, str]:
    if len(labels) > _MOST_LABELS:
        raise BadInput(f"labels: expected at most {_MOST_LABELS}, got {len(labels)}")
    for name, value in labels.items():
        _named("labels", name)
        if len(value) > 200:
            raise BadInput(f"labels: expected values of at most 200 characters, got {len(value)}")
    return dict(labels)
