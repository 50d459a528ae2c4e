"""A shard's log on disk: what must survive is in it before anybody is told (shards/wal_format.py).

Each turn of the server loop is one record, written with one call, and at the level `logged` flushed
with one fdatasync: all messages of a turn, one flush, then all answers. At the level `process` the
page cache holds it, which survives any process, not the kernel. Then the mark says how far the log
is whole, so that a log whose end is gone is told from one that ends there (recovery.py).

A log is a few files, one begun when another is long enough. Once together they have outgrown the
state a few times, the next begins with a base: beside the serving of requests a thread writes the
state at that moment, a version that no longer changes, under a temporary name. Its rename makes
what came before it superfluous.

Superfluous files are not removed, but kept to be written over, as many as the next such turn will
need: their room on the disk is found already, and their pages lie in the page cache. That is why a
log is several files: one would be needed twice, for it is superfluous only when the next has begun.

A write that fails ends the shard, for what the disk then holds is unknown: nothing of the turn is
answered, and the next life begins at the last record that is whole.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ps.durability import Durability
from ps.snapshots.log_storage import LogFileWriter, LogFolder, LogStorage
from ps.wal.recovery import (
    MARK,
    LogFileKind,
    base_name,
    check_spec,
    find_chain,
    kind_of,
    log_name,
    mark_in,
    numbered,
    replay,
    spec_of,
)
from shards import wal_format
from shards.envelopes import Arrival, Outgoing
from shards.errors import GiveUp
from shards.shard import Shard
from shards.wal_format import Entry, LoggedState, Mark, Replay

_TIMES = 4  # the state's size is what a log may grow to,
_LEAST_BYTES = 64 << 20  # but this at least,
_FILES = 4  # in so many files
_SPARES = {LogFileKind.LOG: _FILES + 1, LogFileKind.BASE: 1}
_PARTIAL = ".partial"


class BackgroundTask(Protocol):
    """Something that is being done beside the serving of requests."""

    def is_alive(self) -> bool: ...

    def join(self) -> None: ...


def in_a_thread(work: Callable[[], None]) -> BackgroundTask:
    """Do it beside everything else."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


class WriteAheadLog:
    """The log of one shard in a folder, which is this process's alone until `close`."""

    def __init__(
        self,
        folder: Path | LogStorage,
        durability: Durability,
        least_bytes: int = _LEAST_BYTES,
        aside: Callable[[Callable[[], None]], BackgroundTask] = in_a_thread,
    ) -> None:
        """`aside` writes a base while requests are served.

        Raises BadInput where the folder cannot be had, GiveUp where another process has it.
        """
        self._disk = _owned(folder) if isinstance(folder, Path) else folder
        self._synced = durability is Durability.LOGGED
        self._least_bytes = least_bytes
        self._aside = aside
        self._file: LogFileWriter | None = None
        self._mark: LogFileWriter | None = None
        self._name = ""
        self._number = -1
        self._grown = 0  # all files since the base,
        self._filled = 0  # and the present one
        self._oldest = 0  # the first file that is not superfluous
        self._spares: dict[LogFileKind, list[str]] = {LogFileKind.LOG: [], LogFileKind.BASE: []}
        self._base: BackgroundTask | None = None
        self._failure: GiveUp | None = None

    @property
    def where(self) -> Path:
        """The folder it lies in."""
        return self._disk.where

    @property
    def name(self) -> str:
        """The newest file, which is being written."""
        return self._name

    @property
    def filled(self) -> int:
        """How many bytes of that are records."""
        return self._filled

    def recover(self, shard: Shard, now: float) -> None:
        """Bring an empty shard to where its last life's log ends, and begin this life's.

        Raises BadInput naming the file where it is damaged or another job's.
        """
        self._tidy()
        chain = find_chain(self._disk)
        self._filled = 0
        if chain.logs:
            last = chain.logs[-1]
            check_spec(spec_of(self._disk, last), shard.spec, f"log {self._disk.where / last}")
            size = replay(self._disk, chain, Replay(shard))
            # They may be in the page cache alone: the last record was written and not yet flushed,
            # or a life at `process` flushed nothing. They count from now on, and others follow.
            ends = {name: self._disk.size(name) for name in chain.files if self._synced}
            if size is not None:
                ends[chain.logs[-1]] = size
            for name, end in ends.items():
                self._cut(name, end)
            self._grown = sum(map(self._disk.size, chain.logs))
            self._filled = self._disk.size(last)
            self._spare(chain.first)
        shard.take_over(now)
        self._begin(shard, chain.last + 1, begins=True, now=now)

    def append(self, entry: Entry, frames: wal_format.Frames = ()) -> None:
        """Write a record; when this returns, it survives what the level says."""
        if self._failure is not None:
            raise self._failure
        assert self._file is not None, "it recovers before it is written"
        assert self._mark is not None
        try:
            record = wal_format.encode(entry, frames, number=self._number)
            size = self._file.write(record, soon=self._synced)
            self._grown, self._filled = self._grown + size, self._filled + size
            if self._synced:
                self._file.sync()
            self._mark.rewrite(wal_format.encode_mark(Mark(self._number, self._filled)))
        except OSError as error:
            raise self._refused(self._name, error) from None

    def shorten(self, shard: Shard, now: float) -> None:
        """Begin another file if this one is long enough, and with a base if all of them are."""
        if shard.moving(now) or shard.held.empty:
            return  # it would be in no base, or there is none to write
        slots = len(shard.spec.rule.slot_names)
        limit = max(self._least_bytes, _TIMES * 4 * shard.size * (1 + slots))
        idle = self._base is None or not self._base.is_alive()
        if idle and self._grown >= limit:
            self._begin(shard, self._number + 1, begins=False, now=now)
            for entry, frames in wal_format.carried(shard, now):
                self.append(entry, frames)
            self._grown = 0
            state, held = wal_format.state_of(shard, self._number)
            self._base = self._aside(lambda: self._save(state, held))
        elif self._filled >= limit // _FILES:
            self._begin(shard, self._number + 1, begins=False, now=now)

    def close(self) -> None:
        """Let another have the folder."""
        if self._base is not None:
            self._base.join()
        for file in (self._file, self._mark):
            if file is not None:
                file.close()
        self._file = self._mark = None
        self._disk.close()

    def _tidy(self) -> None:
        """Remove what a former life was about to write."""
        for name in self._disk.names():
            if name.endswith(_PARTIAL):
                self._disk.remove(name)

    def _cut(self, name: str, size: int) -> None:
        try:
            self._disk.cut(name, size, synced=self._synced)
        except OSError as error:
            raise self._refused(name, error) from None

    def _begin(self, shard: Shard, number: int, *, begins: bool, now: float) -> None:
        name, former, after = log_name(number), self._file, self._filled
        try:
            if self._mark is None:
                # In place: a mark that is there holds until the next one is written.
                self._mark = self._disk.create(MARK, MARK if mark_in(self._disk) else None)
            if former is not None:
                former.end(synced=self._synced)
            self._file = self._disk.create(name, self._take_spare(name))
            if former is not None:
                former.close()
            if self._synced:
                self._disk.settle()
        except OSError as error:
            raise self._refused(name, error) from None
        self._name, self._number = name, number
        self._filled = 0
        self.append(wal_format.opening(shard, number, begins=begins, now=now, after=after))

    def _save(self, state: LoggedState, frames: wal_format.Frames) -> None:
        """Write a base, and spare what it makes superfluous; beside everything else."""
        final = base_name(state.number)
        partial = final + _PARTIAL
        try:
            file = self._disk.create(partial, self._take_spare(final))
            try:
                record = wal_format.encode(state, frames, number=state.number)
                file.write(record, soon=self._synced)
                file.end(synced=False)
                if self._synced:
                    file.sync()
            finally:
                file.close()
            self._disk.rename(partial, final)
            if self._synced:
                self._disk.settle()
            self._spare(state.number)
        except OSError as error:
            self._failure = self._refused(final, error)

    def _spare(self, before: int) -> None:
        """Keep what is older than file `before` to be written over, and remove what is too much.

        It may run beside `_begin`: this one only adds names, and that one only takes some.
        """
        for number, name in list(numbered(self._disk)):
            if self._oldest <= number < before:
                kept = self._spares[kind_of(name)]
                if len(kept) < _SPARES[kind_of(name)]:
                    kept.append(name)
                else:
                    self._disk.remove(name)
        self._oldest = before

    def _take_spare(self, name: str) -> str | None:
        """What the file of this name may be written over."""
        kept = self._spares[kind_of(name)]
        return kept.pop() if kept else None

    def _refused(self, name: str, error: OSError) -> GiveUp:
        where = self._disk.where / name
        return GiveUp(f"log {where}: {error.strerror}; what was acknowledged is in it")


class LoggedShard:
    """A shard whose changes are in its log before anybody hears of them; called like a shard."""

    def __init__(self, shard: Shard, to: WriteAheadLog) -> None:
        self._shard = shard
        self._log = to

    def handle_together(self, arrivals: Sequence[Arrival], now: float) -> list[Outgoing]:
        """Answer what has come by the same moment; raises GiveUp when it cannot be written."""
        answers = self._shard.handle_together(arrivals, now)
        turn = wal_format.turn_of(arrivals, answers, now)
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
        self._log.append(wal_format.Expired(now, silent))
        return _awaited(answers)


def _awaited(answers: Sequence[Outgoing]) -> list[Outgoing]:
    """Nobody waits for the answer to a request that was replayed; its sender asks again."""
    return [answer for answer in answers if answer.to]


def _owned(where: Path) -> LogFolder:
    folder = LogFolder(where)
    folder.make()
    folder.lock()
    return folder
