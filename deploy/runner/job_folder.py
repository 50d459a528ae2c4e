"""The folder of a job of the training service: its files, and what each holds.

    job.json        who submitted what, written once              service
    settings.json   the settings, as of `downpour train`          service
    orders.jsonl    transitions and orders, numbered, synced      service
    .lock           locked while an attempt is alive              runner
    attempt.json    the attempt under way, or the last            runner
    events.jsonl    what happened, numbered, synced               runner
    readings/       the newest figures and the series, 1 Hz       runner
    outcome.json    how the attempt ended; whole, written last    runner
    logs/           the output of each attempt                    runner
    run/            the run folder, unless settings name another  training

Each file has one writer. The folder is the truth about a job; the service's database is an index.
The runner and the service both import this module, so it imports neither of them, nor Ray, Spark
or Arrow.
"""

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from deploy.run.folder import write_whole
from deploy.run.settings import TrainSettings
from shards.errors import UNDECODABLE, BadInput

JOB = "job.json"
SETTINGS = "settings.json"
ORDERS = "orders.jsonl"
ATTEMPT = "attempt.json"
EVENTS = "events.jsonl"
OUTCOME = "outcome.json"
READINGS = "readings"
NEWEST = "newest.json"
SERIES = "series.jsonl"
ALIVE = "alive"
LOGS = "logs"
RUN = "run"

JOB_VARIABLE = "DOWNPOUR_JOB"
"""In the environment of every process of a job: its id."""
ATTEMPT_VARIABLE = "DOWNPOUR_ATTEMPT"
"""In the environment of every process of an attempt: its nonce."""

T = TypeVar("T")
# Such as `downpour: error: ...`, `MemoryError`, and Ray's `Failed to connect to GCS ...`.
_ERROR = re.compile(r"error\b|exception\b|\b(?:fatal|failed|killed|out of memory)\b", re.IGNORECASE)
_LONGEST_REASON = 400


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A submission of a user, besides the settings.

    `owner` is the name of the token that submitted it; `origin` a snapshot to start from;
    `request_key` the idempotency key of the request.
    """

    id: str
    name: str
    created: float
    project: str = "default"
    owner: str = "local"
    labels: dict[str, str] = {}
    priority: int = 0
    origin: str | None = None
    request_key: str | None = None


class AttemptIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The process of one attempt. A process id alone may be reused, or be of another boot."""

    attempt: int
    nonce: str
    pid: int
    started: float
    boot: str


class End(StrEnum):
    """The end of an attempt, as the runner saw it."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    RETRY = "retry"


class AttemptOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an attempt: `code` names the kind of failure, `snapshot` the newest one."""

    attempt: int
    nonce: str
    end: End
    ended: float
    code: str = ""
    message: str = ""
    snapshot: str | None = None


def save(path: Path, value: msgspec.Struct) -> None:
    """Write a struct as JSON, whole, readable by this user only; raises GiveUp."""
    write_whole(path, msgspec.json.encode(value), private=True)


def load(path: Path, kind: type[T]) -> T | None:
    """Read a file that `save` wrote; None if there is none. Raises BadInput for a damaged one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    except UNDECODABLE:
        raise BadInput(path, expected="what the service wrote there", got="another file") from None


def load_settings(folder: Path) -> TrainSettings:
    """The settings of a job; raises BadInput."""
    return TrainSettings.load(folder / SETTINGS)


def tail_of(path: Path, size: int) -> bytes:
    """The last `size` bytes of a file, cut at a line; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(0, end - size))
            content = file.read(size)
    except OSError:
        return b""
    return content if end <= size else content.partition(b"\n")[2]


def driver_log(folder: Path, attempt: int) -> Path:
    """The file with the output of an attempt's runner."""
    return folder / LOGS / f"driver-{attempt}.log"


def plain(value: msgspec.Struct) -> dict[str, Any]:
    """A struct as JSON values."""
    values: dict[str, Any] = msgspec.to_builtins(value)
    return values


def last_error(lines: Sequence[str]) -> str:
    """The last line of a log that reports an error; empty if none does."""
    reports = [line.strip() for line in lines if _ERROR.search(line)]
    words = reports[-1][:_LONGEST_REASON] if reports else ""
    return "".join(letter if letter.isprintable() else " " for letter in words)
