"""Requests to a running job, exchanged as files in its run folder.

    .request-PID-ID.json    the request, written by `downpour reshard` or `downpour set`
    .request-PID-ID.taken   the same file, renamed by the run when it accepts the request
    .request-PID-ID.answer  the result, written by the run

PID is the process that writes the run folder, so a process that resumes the run later ignores
earlier requests. There is no authentication: a user that can write into a run folder owns the run.
Files appear whole or not at all.
"""

import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from deploy.run.folder import write_whole, writer_of
from deploy.run.snapshot_ref import SnapshotRef
from ps.session.admin_plans import SettingsChange
from shards import argument_checks
from shards.errors import UNDECODABLE, BadInput, DownpourError, GiveUp
from shards.live_settings import LIVE, check_factor
from shards.plurals import format_count

_POLL_S = 0.1
_REQUEST, _TAKEN, _ANSWER = ".json", ".taken", ".answer"
_SUFFIXES = (_REQUEST, _TAKEN, _ANSWER)
_PREFIX = ".request-"


class _ToReshard(msgspec.Struct, frozen=True, tag="reshard"):
    shards: int

    def __str__(self) -> str:
        return format_count(self.shards, "shard")


class _ToChange(msgspec.Struct, frozen=True, tag="set"):
    settings: dict[str, Any]

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.settings.items())


class _Answer(msgspec.Struct, frozen=True):
    """The result of a request. An empty text is success.

    `is_bad_input`: the request was wrong.
    """

    text: str = ""
    is_bad_input: bool = False


class _Accepted:
    """A request that the run has accepted, from the run's side."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def answer(self, error: DownpourError | None) -> None:
        """Write the result for the command that asked; `error` None is success."""
        answer = _Answer() if error is None else _Answer(str(error), isinstance(error, BadInput))
        # If the disk is full, nothing is lost: the run reports the result as well.
        with suppress(DownpourError):
            write_whole(self._path.with_suffix(_ANSWER), msgspec.json.encode(answer))
        self._path.unlink(missing_ok=True)


class FolderReshardRequest(_Accepted):
    """A request to reshard the job to `shards` shards."""

    def __init__(self, path: Path, shards: int) -> None:
        super().__init__(path)
        self.shards = shards


class FolderSettingsRequest(_Accepted):
    """A request to change settings of the job."""

    def __init__(self, path: Path, change: SettingsChange) -> None:
        super().__init__(path)
        self.change = change


class RequestInbox:
    """The requests in a run folder. A call returns the next one, or None."""

    def __init__(self, folder: Path) -> None:
        """Create it in the process that writes the folder; requests to earlier processes go."""
        self._folder = folder
        self._prefix = _prefix(os.getpid())
        for path in _list_files(folder, _PREFIX):
            if not path.name.startswith(self._prefix):
                path.unlink(missing_ok=True)

    def __call__(self) -> FolderReshardRequest | FolderSettingsRequest | None:
        for path in _list_files(self._folder, self._prefix):
            if path.suffix != _REQUEST:
                continue
            with suppress(OSError, *UNDECODABLE):  # withdrawn, or not a request
                asked = msgspec.json.decode(path.read_bytes(), type=_ToReshard | _ToChange)
                accepted = path.rename(path.with_suffix(_TAKEN))
                if isinstance(asked, _ToReshard):
                    return FolderReshardRequest(accepted, asked.shards)
                try:
                    return FolderSettingsRequest(accepted, change_of("set", asked.settings))
                except BadInput as error:
                    _Accepted(accepted).answer(error)
        return None


def change_of(subject: str, settings: Mapping[str, Any]) -> SettingsChange:
    """The change of these settings, by name; raises BadInput, naming `subject`, for others."""
    for name in settings:
        if name not in LIVE:
            raise BadInput(
                subject,
                expected=f"{' or '.join(LIVE)}, which may change while a job trains",
                got=name[:80],
            )
    if not settings:
        raise BadInput(subject, expected=" or ".join(LIVE), got="none")
    sets_bound, factor = "staleness" in settings, settings.get("rate_factor")
    return SettingsChange(
        sets_bound,
        argument_checks.staleness_bound("staleness", settings["staleness"]) if sets_bound else None,
        check_factor("rate_factor", factor) if "rate_factor" in settings else None,
    )


def request_reshard(origin: SnapshotRef, shards: int, wait_s: float) -> None:
    """Ask the run that writes a folder to reshard to `shards` shards, and wait for the result.

    Raises BadInput if no run is under way, or if it cannot have this number of shards; GiveUp if
    the resharding fails, the run ends first, or no answer comes within `wait_s` seconds.
    """
    _ask(origin, "reshard", _ToReshard(shards), wait_s)


def request_settings(origin: SnapshotRef, settings: Mapping[str, Any], wait_s: float) -> None:
    """Ask the run that writes a folder to change settings while it trains, and wait for the result.

    Raises BadInput if no run is under way, or if it cannot follow the change; GiveUp if the run
    ends first, or no answer comes within `wait_s` seconds.
    """
    change_of("set", settings)
    _ask(origin, "set", _ToChange(dict(settings)), wait_s)


def _ask(origin: SnapshotRef, subject: str, asked: _ToReshard | _ToChange, wait_s: float) -> None:
    if origin.run is None:
        raise BadInput(f"{subject} {origin.place}", expected="the run folder of a run under way")
    writer = writer_of(origin.run)
    if writer is None:
        raise BadInput(
            f"{subject} {origin.run}", expected="a run under way on this machine", got="none"
        )
    request = origin.run / f"{_prefix(writer)}{secrets.token_hex(8)}{_REQUEST}"
    write_whole(request, msgspec.json.encode(asked))
    try:
        answer = _wait(request, writer, f"{subject} {origin.run}", str(asked), wait_s)
    finally:
        # An unlink of `.json` withdraws a request that the run has not accepted yet.
        for suffix in (_REQUEST, _ANSWER):
            request.with_suffix(suffix).unlink(missing_ok=True)
    if answer.text:
        raise (BadInput if answer.is_bad_input else GiveUp)(answer.text)


def _wait(request: Path, writer: int, subject: str, asked: str, wait_s: float) -> _Answer:
    until, run = time.monotonic() + wait_s, request.parent
    while True:
        # Checked before the answer is read: the run may write the answer and then end.
        alive = writer_of(run) == writer
        with suppress(FileNotFoundError):
            return msgspec.json.decode(request.with_suffix(_ANSWER).read_bytes(), type=_Answer)
        if not alive:
            raise GiveUp(f"{subject}: the run ended before it had {asked}")
        if time.monotonic() > until:
            begun = "has not begun" if request.exists() else "has begun"
            raise GiveUp(
                f"{subject}: the run {begun} to change to {asked}, got no answer in {wait_s:g} s"
            )
        time.sleep(_POLL_S)


def _prefix(writer: int) -> str:
    return f"{_PREFIX}{writer}-"


def _list_files(folder: Path, prefix: str) -> Iterator[Path]:
    """Requests and answers, the oldest first."""
    files = (path for path in folder.glob(f"{prefix}*") if path.suffix in _SUFFIXES)
    return iter(sorted(files, key=_age))


def _age(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
