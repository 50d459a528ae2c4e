"""Orders to a running job from other processes, exchanged as files in its run folder.

    .order-PID-ID.json    the order, written by a command such as `downpour reshard`
    .order-PID-ID.taken   the same file, renamed by the run when it accepts the order
    .order-PID-ID.answer  the answer, written by the run

PID is the process that writes the run folder, so a process that resumes the run later ignores
earlier orders. There is no authentication: a user that can write into a run folder owns the run.
Files appear whole or not at all.
"""

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from deploy.run.folder import write_whole, writer_of
from deploy.run.snapshot_ref import SnapshotRef
from shards.errors import UNDECODABLE, BadInput, DownpourError, GiveUp
from worker.job.run_control import Order, PendingOrder, SettingsOrder, name_of

_POLL_S = 0.1
_ORDER, _TAKEN, _ANSWER = ".json", ".taken", ".answer"
_SUFFIXES = (_ORDER, _TAKEN, _ANSWER)
_PREFIX = ".order-"


class _Answer(msgspec.Struct, frozen=True):
    """The answer to an order: the result in words, or the error that prevented it."""

    text: str
    failed: bool = False
    is_bad_input: bool = False


class FolderInbox:
    """The orders in a run folder. A call returns the next one, or None."""

    def __init__(self, folder: Path) -> None:
        """Create it in the process that writes the folder; orders to earlier processes go."""
        self._folder = folder
        self._prefix = _prefix(os.getpid())
        for path in _list_files(folder, _PREFIX):
            if not path.name.startswith(self._prefix):
                path.unlink(missing_ok=True)

    def __call__(self) -> PendingOrder | None:
        for path in _list_files(self._folder, self._prefix):
            if path.suffix != _ORDER:
                continue
            with suppress(OSError, *UNDECODABLE):  # withdrawn, or not an order
                order = msgspec.json.decode(path.read_bytes(), type=Order)
                return _accept(path, order)
        return None


def _accept(path: Path, order: Order) -> PendingOrder:
    """Take the order in this file; its answer is written into the same folder. Raises OSError."""
    taken = path.rename(path.with_suffix(_TAKEN))

    def answer(error: DownpourError | None, text: str) -> None:
        content = (
            _Answer(text)
            if error is None
            else _Answer(str(error), failed=True, is_bad_input=isinstance(error, BadInput))
        )
        # If the disk is full, nothing is lost: the run reports the result as well.
        with suppress(DownpourError):
            write_whole(taken.with_suffix(_ANSWER), msgspec.json.encode(content))
        taken.unlink(missing_ok=True)

    return PendingOrder(order, answer)


def ask_run(origin: SnapshotRef, order: Order, wait_s: float) -> str:
    """Give an order to the run that writes a folder; returns the answer, the result in words.

    Raises BadInput if no run is under way, or if it cannot carry out the order; GiveUp if that
    fails, if the run ends first, or if no answer comes within `wait_s` seconds. An order that the
    run has not accepted by then is withdrawn.
    """
    subject = f"{name_of(order)} {origin.run or origin.place}"
    if isinstance(order, SettingsOrder):
        order.check()
    if origin.run is None:
        raise BadInput(subject, expected="the run folder of a run under way")
    writer = writer_of(origin.run)
    if writer is None:
        raise BadInput(subject, expected="a run under way on this machine", got="none")
    file = origin.run / f"{_prefix(writer)}{secrets.token_hex(8)}{_ORDER}"
    write_whole(file, msgspec.json.encode(order))
    try:
        answer = _wait(file, writer, f"{subject}: expected {order}", wait_s)
    finally:
        # An unlink of `.json` withdraws an order that the run has not accepted yet.
        for suffix in (_ORDER, _ANSWER):
            file.with_suffix(suffix).unlink(missing_ok=True)
    if answer.failed:
        raise (BadInput if answer.is_bad_input else GiveUp)(answer.text)
    return answer.text


def _wait(file: Path, writer: int, expected: str, wait_s: float) -> _Answer:
    until, run = time.monotonic() + wait_s, file.parent
    while True:
        # Checked before the answer is read: the run may write the answer and then end.
        alive = writer_of(run) == writer
        with suppress(FileNotFoundError):
            return msgspec.json.decode(file.with_suffix(_ANSWER).read_bytes(), type=_Answer)
        if not alive:
            raise GiveUp(f"{expected}, but the run ended first")
        if time.monotonic() > until:
            state = "had not begun, and will not" if file.exists() else "has begun, and continues"
            raise GiveUp(f"{expected} within {wait_s:g} s, got no answer; the run {state}")
        time.sleep(_POLL_S)


def _prefix(writer: int) -> str:
    return f"{_PREFIX}{writer}-"


def _list_files(folder: Path, prefix: str) -> Iterator[Path]:
    """Orders and answers, the oldest first."""
    files = (path for path in folder.glob(f"{prefix}*") if path.suffix in _SUFFIXES)
    return iter(sorted(files, key=_age))


def _age(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
