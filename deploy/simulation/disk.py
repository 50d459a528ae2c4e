"""A simulated disk with failures; its interface is ps/wal/log_folder.py.

It keeps two states of every file and every name: the visible one, and the one that is safe because
it was flushed. The death of a process leaves the visible state, with any part of a write that was
in progress. A power failure leaves the safe state, and a random part of the rest: a file may end at
any byte, lack some of its sectors, have a flipped bit or contents from its former use; a name may
be the new or the former one.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from shards.wire_format import Buffer

SECTOR = 128  # small, as the records are
FULL = OSError(28, "No space left on device")


class Died(BaseException):
    """The process ends during this operation. Only the code that simulates the process catches it.

    A BaseException, so that `except Exception` in the code under test does not stop it.
    """


class _SimulatedFile:
    """The visible bytes, written up to `end`, of which the first `safe` ones are flushed.

    `former` is the content before the file began to be overwritten.
    """

    def __init__(self) -> None:
        self.seen = bytearray()
        self.former = b""
        self.end = 0
        self.safe = 0

    def begin(self) -> None:
        """Start to overwrite the file."""
        self.former = bytes(self.seen)
        self.end = self.safe = 0

    def write(self, content: bytes) -> None:
        self.seen[self.end : self.end + len(content)] = content
        self.end += len(content)


class SimulatedDisk:
    """One shard's folder. `full`: the disk is full; `fuse`: the operations left until death."""

    def __init__(self, where: str, chance: random.Random) -> None:
        self.where = Path(where)
        self.full = False
        self.fuse: int | None = None
        self._chance = chance
        self._files: dict[str, _SimulatedFile] = {}
        self._safe: dict[str, _SimulatedFile] = {}

    # --- the interface of a log's storage ---------------------------------------------------------

    def names(self) -> list[str]:
        return list(self._files)

    def size(self, name: str) -> int:
        return len(self._files[name].seen)

    def content(self, name: str) -> memoryview:
        """A copy of the content, because the reader keeps views of it."""
        return memoryview(bytes(self._files[name].seen))

    def create(self, name: str, over: str | None = None) -> "SimulatedFileWriter":
        if over is not None:
            self.rename(over, name)
            self._files[name].begin()
            return SimulatedFileWriter(self, self._files[name])
        self._step()
        if self.full:
            raise FULL
        self._files[name] = _SimulatedFile()
        return SimulatedFileWriter(self, self._files[name])

    def cut(self, name: str, size: int, *, synced: bool) -> None:
        """Truncate a file. The bytes cut off hold no complete record, so they may return."""
        self._step()
        file = self._files[name]
        del file.seen[size:]
        file.end = size
        file.safe = size if synced else min(file.safe, size)
        if synced:
            file.former = file.former[:size]

    def rename(self, name: str, to: str) -> None:
        self._step()
        self._files[to] = self._files.pop(name)

    def remove(self, name: str) -> None:
        self._step()
        del self._files[name]

    def settle(self) -> None:
        self._step()
        self._safe = dict(self._files)

    def close(self) -> None:
        """Do nothing: no other process uses this disk."""

    def copy_truncated(self, name: str, size: int) -> "SimulatedDisk":
        """A copy of this disk with only the first `size` bytes of the file `name`."""
        other = SimulatedDisk(str(self.where), self._chance)
        for file_name, file in self._files.items():
            copy = other._files[file_name] = _SimulatedFile()
            copy.write(bytes(file.seen[:size] if file_name == name else file.seen))
        return other

    # --- failures ---------------------------------------------------------------------------------

    def fail(self) -> None:
        """The power fails and returns: unflushed data is randomly kept, torn or lost."""
        survivors: dict[str, _SimulatedFile] = {}
        for name in {**self._safe, **self._files}:
            current, flushed = self._files.get(name), self._safe.get(name)
            file = current if current is flushed else self._chance.choice((current, flushed))
            if file is not None:
                survivors[name] = file
        for file in {id(file): file for file in survivors.values()}.values():
            self._tear(file)
        self._files, self._safe = survivors, dict(survivors)

    def _tear(self, file: _SimulatedFile) -> None:
        """Damage the unflushed part of a file: its length may be kept, but not all its sectors."""
        chance, former = self._chance, file.former
        least = max(file.safe, min(file.end, len(former)))
        if file.end > least and chance.random() < 0.5:
            del file.seen[chance.randint(least, file.end) :]
        elif len(former) > len(file.seen) and chance.random() < 0.5:
            file.seen += former[len(file.seen) :]  # bytes that were cut off return
        for start in range(file.safe, min(file.end, len(file.seen)), SECTOR):
            stop = min(start + SECTOR, len(file.seen))
            luck = chance.random()
            if luck < 0.1:
                was = former[start:stop]
                file.seen[start:stop] = was + bytes(stop - start - len(was))
            elif luck < 0.2:
                file.seen[chance.randrange(start, stop)] ^= 1 << chance.randrange(8)
        file.former = b""
        file.end = file.safe = len(file.seen)

    def _step(self) -> None:
        """Count an operation before it is done; raises Died if the fuse has run out."""
        if self.fuse is not None:
            if self.fuse == 0:
                self.fuse = None
                raise Died
            self.fuse -= 1

    def _write(self, file: _SimulatedFile, pieces: Sequence[Buffer]) -> int:
        whole = b"".join(bytes(piece) for piece in pieces)
        try:
            self._step()
            if self.full:
                raise FULL
        except BaseException:
            file.write(whole[: self._chance.randint(0, len(whole))])
            raise
        file.write(whole)
        return len(whole)

    def _rewrite(self, file: _SimulatedFile, content: bytes) -> None:
        file.begin()
        self._write(file, [content])

    def _sync(self, file: _SimulatedFile) -> None:
        self._step()
        file.safe = file.end

    def _end(self, file: _SimulatedFile, *, synced: bool) -> None:
        self._step()
        del file.seen[file.end :]
        if synced:
            file.former = file.former[: file.end]


class SimulatedFileWriter:
    """An open file of a simulated disk, for writing."""

    def __init__(self, disk: SimulatedDisk, file: _SimulatedFile) -> None:
        self._disk, self._file = disk, file

    def write(self, pieces: Sequence[Buffer], *, soon: bool) -> int:
        return self._disk._write(self._file, pieces)

    def rewrite(self, content: bytes) -> None:
        self._disk._rewrite(self._file, content)

    def sync(self) -> None:
        self._disk._sync(self._file)

    def end(self, *, synced: bool) -> None:
        self._disk._end(self._file, synced=synced)

    def close(self) -> None:
        pass


class DeferredTask:
    """Background work in place of a thread: done later, in one go, unless its process has died."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    def is_alive(self) -> bool:
        return self._work is not None

    def join(self) -> None:
        """Do the work if it is not done yet."""
        work, self._work = self._work, None
        if work is not None:
            work()
