"""Checks what a user submits, as far as that can be known without reading data."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pydantic import Field

from deploy.run.folder import A_RUN, LOGS, SETTINGS, SUMMARY, content_of, writer_of
from deploy.run.places import check_own
from deploy.run.settings import TrainSettings, option_name
from deploy.run.snapshot_ref import SnapshotRef, origin_of
from deploy.runner import job_folder
from deploy.runner.job_folder import Submission
from deploy.service.access import check_project
from deploy.service.access_store import ProjectLimits, remaining_quota
from deploy.service.job_rows import JobRow
from deploy.service.job_store import JobStore
from deploy.service.snapshots import list_complete_snapshots
from deploy.service.states import JobState
from deploy.service.strict_requests import RequestBody
from deploy.service.tokens import LOCAL, Principal
from deploy.service.uploads import Uploads
from deploy.terminal_text import is_plain
from ps import path_checks
from ps.snapshots.manifest import Manifest
from ps.storage import without_secrets
from shards import argument_checks
from shards.errors import BadInput

MAX_NAME = 200
"""Characters of a job's name."""
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_MAX_LABELS = 32
_INPUTS = ("solver", "data", "test_data", "weights")
_PATHS = (*_INPUTS, "out", "logs")
_PLACES = (*_PATHS, "snapshots")
_FILES = ("solver", "weights")
CHANGEABLE = frozenset(
    {
        "staleness", "rate_factor", "strategy", "on_stale", "n_push", "n_fetch", "max_iter",
        "prefetch", "compress", "compress_pull", "snapshot_every", "snapshot_aligned",
        "snapshot_keep", "snapshot_keep_for", "lease_s", "updates_every_s",
    }
)  # fmt: skip
"""Options that `:set` may change: the others decide what the job is, or what it holds."""
_ADOPTION_S = 120.0
_TEXT_OR_COMMENT = re.compile(r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|\#[^\n]*""")
_MAX_ITER = re.compile(r"\bmax_iter\s*:\s*([0-9]{1,10})\b")
_MAX_SOLVER_BYTES = 1 << 20
_ADDRESSES = ("snapshots", "spark", "ray")
# Others, such as local://, may name files of this machine, which a sender may not see.
_OBJECT_STORES = frozenset({"abfs", "abfss", "gcs", "gs", "hdfs", "s3", "viewfs"})


class Submitted(RequestBody):
    """The body of a submission."""

    settings: dict[str, Any] = Field(description="Options of `downpour train`, by name.")
    name: str | None = Field(default=None, description="Default: the name of the solver's file.")
    project: str = "default"
    labels: dict[str, str] = Field(default={})
    priority: int = Field(default=0, ge=-1000, le=1000, description="Higher first, then by age.")
    resume: str | None = Field(default=None, description="A snapshot to start from, RUN@NUMBER.")


class Cloning(RequestBody):
    """The body of `:clone`: what differs from the job that is cloned."""

    settings: dict[str, Any] = Field(default={}, description="Options that change.")
    name: str | None = None
    labels: dict[str, str] | None = None
    priority: int | None = Field(default=None, ge=-1000, le=1000)
    snapshot: str | None = Field(
        default=None,
        description='A snapshot to start from, or "newest"; default: from the beginning.',
    )


class Submissions:
    """Admits submissions of one service.

    `roots` are the folders below which all paths must be. Without one, paths are confined to the
    folders of jobs if `confined`, else they may be anywhere but in the service's own files.
    """

    def __init__(
        self,
        store: JobStore,
        uploads: Uploads,
        *,
        slots: int,
        roots: Sequence[Path] = (),
        confined: bool = False,
        limits: Callable[[], Mapping[str, ProjectLimits]] = dict,
    ) -> None:
        self._store = store
        self._uploads = uploads
        self._slots = slots
        self._roots = [root.resolve() for root in roots]
        self._confined = confined or bool(roots)
        self._limits = limits
        self._lock = threading.Lock()  # two submissions may not take the same last place

    def submit(
        self, request: Submitted, key: str | None = None, sender: Principal = LOCAL
    ) -> JobRow:
        """Store the job; raises BadInput that names the field. A `key` belongs to one job."""
        if key is not None and (earlier := self._store.with_key(key)) is not None:
            check_project(sender, earlier.project)
            return earlier
        check_project(sender, request.project)
        job = self._store.new_id()
        plain = dict(request.settings)
        for name in _INPUTS:
            if isinstance(plain.get(name), str):
                plain[name] = self._uploads.resolve(plain[name])
        for name in _PLACES:
            _check_absolute(option_name(name), plain.get(name))
        if "solver" not in plain:
            raise BadInput("--solver", expected="a Caffe solver", got="none")
        plain.setdefault("out", str(self._store.folder(job) / job_folder.RUN))
        settings = TrainSettings.of_plain(plain)
        _check_secrets(settings)
        self._check_paths(settings, job, sender)
        check_own(settings, stores=False)
        _check_steps(settings)
        if request.resume is not None:
            self._check_resume(request.resume, settings, sender)
        submission = Submission(
            id=job,
            name=_name(request.name or settings.solver.stem),
            created=int(job[:11], 16) / 1000,
            project=check_project_name(request.project),
            owner=sender.name,
            labels=_labels(request.labels),
            priority=request.priority,
            origin=request.resume,
            request_key=key,
        )
        with self._lock:
            if "out" in request.settings:
                self._check_out(settings.out)
            self._check_size(settings, submission.project)
            return self._store.create(submission, settings)

    def clone(
        self, row: JobRow, changes: Cloning, key: str | None = None, sender: Principal = LOCAL
    ) -> JobRow:
        """Submit a copy of a job, with other settings, perhaps from one of its snapshots."""
        run_folder = str(self._store.folder(row.id) / job_folder.RUN)
        settings = {
            name: value
            for name, value in row.settings.items()
            if name not in {"out", "snapshots", "logs"}
        }
        out, resume = row.settings["out"], None
        if changes.snapshot is not None:
            resume = f"{out or run_folder}@{_snapshot_of(row, changes.snapshot)}"
            settings["weights"] = None
        return self.submit(
            Submitted(
                settings=settings | changes.settings,
                name=changes.name or f"{row.name} (copy)",
                project=row.project,
                labels=row.labels if changes.labels is None else changes.labels,
                priority=row.priority if changes.priority is None else changes.priority,
                resume=resume,
            ),
            key,
            sender,
        )

    def apply_changes(self, row: JobRow, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a job with these changes; raises BadInput for one that cannot change."""
        for name in changes:
            if name not in CHANGEABLE:
                expected = ", ".join(option_name(setting) for setting in sorted(CHANGEABLE))
                wrong = option_name(name[:80])
                raise BadInput(wrong, expected=f"one of {expected}", got=wrong)
        settings = TrainSettings.of_plain(row.settings | dict(changes))
        _check_secrets(settings)
        _check_steps(settings)
        return settings.plain()

    def adopt(self, run: Path, name: str | None, project: str, sender: Principal = LOCAL) -> JobRow:
        """List a run that `downpour train` has made, and that no process writes now.

        It is SUCCEEDED if it has a summary, PAUSED if it can be resumed, else CANCELLED.
        """
        check_project(sender, project)
        _check_absolute("run", str(run))
        self._within("run", run, sender)
        if not (run / SETTINGS).is_file():
            raise BadInput("run", expected="a run folder", got=run)
        if writer_of(run) is not None:
            raise BadInput("run", expected="a run that has ended", got=f"{run}, which is under way")
        if (known := self._store.with_run(run)) is not None:
            raise BadInput("run", expected="a run without a job", got=f"that of job {known}")
        settings = TrainSettings.load(run / SETTINGS).replace(out=run)
        _check_secrets(settings)
        snapshots = list_complete_snapshots(settings)
        state = JobState.CANCELLED
        if (run / SUMMARY).is_file():
            state = JobState.SUCCEEDED
        elif snapshots:
            state = JobState.PAUSED
        job = self._store.new_id()
        submission = Submission(
            id=job,
            name=_name(name or run.name),
            created=int(job[:11], 16) / 1000,
            project=check_project_name(project),
            owner=sender.name,
        )
        snapshot = snapshots[-1]["name"] if snapshots else None
        reason = f"adopted from {run}"
        row = self._store.create(
            submission, settings, state=state, reason=reason, snapshot=snapshot, attempt=1
        )
        command = [sys.executable, "-m", "deploy.runner.adoption", str(self._store.folder(job))]
        with suppress(subprocess.TimeoutExpired):  # the job is listed, without a series
            subprocess.run(command, capture_output=True, check=False, timeout=_ADOPTION_S)
        return row

    def check_changes(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The changes of a job's name, labels and priority, checked; raises BadInput."""
        values = dict(changes)
        if "name" in values:
            values["name"] = _name(values["name"])
        if "labels" in values:
            values["labels"] = _labels(values["labels"])
        return values

    def _check_paths(self, settings: TrainSettings, job: str, sender: Principal) -> None:
        for name in _PATHS:
            path = getattr(settings, name)
            if path is None:
                continue
            option = f"--{name.replace('_', '-')}"
            self._within(option, path, sender, "" if name in _INPUTS else job)
            if name in _INPUTS:
                _check_input(option, path, folder_too=name not in _FILES)
        folder = (
            _local("--snapshots", settings.snapshots) if settings.snapshots is not None else None
        )
        if folder is not None:
            self._within("--snapshots", folder, sender, job)

    def _check_resume(self, text: str, settings: TrainSettings, sender: Principal) -> None:
        """Raise BadInput unless `text` is a snapshot at a place for the sender, with steps left.

        What an object store has is checked when the job starts.
        """
        _check_absolute("--resume", text)
        run, separator, number = text.rpartition("@")
        folder = _local("--resume", run if separator and number.isdecimal() else text)
        if folder is not None:
            self._within("--resume", folder, sender)
        try:
            origin = origin_of(text)
        except BadInput:
            raise BadInput(
                "--resume",
                expected="a run folder or a place with snapshots",
                got=text,
                hint="`downpour snapshots ls RUN` shows those of a run",
            ) from None
        shelf = _local("--resume", origin.catalog)
        if shelf is None:
            return
        self._within("--resume", shelf, sender)
        manifest = _manifest_of(origin, text)
        planned = settings.max_iter or _max_iter_of(settings.solver)
        if manifest is None or planned is None:
            return
        if manifest.steps >= planned * settings.workers:
            steps = -(-manifest.steps // settings.workers)
            raise BadInput(
                "--max-iter",
                expected=f"more than {steps}, the steps that the snapshot has taken",
                got=planned,
                hint="give a larger one, or begin with an earlier snapshot",
            )

    def _check_out(self, out: Path) -> None:
        """Raise BadInput for a run folder that is in use, or that cannot be made."""
        advice = f"choose another --out, or continue that run with --resume {out}"
        if (job := self._store.writer_to(out)) is not None:
            raise BadInput(
                "--out",
                expected="a folder of its own",
                got=f"{out}, that of job {job}",
                hint="choose another --out",
            )
        try:
            content = content_of(out)
        except FileNotFoundError:
            content = None
        except OSError as error:
            raise BadInput(
                "--out", expected="a new folder", got=f"{out}: {error.strerror}"
            ) from None
        if content == A_RUN:
            raise BadInput(
                "--out", expected="a new folder", got=f"{out}, which holds {A_RUN}", hint=advice
            )
        if content is not None:
            raise BadInput(
                "--out",
                expected="a new folder",
                got=f"{out} with {content}",
                hint="choose another --out",
            )
        above = next(path for path in (out, *out.parents) if path.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise BadInput(
                "--out",
                expected="a folder that the service can make",
                got=f"{out}, where {above} cannot be written",
                hint="choose another --out",
            )

    def _within(self, label: str, path: Path, sender: Principal, job: str = "") -> None:
        """Raise BadInput for a path that the sender may not name, symbolic links resolved.

        `job` is set for what is written: of all folders of jobs only its own is good for that.
        """
        try:
            target = path_checks.path(label, path).resolve()
        except (OSError, RuntimeError):  # symbolic links in a circle
            raise BadInput(label, expected="a path that leads somewhere", got=path) from None
        jobs = self._store.folder("").resolve()
        if target.is_relative_to(jobs):
            if self._may_use(target.relative_to(jobs).parts[:1], sender, job):
                return
        elif target.is_relative_to(self._uploads.folder.resolve()) and not job:
            return  # who knows the digest of its content may use an upload
        elif not target.is_relative_to(jobs.parent) and (
            not self._confined or any(target.is_relative_to(root) for root in self._roots)
        ):
            return
        roots = ", ".join(map(str, self._roots)) or "a --root of the service"
        exception = ", and not in its home" if target.is_relative_to(jobs.parent) else ""
        raise BadInput(label, expected=f"a path below {roots}{exception}", got=path)

    def _may_use(self, folder: tuple[str, ...], sender: Principal, job: str) -> bool:
        """True if the sender may name a path in this folder of a job, for reading or for `job`."""
        if job or not folder:
            return folder == (job,)
        try:
            return sender.sees(self._store.standing(folder[0])[0])
        except KeyError:
            return False

    def _check_size(self, settings: TrainSettings, project: str) -> None:
        """Raise BadInput for a job that the slots or its project have no place for."""
        if settings.workers > self._slots:
            raise BadInput(
                "--workers",
                expected=f"at most {self._slots}, the slots of the service",
                got=settings.workers,
                hint="start it with a larger downpour serve --slots",
            )
        limits = self._limits().get(project)
        if limits is None:
            return
        if settings.workers > remaining_quota(limits.workers, 0):
            raise BadInput(
                "--workers",
                expected=f"at most {limits.workers}, the limit of project {project}",
                got=settings.workers,
                hint="ask an administrator for more",
            )
        queued = self._store.usage(project).queued
        if remaining_quota(limits.queued, queued) < 1:
            raise BadInput(
                "project",
                expected=f"at most {limits.queued} queued jobs in {project}",
                got=f"{queued} and this one",
                hint="submit again once one has started",
            )


def _check_absolute(label: str, value: object) -> None:
    """Raise BadInput for a path that would be below the service's own working directory."""
    if isinstance(value, str) and not value.startswith("/") and ":/" not in value:
        raise BadInput(
            label,
            expected="an absolute path",
            got=argument_checks.describe_value(value),
            hint="begin it with /, for the service has another working directory",
        )


def _check_input(label: str, path: Path, *, folder_too: bool) -> None:
    """Raise BadInput unless `path` is a file that can be found, or a folder where that is good."""
    kind = "a file or folder" if folder_too else "a file"
    try:
        path.stat()
    except OSError as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        why = "it is missing" if missing else error.strerror
        raise BadInput(label, expected=kind, got=path, hint=why) from None
    if not folder_too and not path.is_file():  # to open a pipe would wait for ever
        why = "it is a folder" if path.is_dir() else "it is no regular file"
        raise BadInput(label, expected=kind, got=path, hint=why)


def _local(label: str, location: str) -> Path | None:
    """The path that a place of snapshots names; None for an object store. Raises BadInput."""
    if location.startswith("file:"):
        return Path(unquote(urlsplit(location).path))
    scheme, separator, _ = location.partition("://")
    if separator and scheme not in _OBJECT_STORES:
        known = ", ".join(sorted(_OBJECT_STORES))
        raise BadInput(label, expected=f"a path, file or one of {known}", got=f"{scheme[:40]}://")
    return None if separator else Path(location)


def _snapshot_of(row: JobRow, choice: str) -> str:
    """The number of a snapshot of a job, by its number or "newest"; raises BadInput.

    A place in an object store that cannot be listed now is asked when the job starts.
    """
    names = [
        snapshot["name"]
        for snapshot in list_complete_snapshots(TrainSettings.of_plain(row.settings))
    ]
    if choice == "newest" and names:
        return str(names[-1])
    remote = "://" in str(row.settings.get("snapshots") or "")
    number = row.snapshot if choice == "newest" else choice
    if remote and not names and number is not None and number.isdecimal():
        return number
    if choice not in names:
        raise BadInput(
            "snapshot",
            expected=f"a snapshot of job {row.id}, which has {', '.join(names) or 'none'}",
            got=choice[:80],
            hint="leave it out to start from the beginning",
        )
    return choice


def _manifest_of(origin: SnapshotRef, text: str) -> Manifest | None:
    """The manifest of the snapshot that a job is to begin with; None if only its logs can say.

    Raises BadInput if there is no such snapshot.
    """
    manifests = {
        entry.name: entry.manifest
        for entry in origin.open().entries()
        if entry.manifest is not None
    }
    if origin.name in manifests:
        return manifests[origin.name]
    numbers = ", ".join(manifests) or "none"
    if origin.name is not None:
        raise BadInput(
            "--resume",
            expected=f"a snapshot of {origin.place}, which has {numbers}",
            got=origin.name,
        )
    if not manifests and not (origin.run is not None and any((origin.run / LOGS).glob("*"))):
        raise BadInput("--resume", expected="a run with a snapshot", got=f"{text}, which has none")
    return list(manifests.values())[-1] if manifests else None


def _check_steps(settings: TrainSettings) -> None:
    """Raise BadInput for a job that nothing gives a number of steps."""
    if settings.max_iter is None and _max_iter_of(settings.solver) == 0:
        raise BadInput(
            "--max-iter",
            expected="at least 1",
            got="none, and 0 or none in the solver",
            hint="give one, or write max_iter there",
        )


def _max_iter_of(solver: Path) -> int | None:
    """The `max_iter` of a solver's file, 0 without one; None if a look at the text cannot tell."""
    if not solver.is_file():
        return None
    try:
        with solver.open(encoding="utf-8") as file:
            text = file.read(_MAX_SOLVER_BYTES)
    except (OSError, UnicodeDecodeError):
        return None
    fields = _TEXT_OR_COMMENT.sub(" ", text)
    if "max_iter" not in fields and len(text) < _MAX_SOLVER_BYTES:
        return 0
    numbers = _MAX_ITER.findall(fields)
    return int(numbers[0]) if len(numbers) == 1 else None


def _check_secrets(settings: TrainSettings) -> None:
    """Raise BadInput for an address with a key in it: settings are shown to all of a project."""
    for name in _ADDRESSES:
        address = getattr(settings, name)
        if address is None:
            continue
        try:
            public = without_secrets(address)
        except BadInput:  # as for http://[
            raise argument_checks.wrong(f"--{name}", "an address", address) from None
        if public != address.rstrip("/") or ";" in address:
            raise BadInput(
                f"--{name}",
                expected="an address without a key in it",
                got="one with",
                hint="give the service the key in its environment",
            )


def _name(text: str) -> str:
    if not 0 < len(text) <= MAX_NAME or not is_plain(text):
        raise BadInput(
            "name", expected=f"1 to {MAX_NAME} printable characters", got=f"{text[:80]!r}"
        )
    return text


def check_project_name(text: str) -> str:
    """A name of a project; raises BadInput."""
    return _check_label("project", text)


def _check_label(label: str, text: str) -> str:
    if not _LABEL.fullmatch(text):
        raise BadInput(label, expected="letters, digits and ._/-, 63 at most", got=f"{text[:80]!r}")
    return text


def _labels(labels: Mapping[str, str]) -> dict[str, str]:
    if len(labels) > _MAX_LABELS:
        raise BadInput("labels", expected=f"at most {_MAX_LABELS}", got=len(labels))
    for name, value in labels.items():
        _check_label("labels", name)
        if len(value) > 200:
            raise BadInput("labels", expected="values of at most 200 characters", got=len(value))
        if not is_plain(value):
            raise BadInput("labels", expected="values of printable characters", got=f"{value!r}")
    return dict(labels)
