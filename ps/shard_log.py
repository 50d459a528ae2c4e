"""A shard's log on disk: what must survive is in it before anybody is told (shards/log.py).

Each turn of the server loop is one record, written with one call, and at the level `logged` flushed
with one fdatasync: all messages of a turn, one flush, then all answers. At the level `process` the
page cache holds it, which survives any process, not the kernel.

A log that has outgrown the state a few times is left, and another one begun; beside the serving of
requests a thread then writes the state at that moment, a version that no longer changes, under a
temporary name. Its rename makes what came before it superfluous.

A write that fails ends the shard, for what the disk then holds is unknown: nothing of the turn is
answered, and the next life begins at the last record that is whole.
"""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from ps.durability import Durability
from ps.log_files import base_path, find_chain, lock_folder, log_path, numbered, replay, spec_of
from shards import log
from shards.codec import Buffer
from shards.errors import BadInput, GiveUp
from shards.log import Entry, Replay, State
from shards.shard import Arrival, Outgoing, Shard
from shards.spec import ShardSpec

_TIMES = 4  # the state's size is what a log may grow to,
_LEAST_BYTES = 64 << 20  # but this at least
_PIECES = 512  # a call; systems take 1024
_PARTIAL = ".partial"


class ShardLog:
    """The log of one shard in `folder`, which is this process's alone until `close`."""

    def __init__(
        self, folder: Path, durability: Durability, least_bytes: int = _LEAST_BYTES
    ) -> None:
        """Raises BadInput where the folder cannot be had, GiveUp where another process has it."""
        self.folder = folder
        self._synced = durability is Durability.LOGGED
        self._least_bytes = least_bytes
        try:
            # The job's id, which is a secret, is the name of the folder above.
            for own in (*reversed(folder.parents[:2]), folder):
                own.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"log {folder}: {error.strerror}") from None
        self._lock = lock_folder(folder)
        self._path = folder
        self._file = -1
        self._number = -1
        self._grown = 0
        self._base: threading.Thread | None = None
        self._failure: GiveUp | None = None

    def recover(self, shard: Shard, now: float) -> None:
        """Bring an empty shard to where its last life's log ends, and begin this life's.

        Raises BadInput naming the file where it is damaged or another job's.
        """
        self._tidy()
        chain = find_chain(self.folder)
        if chain.logs:
            self._check(chain.logs[-1], shard.spec)
            size = replay(chain, Replay(shard))
            if size is not None:
                self._cut(chain.logs[-1], size)
            self._grown = chain.log_bytes
        shard.take_over(now)
        self._begin(shard, chain.last + 1, begins=True, now=now)

    def append(self, entry: Entry, frames: log.Frames = ()) -> None:
        """Write a record; when this returns, it survives what the level says."""
        if self._failure is not None:
            raise self._failure
        try:
            self._grown += _write(self._file, log.encode(entry, frames))
            if self._synced:
                os.fdatasync(self._file)
        except OSError as error:
            raise _refused(self._path, error) from None

    def shorten(self, shard: Shard, now: float) -> None:
        """Begin another file and write the state beside it, if the log is long enough for that."""
        if shard.moving(now):
            return
        slots = len(shard.spec.rule.slot_names)
        if self._grown < max(self._least_bytes, _TIMES * 4 * shard.size * (1 + slots)):
            return
        if self._base is not None and self._base.is_alive():
            return
        self._begin(shard, self._number + 1, begins=False, now=now)
        for entry, frames in log.carried(shard, now):
            self.append(entry, frames)
        self._grown = 0
        state, held = log.state_of(shard, self._number)
        self._base = threading.Thread(target=self._save, args=(state, held), daemon=True)
        self._base.start()

    def close(self) -> None:
        """Let another have the folder."""
        if self._base is not None:
            self._base.join()
        for descriptor in (self._file, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._lock = -1

    def _check(self, path: Path, spec: ShardSpec) -> None:
        theirs = spec_of(path)
        if log.encode_spec(theirs) == log.encode_spec(spec):
            return
        for what in ("job", "shard", "build"):
            expected, got = getattr(spec, what), getattr(theirs, what)
            if expected != got:
                raise BadInput(f"log {path}: expected {what} {expected}, got {got}'s")
        raise BadInput(f"log {path}: its shard was told otherwise than this one (rule, map, ...)")

    def _tidy(self) -> None:
        """Remove what a former life was about to write."""
        for path in self.folder.glob(f"*{_PARTIAL}"):
            path.unlink()

    def _cut(self, path: Path, size: int) -> None:
        try:
            os.truncate(path, size)
            if self._synced:
                _flush(path)
        except OSError as error:
            raise _refused(path, error) from None

    def _begin(self, shard: Shard, number: int, *, begins: bool, now: float) -> None:
        self._path, self._number = log_path(self.folder, number), number
        former = self._file
        try:
            # One that a life created and died before it had written anything may lie there.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            self._file = os.open(self._path, flags, 0o600)
            if former >= 0:
                os.close(former)
            if self._synced:
                _flush(self.folder)
        except OSError as error:
            raise _refused(self._path, error) from None
        self.append(log.opening(shard, number, begins=begins, now=now))

    def _save(self, state: State, frames: log.Frames) -> None:
        """Write a base, and remove what it makes superfluous; in a thread of its own."""
        final = base_path(self.folder, state.number)
        partial = final.with_name(final.name + _PARTIAL)
        try:
            file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                _write(file, log.encode(state, frames))
                if self._synced:
                    os.fsync(file)
            finally:
                os.close(file)
            partial.rename(final)
            if self._synced:
                _flush(self.folder)
            for number, path in list(numbered(self.folder)):
                if number < state.number:
                    path.unlink()
        except OSError as error:
            self._failure = _refused(final, error)


class Logged:
    """A shard whose changes are in its log before anybody hears of them; called like a shard."""

    def __init__(self, shard: Shard, to: ShardLog) -> None:
        self._shard = shard
        self._log = to

    def handle_together(self, arrivals: Sequence[Arrival], now: float) -> list[Outgoing]:
        """Answer what has come by the same moment; raises GiveUp when it cannot be written."""
        answers = self._shard.handle_together(arrivals, now)
        turn = log.turn_of(arrivals, answers, now)
        if turn is not None:
            self._log.append(*turn)
            self._log.shorten(self._shard, now)
        return _awaited(answers)

    def tick(self, now: float) -> list[Outgoing]:
        """Let leases run out."""
        silent = self._shard.ledger.silent(now)
        if not silent:
            return []
        answers = self._shard.expire(silent, now)
        self._log.append(log.Expired(now, silent))
        return _awaited(answers)


def _awaited(answers: Sequence[Outgoing]) -> list[Outgoing]:
    """Nobody waits for the answer to a request that was replayed; its sender asks again."""
    return [answer for answer in answers if answer.to]


def _write(file: int, pieces: Sequence[Buffer]) -> int:
    """Write all of them; how many bytes that was."""
    waiting = [memoryview(piece) for piece in pieces if len(piece)]
    total = sum(map(len, waiting))
    while waiting:
        written = os.writev(file, waiting[:_PIECES])
        while waiting and written >= len(waiting[0]):
            written -= len(waiting.pop(0))
        if written:
            waiting[0] = waiting[0][written:]
    return total


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refused(path: Path, error: OSError) -> GiveUp:
    return GiveUp(f"log {path}: {error.strerror}; what was acknowledged is in it")
