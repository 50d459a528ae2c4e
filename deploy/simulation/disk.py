"""A made-up disk: what a log asks of one (ps/snapshots/log_storage.py), and what deaths leave of
it.

It knows two states of every file and of every name: what its processes see, and what is safe. The
death of a process leaves what was seen, and of a write that it was in the midst of any part. A
failing power leaves what was safe, and of the rest what chance has: a file's end up to any byte,
its sectors in any order, a bit of one flipped, what a file held in a former use; a new name, or the
former one.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from shards.wire_format import Buffer

SECTOR = 128  # small, as the records are
FULL = OSError(28, "No space left on device")


class Died(BaseException):
    """The process ended in the midst of this; nothing may catch it but who plays the process."""


class _SimulatedFile:
    """Bytes as they are seen, written up to `end`, and how many of them are safe.

    `former` is what the file held when it began to be written over.
    """

    def __init__(self) -> None:
        self.seen = bytearray()
        self.former = b""
        self.end = 0
        self.safe = 0

    def begin(self) -> None:
        """Be written over."""
        self.former = bytes(self.seen)
        self.end = self.safe = 0

    def write(self, content: bytes) -> None:
        self.seen[self.end : self.end + len(content)] = content
        self.end += len(content)


class SimulatedDisk:
    """One shard's folder. `full`: nothing more fits; `fuse`: so many operations until death."""

    def __init__(self, where: str, chance: random.Random) -> None:
        self.where = Path(where)
        self.full = False
        self.fuse: int | None = None
        self._chance = chance
        self._files: dict[str, _SimulatedFile] = {}
        self._safe: dict[str, _SimulatedFile] = {}

    # --- what a log asks --------------------------------------------------------------------------

    def names(self) -> list[str]:
        return list(self._files)

    def size(self, name: str) -> int:
        return len(self._files[name].seen)

    def content(self, name: str) -> memoryview:
        """A copy: who reads it keeps views of it."""
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
        """What was cut off is of no record, so it does no harm if it is back."""
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
        """Nobody else wants it."""

    def robbed(self, name: str, size: int) -> "SimulatedDisk":
        """Another disk that holds the same, but of the file `name` only the first `size` bytes."""
        other = SimulatedDisk(str(self.where), self._chance)
        for each, file in self._files.items():
            copy = other._files[each] = _SimulatedFile()
            copy.write(bytes(file.seen[:size] if each == name else file.seen))
        return other

    # --- what befalls it --------------------------------------------------------------------------

    def fail(self) -> None:
        """The power is gone, and comes back: what was not safe is as chance has it."""
        found: dict[str, _SimulatedFile] = {}
        for name in {**self._safe, **self._files}:
            here, there = self._files.get(name), self._safe.get(name)
            file = here if here is there else self._chance.choice((here, there))
            if file is not None:
                found[name] = file
        for file in {id(file): file for file in found.values()}.values():
            self._tear(file)
        self._files, self._safe = found, dict(found)

    def _tear(self, file: _SimulatedFile) -> None:
        """Of what was not safe: the length may be there, and not all of the sectors."""
        chance, former = self._chance, file.former
        least = max(file.safe, min(file.end, len(former)))
        if file.end > least and chance.random() < 0.5:
            del file.seen[chance.randint(least, file.end) :]
        elif len(former) > len(file.seen) and chance.random() < 0.5:
            file.seen += former[len(file.seen) :]  # what was cut off is back
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
        """One more operation, before it is done; the fuse may end here."""
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
    """A file of it, as it is written."""

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


class Errand:
    """Work beside a process, as of a thread: done later, in one piece, unless it dies before."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    def is_alive(self) -> bool:
        return self._work is not None

    def join(self) -> None:
        """Do it, if it is not done."""
        work, self._work = self._work, None
        if work is not None:
            work()
