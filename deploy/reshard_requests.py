"""What a run under way is asked for through its folder: another number of shards.

    .reshard-PID-ID.json    the wish, which `downpour reshard` writes and the run takes up
    .reshard-PID-ID.answer  what came of it, which the run writes

PID is the process that writes the run: one that resumes it later has no part in the wish. Whoever
may write into a run's folder owns the run, so nobody is asked who they are. Files appear whole or
not at all.
"""

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from deploy.run_folder import write_whole, writer_of
from deploy.snapshot_ref import SnapshotRef
from shards.errors import UNDECODABLE, BadInput, DownpourError, GiveUp

_LOOK_S = 0.1
_WISH, _TAKEN, _ANSWER = ".json", ".taken", ".answer"
_SUFFIXES = (_WISH, _TAKEN, _ANSWER)
_PREFIX = ".reshard-"


class _Wanted(msgspec.Struct, frozen=True):
    shards: int


class _Answer(msgspec.Struct, frozen=True):
    """What came of it: an empty text is success; `mendable` if the wish is what was wrong."""

    text: str = ""
    mendable: bool = False


class FolderReshardRequest:
    """A wish that was taken up, from the side of the run."""

    def __init__(self, path: Path, shards: int) -> None:
        self._path = path
        self.shards = shards

    def answer(self, error: DownpourError | None) -> None:
        """Tell whoever asked; nothing is lost where the disk refuses, for the run says it, too."""
        told = _Answer() if error is None else _Answer(str(error), isinstance(error, BadInput))
        with suppress(DownpourError):
            write_whole(self._path.with_suffix(_ANSWER), msgspec.json.encode(told))
        self._path.unlink(missing_ok=True)


class ReshardInbox:
    """The wishes that come into the folder of a run; call it for the next one, None for none."""

    def __init__(self, folder: Path) -> None:
        """Made by the process that writes the folder; what an earlier one was asked for goes."""
        self._folder = folder
        self._prefix = _prefix(os.getpid())
        for path in _found(folder, _PREFIX):
            if not path.name.startswith(self._prefix):
                path.unlink(missing_ok=True)

    def __call__(self) -> FolderReshardRequest | None:
        for path in _found(self._folder, self._prefix):
            if path.suffix != _WISH:
                continue
            with suppress(OSError, *UNDECODABLE):  # taken back, or no wish of ours
                wanted = msgspec.json.decode(path.read_bytes(), type=_Wanted)
                return FolderReshardRequest(path.rename(path.with_suffix(_TAKEN)), wanted.shards)
        return None


def resharded(origin: SnapshotRef, shards: int, wait_s: float) -> None:
    """Have the run that writes a folder move to so many shards; returns when it has.

    Raises BadInput where no run is under way, or it cannot have so many; GiveUp with what went
    wrong, when the run ends first, or when nothing is heard of it within `wait_s`.
    """
    if origin.run is None:
        raise BadInput(f"reshard {origin.place}: expected the run folder of a run under way")
    writer = writer_of(origin.run)
    if writer is None:
        raise BadInput(f"reshard {origin.run}: expected a run under way on this machine, got none")
    wish = origin.run / f"{_prefix(writer)}{secrets.token_hex(8)}{_WISH}"
    write_whole(wish, msgspec.json.encode(_Wanted(shards)))
    try:
        answer = _awaited(wish, writer, origin.run, wait_s)
    finally:
        for suffix in (_WISH, _ANSWER):
            wish.with_suffix(suffix).unlink(missing_ok=True)
    if answer.text:
        raise (BadInput if answer.mendable else GiveUp)(answer.text)


def _awaited(wish: Path, writer: int, run: Path, wait_s: float) -> _Answer:
    until = time.monotonic() + wait_s
    while True:
        alive = writer_of(run) == writer  # before the look, for the answer may be its last word
        with suppress(FileNotFoundError):
            return msgspec.json.decode(wish.with_suffix(_ANSWER).read_bytes(), type=_Answer)
        if not alive:
            raise GiveUp(f"reshard {run}: the run ended before it had moved")
        if time.monotonic() > until:
            begun = "it has begun to move" if not wish.exists() else "it has not begun to move"
            raise GiveUp(f"reshard {run}: {begun}, and said no more for {wait_s:g} s")
        time.sleep(_LOOK_S)


def _prefix(writer: int) -> str:
    return f"{_PREFIX}{writer}-"


def _found(folder: Path, prefix: str) -> Iterator[Path]:
    """Wishes and answers, the oldest first."""
    found = (path for path in folder.glob(f"{prefix}*") if path.suffix in _SUFFIXES)
    return iter(sorted(found, key=_age))


def _age(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
