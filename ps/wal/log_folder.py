"""The folder of a shard's WAL or autosaves: the interface to a disk, and the real one.

Written data reaches the page cache and survives the process; synced data survives a power failure.
Names need a sync of their own: after a power failure, a file that was created, renamed or removed
may still have its earlier name, unless `settle` has returned.

Failures raise OSError; callers add what the file is for.
"""

import fcntl
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ps.storage import begin_flushing
from ps.whole_files import flush_to_disk
from shards.errors import BadInput, GiveUp
from shards.wire_format import Buffer

_LOCK = "lock"
_LOCK_S = 10.0
_POLL_S = 0.05
_PIECES = 512  # most pieces in one call; systems accept 1024
_SLICE = 4 << 20  # bytes after which the disk is asked to start writing


class LogFileWriter(Protocol):
    """A file that is written from the beginning."""

    def write(self, pieces: Sequence[Buffer], *, soon: bool) -> int:
        """Append all pieces to what was written; returns the number of bytes.

        `soon`: a sync will follow, so the disk may start on the first pieces at once.
        """
        ...

    def rewrite(self, content: bytes) -> None:
        """Overwrite the beginning of the file, which is its whole content, with one call."""
        ...

    def sync(self) -> None:
        """Flush the file: on return its content survives a power failure."""
        ...

    def end(self, *, synced: bool) -> None:
        """Cut off what an earlier use of the file has left; with `synced`, durably.

        If the written data is to be durable, `sync` it first.
        """
        ...

    def close(self) -> None: ...


class LogStorage(Protocol):
    """One folder, locked by its owner. Names are those of files directly in it."""

    @property
    def where(self) -> Path:
        """The path, for messages."""
        ...

    def names(self) -> list[str]:
        """The names in the folder; empty if it does not exist."""
        ...

    def size(self, name: str) -> int:
        """The size of a file in bytes."""
        ...

    def content(self, name: str) -> memoryview:
        """The bytes of a file; they stay valid while referred to."""
        ...

    def create(self, name: str, over: str | None = None) -> LogFileWriter:
        """Open a file for writing, which replaces any of this name.

        The file is empty. With `over` it is that file renamed, for reuse: it is overwritten from
        the beginning, and the rest keeps its old content until `end`. Where the process may open no
        more files, nothing changes.
        """
        ...

    def cut(self, name: str, size: int, *, synced: bool) -> None:
        """Truncate a file to `size` bytes; with `synced`, durably."""
        ...

    def rename(self, name: str, to: str) -> None: ...

    def remove(self, name: str) -> None: ...

    def settle(self) -> None:
        """Make the names durable: on return they survive a power failure."""
        ...

    def close(self) -> None:
        """Unlock the folder."""
        ...


class LogFolder:
    """A folder of this machine; `label` names its content in errors."""

    def __init__(self, where: Path, label: str = "log") -> None:
        self.where = where
        self._label = label
        self._lock = self._names = -1

    def make(self) -> None:
        """Create the folder for its owner only; raises BadInput if that fails."""
        try:
            # Create the parents explicitly: mkdir would give them the default mode.
            for folder in (*reversed(self.where.parents[:2]), self.where):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"{self._label} {self.where}: {error.strerror}") from None

    def lock(self) -> None:
        """Lock the folder; raises BadInput if it is missing, GiveUp if another process has it.

        Waits a while for a process that was just killed and has not released its lock yet.
        """
        until = time.monotonic() + _LOCK_S
        try:
            # The file is never removed: two processes could otherwise lock two files of the same
            # name.
            descriptor = os.open(self.where / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise BadInput(f"{self._label} {self.where}: {error.strerror}") from None
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    os.close(descriptor)
                    raise GiveUp(f"{self._label} {self.where}: another process writes it") from None
                time.sleep(_POLL_S)
            else:
                self._lock = descriptor
                self._names = os.open(self.where, os.O_RDONLY)
                return

    def names(self) -> list[str]:
        return [path.name for path in self.where.glob("*")]

    def size(self, name: str) -> int:
        return (self.where / name).stat().st_size

    def content(self, name: str) -> memoryview:
        """The bytes of a file, mapped from the page cache."""
        with (self.where / name).open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return memoryview(b"")
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        mapped.madvise(mmap.MADV_SEQUENTIAL)
        return memoryview(mapped)

    def create(self, name: str, over: str | None = None) -> LogFileWriter:
        if over is None:
            return _File(self.where / name, empty=True)
        file = _File(self.where / over, empty=False)  # first: it may fail, a renaming hardly does
        self.rename(over, name)
        return file

    def cut(self, name: str, size: int, *, synced: bool) -> None:
        os.truncate(self.where / name, size)
        if synced:
            flush_to_disk(self.where / name)

    def rename(self, name: str, to: str) -> None:
        (self.where / name).rename(self.where / to)

    def remove(self, name: str) -> None:
        (self.where / name).unlink()

    def settle(self) -> None:
        if self._names < 0:
            flush_to_disk(self.where)
        else:  # open since the start, because a busy shard may have no descriptor left
            os.fsync(self._names)

    def close(self) -> None:
        for descriptor in (self._lock, self._names):
            if descriptor >= 0:
                os.close(descriptor)
        self._lock = self._names = -1


class _File:
    def __init__(self, path: Path, *, empty: bool) -> None:
        # An earlier process may have died after creating the file: truncate, do not fail.
        flags = os.O_CREAT | os.O_TRUNC if empty else 0
        self._descriptor = os.open(path, os.O_WRONLY | flags, 0o600)
        self._written = 0

    def write(self, pieces: Sequence[Buffer], *, soon: bool) -> int:
        waiting = [memoryview(piece) for piece in pieces if len(piece)]
        if soon:
            waiting = [
                piece[at : at + _SLICE] for piece in waiting for at in range(0, len(piece), _SLICE)
            ]
        total = sum(map(len, waiting))
        at = self._written
        while waiting:
            together = _slice(waiting) if soon else waiting[:_PIECES]
            # It may write less than it was given, even in the middle of a piece.
            written = os.writev(self._descriptor, together)
            if soon and written < total:
                begin_flushing(self._descriptor, at, written)
            at += written
            while waiting and written >= len(waiting[0]):
                written -= len(waiting.pop(0))
            if written:
                waiting[0] = waiting[0][written:]
        self._written += total
        return total

    def rewrite(self, content: bytes) -> None:
        os.pwrite(self._descriptor, content, 0)

    def sync(self) -> None:
        os.fdatasync(self._descriptor)  # flushes the length, too

    def end(self, *, synced: bool) -> None:
        if os.fstat(self._descriptor).st_size > self._written:
            os.ftruncate(self._descriptor, self._written)
            if synced:
                os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def _slice(pieces: list[memoryview]) -> list[memoryview]:
    """The first pieces, until together they are at least a slice."""
    size = 0
    for number, piece in enumerate(pieces[:_PIECES], start=1):
        size += len(piece)
        if size >= _SLICE:
            return pieces[:number]
    return pieces[:_PIECES]
