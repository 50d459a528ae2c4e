"""An append-only file of numbered entries, one JSON object a line.

Each journal has one writer, and an entry is on disk before `append` returns. A reader keeps the
number of the last entry that it has seen, so it can stop and continue at any time. If the writer is
killed amid a line, readers ignore the unfinished line, and the next writer cuts it off.
"""

import errno
import os
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from shards.errors import UNDECODABLE, GiveUp

_MAX_UNWRITTEN = 1000


class Entry(msgspec.Struct, frozen=True):
    """One entry: `time` is in seconds since 1970, `attempt` 0 before the first attempt."""

    number: int
    time: float
    attempt: int
    kind: str
    data: dict[str, Any] = {}


class JournalEnd(msgspec.Struct, frozen=True):
    """Where a journal ended: the size of the file, and the number of its last entry."""

    size: int = 0
    number: int = 0


class Journal:
    """The writing end. Threads may share it."""

    def __init__(self, path: Path, known: JournalEnd | None = None) -> None:
        """Open the file to continue it, or create it; raises GiveUp if the disk fails.

        `known` is the `end` of a writer that had the file before. What follows it is read, and no
        byte before it, so that opening a long journal costs no more than opening a short one.
        """
        self._path = path
        self._lock = threading.Lock()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._end = self._recover_end(known or JournalEnd())
        except OSError as error:
            raise GiveUp(f"{path}: {error.strerror}") from None

    def _recover_end(self, known: JournalEnd) -> JournalEnd:
        """The present end, without a line that a killed writer left unfinished."""
        # A file that is shorter, or has no line that ends there, is not the one that was known.
        if known.size and os.pread(self._file, 1, known.size - 1) != b"\n":
            known = JournalEnd()
        with self._path.open("rb") as file:
            file.seek(known.size)
            entries, whole = _parse(file.read())
        os.ftruncate(self._file, known.size + whole)
        return JournalEnd(known.size + whole, entries[-1].number if entries else known.number)

    @property
    def end(self) -> JournalEnd:
        """Where the journal ends now."""
        return self._end

    def append(self, kind: str, attempt: int, /, **data: Any) -> Entry:
        """Write an entry through to the disk, and return it; raises GiveUp if the disk fails."""
        with self._lock:
            entry = Entry(self._end.number + 1, time.time(), attempt, kind, data)
            line = msgspec.json.encode(entry) + b"\n"
            try:
                if os.write(self._file, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self._file)
            except OSError as error:
                with suppress(OSError):  # the next entry must not continue half a line
                    os.ftruncate(self._file, self._end.size)
                raise GiveUp(f"{self._path}: {error.strerror}") from None
            self._end = JournalEnd(self._end.size + len(line), entry.number)
            return entry

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PatientJournal:
    """Appends the entries of one attempt; a disk that cannot be written delays them, no more.

    Threads may share it. What cannot be written waits, up to `_MAX_UNWRITTEN` entries, and follows
    in order with the next entry, or with `flush`.
    """

    def __init__(self, journal: Journal, attempt: int) -> None:
        self._journal = journal
        self._attempt = attempt
        self._unwritten: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_MAX_UNWRITTEN)
        self._writing = threading.RLock()

    def append(self, kind: str, /, **data: Any) -> None:
        self._unwritten.append((kind, data))
        self.flush()

    def flush(self) -> None:
        """Write the entries that wait, if the disk takes them."""
        with self._writing:
            while self._unwritten:
                kind, data = self._unwritten.popleft()
                try:
                    self._journal.append(kind, self._attempt, **data)
                except GiveUp:
                    self._unwritten.appendleft((kind, data))
                    return


class JournalReader:
    """The reading end: each call of `read` returns the entries since the last one."""

    def __init__(self, path: Path, after: int = 0) -> None:
        self._path = path
        self.after = after
        """The number of the last entry that was read."""
        self._offset = 0

    def read(self) -> list[Entry]:
        """The new entries in order; none while the file is missing."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except OSError:
            return []
        entries, whole = _parse(content)
        self._offset += whole
        fresh = [entry for entry in entries if entry.number > self.after]
        if fresh:
            self.after = fresh[-1].number
        return fresh


def _parse(content: bytes) -> tuple[list[Entry], int]:
    """The entries of complete lines, and how many bytes these lines take."""
    whole = content.rfind(b"\n") + 1
    entries = []
    for line in content[:whole].splitlines():
        try:
            entries.append(msgspec.json.decode(line, type=Entry))
        except UNDECODABLE:  # a damaged line does not hide those after it
            continue
    return entries, whole
