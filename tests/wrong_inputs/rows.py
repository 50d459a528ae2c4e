"""A wrong input, and what it must end in: one line of ours that names what is wrong.

Nothing may be left behind: no thread, process, file descriptor (sockets and shared memory have
one), or file in the working folder or among the temporary files.
"""

import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shards.errors import DownpourError

MOST_S = 10.0
_SETTLE_S = 120.0  # ZeroMQ closes sockets in a thread of its own
_LONGEST = 500  # characters


class Row(NamedTuple):
    """`act` is to raise an error of ours whose text matches `names`, in one line."""

    kind: str
    title: str
    act: Callable[[], object]
    names: str


class Left(NamedTuple):
    """What a process has that a wrong input may not add to."""

    threads: int
    children: frozenset[str]
    descriptors: int
    files: frozenset[str]

    @classmethod
    def now(cls, folder: Path) -> "Left":
        """What there is, with the files below `folder`."""
        # By plain calls of the system: it is asked twice a row, and a row takes a millisecond.
        files = frozenset(
            f"{parent}/{name}"
            for parent, folders, names in os.walk(folder)
            for name in (*folders, *names)
        )
        own = Path("/proc/self")
        children = frozenset[str]()
        for task in (own / "task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                children |= frozenset(_read(f"{task}/children").split())
        descriptors = len(list((own / "fd").iterdir()))
        return cls(threading.active_count(), children, descriptors, files)

    def grown(self, before: "Left") -> str:
        """What is there now and was not before, in words."""
        return "; ".join(
            text
            for more, text in (
                (self.threads > before.threads, f"{self.threads - before.threads} threads"),
                (self.children - before.children, "child processes"),
                (
                    self.descriptors > before.descriptors,
                    f"{self.descriptors - before.descriptors} file descriptors",
                ),
                (self.files - before.files, f"files {sorted(self.files - before.files)}"),
            )
            if more
        )


def _read(path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 16).decode()
    finally:
        os.close(descriptor)


def fault_of(row: Row, folder: Path) -> str:
    """What is wrong with how a row ends; empty where nothing is.

    The time in which other processes had every core does not count.
    """
    before, started, late = Left.now(folder), time.monotonic(), _waited_for_a_core_s()
    complaint = _complaint(row)
    took = time.monotonic() - started - (_waited_for_a_core_s() - late)
    if not complaint and took > MOST_S:
        complaint = f"took {took:.1f} s"
    return complaint or _left_behind(before, folder)


def _waited_for_a_core_s() -> float:
    """How long this thread has been ready to run and was not running; 0 where Linux counts none."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def _complaint(row: Row) -> str:
    try:
        result = row.act()
    except DownpourError as error:
        text = str(error)
        if "\n" in text or len(text) > _LONGEST or "Traceback" in text:
            return f"not one short line: {text[:200]!r}"
        return "" if re.search(row.names, text) else f"does not name {row.names!r}: {text}"
    except BaseException as error:  # noqa: BLE001  # whatever it is, it is the finding
        return f"{type(error).__name__}: {error}"
    return f"accepted: {str(result)[:80]}"


def _left_behind(before: Left, folder: Path) -> str:
    until = time.monotonic() + _SETTLE_S
    while grown := Left.now(folder).grown(before):
        if time.monotonic() > until:
            return f"left behind: {grown}"
        time.sleep(0.01)
    return ""
