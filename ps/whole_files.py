"""Files that are replaced whole: readers see the old content or the new one, also after a crash.

The new content is written next to the file under another name, which then becomes the file's own.
How much of that is on the disk on return is the caller's choice: `Flush`.
"""

import enum
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL = ".partial"
"""The end of the name under which a file is written."""


class Flush(enum.Enum):
    """The content that survives a power failure once a file has been replaced."""

    NOTHING = enum.auto()
    """The old content, the new one, or, on some file systems, an empty file."""
    CONTENT = enum.auto()
    """The old content or the new one."""
    NAME = enum.auto()
    """The new content."""


@contextmanager
def whole_file(
    path: Path, *, flush: Flush = Flush.NOTHING, private: bool = False, contended: bool = False
) -> Iterator[Path]:
    """Yield another path to write to; on leaving the block the file there becomes `path`.

    If the block or the replacement fails, `path` holds what it held before. `private`: no other
    user can read the file at any moment. `contended`: several processes may write it at the same
    time; the last one wins, and one that is killed leaves its partial file behind. Raises OSError.
    """
    writer = f".{os.getpid()}" if contended else ""
    partial = path.with_name(f".{path.name}{writer}{PARTIAL}")
    try:
        if private:
            write_private(partial, b"")
        yield partial
        put_in_place(partial, path, flush)
    except BaseException:
        with suppress(OSError):
            partial.unlink()  # frees the space: the disk may be full
        raise


def put_in_place(partial: Path, path: Path, flush: Flush) -> None:
    """Make a file that is written become `path`."""
    if flush is not Flush.NOTHING:
        flush_to_disk(partial)
    partial.replace(path)
    if flush is Flush.NAME:
        flush_to_disk(path.parent)


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only this user can read at any moment."""
    path.touch(mode=0o600)
    path.chmod(0o600)  # it may have existed with another mode
    path.write_bytes(content)


def flush_to_disk(path: Path) -> None:
    """Make a file's content durable, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
