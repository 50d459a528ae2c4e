"""A shard's write-ahead log: changes are on disk before they are answered (shards/wal_format.py).

Each turn of the server loop is one record, written with one call. At the durability `logged` it is
flushed with one fdatasync: all messages of a turn, one flush, then all answers. At `process` the
page cache holds it, which survives the process but not the kernel. Then the mark is set to the end
of the record, so that recovery can distinguish a truncated log from a complete one (recovery.py).

The WAL is a few files; when one is long enough, the next is begun. Once all together are a few
times as large as the state, the next one begins with a base: in the background a thread writes the
state at that moment, a version that no longer changes, under a temporary name. Renaming it makes
the files before it obsolete.

Obsolete files are not removed but kept to be written over, as many as the next round will need:
their disk blocks are allocated already, and their pages are in the page cache. That is why the WAL
is several files: a single one becomes obsolete only after the next has begun, too late for reuse.

A shard that may open no more files continues in the present one until it may again. Any other
failed write ends the shard, since the content of the disk is then unknown: no message of the turn
is answered, and the restarted shard resumes at the last complete record.
"""

import errno
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ps.durability import Durability
from ps.wal.log_folder import LogFileWriter, LogFolder, LogStorage
from ps.wal.recovery import (
    MARK,
    LogFileKind,
    base_name,
    check_spec,
    find_chain,
    kind_of,
    list_files,
    log_name,
    mark_in,
    replay,
    spec_of,
)
from shards import wal_format
from shards.errors import GiveUp
from shards.shard import Shard
from shards.transition_io import Arrival, Outgoing
from shards.wal_format import Entry, LoggedState, Mark, Replay

_TIMES = 4  # the WAL may grow to this many times the size of the state,
_MIN_BYTES = 64 << 20  # but at least to this,
_FILES = 4  # divided into this many files
_SPARES = {LogFileKind.LOG: _FILES + 1, LogFileKind.BASE: 1}
_PARTIAL = ".partial"
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)


class BackgroundTask(Protocol):
    """Work that runs in the background while requests are served."""

    def is_alive(self) -> bool: ...

    def join(self) -> None: ...


def in_a_thread(work: Callable[[], None]) -> BackgroundTask:
    """Start `work` in a daemon thread."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


class WriteAheadLog:
    """The WAL of one shard, in a folder that this process has locked until `close`."""

    def __init__(
        self,
        folder: Path | LogStorage,
        durability: Durability,
        min_bytes: int = _MIN_BYTES,
        background: Callable[[Callable[[], None]], BackgroundTask] = in_a_thread,
    ) -> None:
        """`background` runs the writing of a base in the background.

        Raises BadInput if the folder cannot be created or locked, GiveUp if another process has
        locked it.
        """
        self._disk = _open_folder(folder) if isinstance(folder, Path) else folder
        self._synced = durability is Durability.LOGGED
        self._min_bytes = min_bytes
        self._run_in_background = background
        self._file: LogFileWriter | None = None
        self._mark: LogFileWriter | None = None
        self._name = ""
        self._number = -1
        self._grown = 0  # bytes in all files since the base,
        self._filled = 0  # and in the current one
        self._oldest = 0  # the number of the first file that is not obsolete
        self._spares: dict[LogFileKind, list[str]] = {LogFileKind.LOG: [], LogFileKind.BASE: []}
        self._base: BackgroundTask | None = None
        self._owes_base = False  # the last one had no file descriptor
        self._failure: GiveUp | None = None

    @property
    def where(self) -> Path:
        """The folder of the WAL."""
        return self._disk.where

    @property
    def name(self) -> str:
        """The name of the file that is being written."""
        return self._name

    @property
    def record_bytes(self) -> int:
        """The number of bytes of records in that file."""
        return self._filled

    def recover(self, shard: Shard, now: float) -> None:
        """Replay the WAL into an empty shard, and begin the next log file.

        Raises BadInput naming the file if it is damaged or another job's.
        """
        self._tidy()
        chain = find_chain(self._disk)
        self._filled = 0
        if chain.logs:
            last = chain.logs[-1]
            check_spec(spec_of(self._disk, last), shard.spec, f"log {self._disk.where / last}")
            size = replay(self._disk, chain, Replay(shard))
            # Flush the files: the last record may be in the page cache only, and a process with
            # durability `process` has flushed nothing. From now on later records depend on them.
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
        """Write a record; when this returns, it survives what the durability promises."""
        if self._failure is not None:
            # The background thread cannot raise into the server's loop; the next append does it
            # instead.
            raise self._failure
        assert self._file is not None, "call `recover` first"
        assert self._mark is not None
        try:
            record = wal_format.encode(entry, frames, number=self._number)
            size = self._file.write(record, soon=self._synced)
            self._grown, self._filled = self._grown + size, self._filled + size
            if self._synced:
                self._file.sync()
            # After the record, never before: a mark must not claim what the disk may lack.
            self._mark.rewrite(wal_format.encode_mark(Mark(self._number, self._filled)))
        except OSError as error:
            raise self._write_failure(self._name, error) from None

    def shorten(self, shard: Shard, now: float) -> None:
        """Begin the next file if this one is long enough, with a base if all files together are."""
        if shard.moving(now) or shard.parameters.empty:
            return  # a base would not include the resharding, or there is no state to write
        limit = max(self._min_bytes, _TIMES * shard.spec.arrays_bytes)
        idle = self._base is None or not self._base.is_alive()
        long_enough = self._filled >= limit // _FILES
        if idle and (self._grown >= limit or (self._owes_base and long_enough)):
            if not self._begin(shard, self._number + 1, begins=False, now=now):
                return
            for entry, frames in wal_format.waiting_payloads(shard, now):
                self.append(entry, frames)
            self._grown, self._owes_base = 0, False
            # Right after the opening, so that the base equals all the logs before it.
            state, base_frames = wal_format.state_of(shard, self._number)
            self._base = self._run_in_background(lambda: self._save(state, base_frames))
        elif long_enough:
            self._begin(shard, self._number + 1, begins=False, now=now)

    def close(self) -> None:
        """Close the files, and unlock the folder."""
        if self._base is not None:
            self._base.join()
        for file in (self._file, self._mark):
            if file is not None:
                file.close()
        self._file = self._mark = None
        self._disk.close()

    def _tidy(self) -> None:
        """Remove the incomplete base of an earlier process."""
        for name in self._disk.names():
            if name.endswith(_PARTIAL):
                self._disk.remove(name)

    def _cut(self, name: str, size: int) -> None:
        try:
            self._disk.cut(name, size, synced=self._synced)
        except OSError as error:
            raise self._write_failure(name, error) from None

    def _begin(self, shard: Shard, number: int, *, begins: bool, now: float) -> bool:
        """Begin a file; returns False if the former one has to do, for no more may be opened."""
        name, former, after = log_name(number), self._file, self._filled
        try:
            if self._mark is None:
                # In place: an existing mark stays valid until the next one is written.
                self._mark = self._disk.create(MARK, MARK if mark_in(self._disk) else None)
            if former is not None:
                # Before the next log exists, because recovery reads every older log to its very
                # end.
                former.end(synced=self._synced)
            self._file = self._create(name, name)
            if former is not None:
                former.close()
            if self._synced:
                self._disk.settle()
        except OSError as error:
            if former is not None and former is self._file and error.errno in _TOO_MANY_FILES:
                return False
            raise self._write_failure(name, error) from None
        self._name, self._number = name, number
        self._filled = 0
        self.append(wal_format.opening(shard, number, begins=begins, now=now, after=after))
        return True

    def _save(self, state: LoggedState, frames: wal_format.Frames) -> None:
        """Write a base in the background, and keep the files that it makes obsolete for reuse."""
        final = base_name(state.number)
        partial = final + _PARTIAL
        try:
            file = self._create(partial, final)
            try:
                record = wal_format.encode(state, frames, number=state.number)
                file.write(record, soon=self._synced)
                file.end(synced=False)
                if self._synced:
                    file.sync()
            finally:
                file.close()
            # Synced before it is renamed: a power failure must not leave the final name on a part
            # of a base.
            self._disk.rename(partial, final)
            if self._synced:
                self._disk.settle()
            self._spare(state.number)
        except OSError as error:
            if error.errno in _TOO_MANY_FILES:  # the older files remain until the next base
                self._owes_base = True
            else:
                self._failure = self._write_failure(final, error)

    def _spare(self, before: int) -> None:
        """Keep files older than number `before` for reuse, and remove those beyond the limit.

        It may run in parallel with `_begin`: this method only adds names, `_begin` only takes them.
        """
        for number, name in list(list_files(self._disk)):
            if self._oldest <= number < before:
                spares = self._spares[kind_of(name)]
                if len(spares) < _SPARES[kind_of(name)]:
                    spares.append(name)
                else:
                    self._disk.remove(name)
        self._oldest = before

    def _create(self, name: str, final: str) -> LogFileWriter:
        """A file, over an obsolete one if there is any of the kind that `final` says."""
        spares = self._spares[kind_of(final)]
        spare = spares.pop() if spares else None
        try:
            return self._disk.create(name, spare)
        except OSError:
            if spare is not None:
                spares.append(spare)
            raise

    def _write_failure(self, name: str, error: OSError) -> GiveUp:
        where = self._disk.where / name
        text = f"log {where}: {error.strerror}{_room_in_words(self._disk.where, error)}"
        return GiveUp(f"{text}; the log has all acknowledged updates")


class LoggedShard:
    """Wraps a shard: its changes are in the WAL before they are answered."""

    def __init__(self, shard: Shard, to: WriteAheadLog) -> None:
        self._shard = shard
        self._log = to

    def handle_together(self, arrivals: Sequence[Arrival], now: float) -> list[Outgoing]:
        """Answer messages that have come together; raises GiveUp if the WAL cannot be written."""
        answers = self._shard.handle_together(arrivals, now)
        # Before any answer leaves: a change that a client has seen must survive this process.
        turn = wal_format.turn_of(arrivals, answers, now)
        if turn is not None:
            self._log.append(*turn)
            self._log.shorten(self._shard, now)
        return _keep_addressed(answers)

    def tick(self, now: float) -> list[Outgoing]:
        """Expire leases, and log that."""
        due = self._shard.due(now)
        if due is None:
            return []
        answers = self._shard.expire(due.workers, now, due.merges)
        # A tick is logged, because the WAL has no clock to find out by itself what has ended.
        self._log.append(wal_format.Expired(now, due.workers, due.merges))
        return _keep_addressed(answers)


def _keep_addressed(answers: Sequence[Outgoing]) -> list[Outgoing]:
    """The answers with a receiver: a replayed request has none, and its sender will ask again."""
    return [answer for answer in answers if answer.to]


def _room_in_words(folder: Path, error: OSError) -> str:
    """For the error of a full disk: how much of the disk of `folder` is free; else nothing."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    try:
        disk = shutil.disk_usage(folder)
    except OSError:
        return ""
    return f" (the disk of {folder} has {disk.free / 1e6:.1f} of {disk.total / 1e6:.1f} MB free)"


def _open_folder(where: Path) -> LogFolder:
    folder = LogFolder(where)
    folder.make()
    folder.lock()
    return folder
