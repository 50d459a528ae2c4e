"""The folder that a shard's log or its saves lie in: all that they ask of a disk, and the real one.

What is written reaches the page cache, and survives the process; what is synced survives the power.
A name is as safe as its folder: a file that was created, renamed or removed may be under its former
name after a power failure, until `settle` has returned.

Everything that fails raises OSError; whoever knows what the file is for says so.
"""

import ctypes
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol, cast

from shards.errors import BadInput, GiveUp
from shards.wire_format import Buffer

_LOCK = "lock"
_LOCK_S = 10.0
_LOOK_S = 0.05
_PIECES = 512  # a call; systems take 1024
_SLICE = 4 << 20  # bytes that the disk is given to begin with
_SYNC_FILE_RANGE_WRITE = 2  # from <fcntl.h>: only begin


class LogFileWriter(Protocol):
    """A file that is written from its beginning on."""

    def write(self, pieces: Sequence[Buffer], *, soon: bool) -> int:
        """Write all of them behind what is there; how many bytes that was.

        `soon`: a sync follows, for which the disk may begin with the first while the others come.
        """
        ...

    def rewrite(self, content: bytes) -> None:
        """Write a few bytes over its beginning, with one call; they are all of it."""
        ...

    def sync(self) -> None:
        """What is in it survives a power failure once this has returned."""
        ...

    def end(self, *, synced: bool) -> None:
        """Nothing follows what was written, nor anything of a former use; when `synced`, for good.

        What was written must be safe by then, if it is to be.
        """
        ...

    def close(self) -> None: ...


class LogStorage(Protocol):
    """One folder, which its owner has alone. Names are of files directly in it."""

    @property
    def where(self) -> Path:
        """What a person calls it."""
        ...

    def names(self) -> list[str]:
        """What is in it; nothing where it does not exist."""
        ...

    def size(self, name: str) -> int:
        """The bytes of a file."""
        ...

    def content(self, name: str) -> memoryview:
        """A file's bytes; they stay valid while referred to."""
        ...

    def create(self, name: str, over: str | None = None) -> LogFileWriter:
        """A file to write, in the place of any of this name.

        It is empty, or it is the file `over` by another name: written from its beginning on, and
        behind that as it was until it ends.
        """
        ...

    def cut(self, name: str, size: int, *, synced: bool) -> None:
        """Leave a file's first `size` bytes; when `synced`, for good."""
        ...

    def rename(self, name: str, to: str) -> None: ...

    def remove(self, name: str) -> None: ...

    def settle(self) -> None:
        """Names are what they are also after a power failure, once this has returned."""
        ...

    def close(self) -> None:
        """Let another have the folder."""
        ...


class LogFolder:
    """A folder of this machine; `what` is what errors call that which lies there."""

    def __init__(self, where: Path, what: str = "log") -> None:
        self.where = where
        self._what = what
        self._lock = -1

    def make(self) -> None:
        """Make it, for its owner alone; raises BadInput where that cannot be."""
        try:
            # Those above as well: mkdir makes parents with the rights of any folder.
            for own in (*reversed(self.where.parents[:2]), self.where):
                own.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"{self._what} {self.where}: {error.strerror}") from None

    def lock(self) -> None:
        """Have it alone; raises BadInput where it is missing, GiveUp where another has it.

        One who was killed a moment ago may not have let go yet, and is waited for.
        """
        until = time.monotonic() + _LOCK_S
        try:
            descriptor = os.open(self.where / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise BadInput(f"{self._what} {self.where}: {error.strerror}") from None
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    os.close(descriptor)
                    raise GiveUp(f"{self._what} {self.where}: another process writes it") from None
                time.sleep(_LOOK_S)
            else:
                self._lock = descriptor
                return

    def names(self) -> list[str]:
        return [path.name for path in self.where.glob("*")]

    def size(self, name: str) -> int:
        return (self.where / name).stat().st_size

    def content(self, name: str) -> memoryview:
        """They lie in the page cache."""
        with (self.where / name).open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return memoryview(b"")
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        mapped.madvise(mmap.MADV_SEQUENTIAL)
        return memoryview(mapped)

    def create(self, name: str, over: str | None = None) -> LogFileWriter:
        if over is not None:
            self.rename(over, name)
        return _File(self.where / name, empty=over is None)

    def cut(self, name: str, size: int, *, synced: bool) -> None:
        os.truncate(self.where / name, size)
        if synced:
            _flush(self.where / name)

    def rename(self, name: str, to: str) -> None:
        (self.where / name).rename(self.where / to)

    def remove(self, name: str) -> None:
        (self.where / name).unlink()

    def settle(self) -> None:
        _flush(self.where)

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


class _File:
    def __init__(self, path: Path, *, empty: bool) -> None:
        # One that a life created and died before it had written anything may lie there.
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
        os.fdatasync(self._descriptor)  # and its length with it

    def end(self, *, synced: bool) -> None:
        if os.fstat(self._descriptor).st_size > self._written:
            os.ftruncate(self._descriptor, self._written)
            if synced:
                os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def _slice(pieces: list[memoryview]) -> list[memoryview]:
    """The first of them, up to a slice and a little more."""
    size = 0
    for number, piece in enumerate(pieces[:_PIECES], start=1):
        size += len(piece)
        if size >= _SLICE:
            return pieces[:number]
    return pieces[:_PIECES]


def begin_flushing(descriptor: int, at: int, size: int) -> None:
    """Have the disk take these bytes while others are written; whether it could, a sync tells."""
    begin = _sync_file_range()
    if begin is not None:
        begin(descriptor, at, size, _SYNC_FILE_RANGE_WRITE)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Linux's call, which Python has not; None elsewhere."""
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError, TypeError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return cast(Callable[[int, int, int, int], int], call)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
