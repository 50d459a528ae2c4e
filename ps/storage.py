"""Stores for snapshots: a folder of this machine, or of a store that pyarrow can reach.

A place is named by a path or a URI. A path or `file:/` is a local folder. Local files are written
safely: under a temporary name, flushed, renamed, and the folder flushed. `s3://`, `hdfs://` and
other schemes use `pyarrow.fs`, and only this file imports it. In an object store a rename is a
copy, so a file is written under its own name at once, and a reader may find it half written (HDFS)
or not at all (S3): a reader must know by other means whether a file is complete.

Failures raise OSError; callers add what the file is for.
"""

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import SplitResult, unquote, urlsplit

from ps.whole_files import Flush, flush_to_disk, whole_file
from shards import argument_checks
from shards.errors import BadInput, GiveUp

_LOCAL = "file:/"  # Java's form, a slash less than file:///PATH
_PIECE_BYTES = 4 << 20
_SYNC_FILE_RANGE_WRITE = 2  # from <fcntl.h>: only begin
_MAY_PASS = {errno.EROFS, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE}

Content = Iterable[bytes | bytearray | memoryview]
Place = str | Path


def place_error(label: str, error: OSError) -> GiveUp:
    """The error of a place that cannot be written: BadInput if only another place would help.

    A disk that is full, fails or has become read-only may be mended, and the place then be used.
    """
    kind = GiveUp if error.errno in _MAY_PASS else BadInput
    return kind(f"{label}: {error.strerror or error}")


class OpenFile(Protocol):
    """A file open for reading."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Read into `buffer` as much as is there; returns the number of bytes, 0 at the end."""
        ...


class Store(Protocol):
    """A folder somewhere. Names are of files or folders directly in it; all may raise OSError."""

    @property
    def place(self) -> str:
        """The path or URI for messages, without secrets."""
        ...

    @property
    def address(self) -> str:
        """The path or URI with which another process can open the store.

        A URI includes its key and options: pass it only to processes that read or write here, and
        never print it.
        """
        ...

    def below(self, name: str) -> "Store":
        """The store of a folder in this one, which need not exist."""
        ...

    def names(self) -> list[str]:
        """The names in the folder, sorted; empty if it does not exist."""
        ...

    def folders(self) -> list[str]:
        """Those of the names that are folders, sorted."""
        ...

    def put(self, name: str, content: Content) -> None:
        """Write a file, and create the folder if it is missing.

        On this machine the file is on disk on return, and replaces an earlier one atomically.
        """
        ...

    def take(self, name: str, source: str) -> None:
        """Add a file to this folder as `name`.

        `source` is its path, FOLDER/NAME, relative to this folder's parent. The store avoids
        copying the content if it can. Another user may have written the
        source, so on this machine it must be a regular file and not a link.
        """
        ...

    def settle(self) -> None:
        """Make earlier writes and removals durable: on return they survive a power failure."""
        ...

    def size(self, name: str) -> int:
        """The size of a file in bytes."""
        ...

    def open(self, name: str) -> AbstractContextManager[OpenFile]:
        """Open a file for reading, in a `with` statement."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        ...

    def drop(self) -> None:
        """Remove this folder if it is empty."""
        ...


def open_store(location: Place) -> Store:
    """The store at a path or URI; nothing is created yet. Raises BadInput for an invalid place."""
    if isinstance(location, Path) or not ("://" in location or location.startswith(_LOCAL)):
        return LocalStore(Path(location))
    if location.startswith(_LOCAL):
        parts = _split(location)
        if parts.netloc not in ("", "localhost"):
            raise BadInput(location, expected="file:///PATH", got=f"a host, {parts.netloc}")
        if not parts.path:  # it would be the working directory
            raise BadInput(location, expected="file:///PATH", got="no path")
        return LocalStore(Path(unquote(parts.path)))
    return _reach(location)


def content_of(store: Store, name: str, most: int) -> bytes:
    """The content of a small file; raises BadInput if it exceeds `most` bytes, and OSError."""
    size = store.size(name)
    if size > most:
        raise BadInput(f"expected at most {most} bytes, got {size}")
    content = bytearray(size)
    with store.open(name) as file:
        rest = memoryview(content)
        while rest and (count := file.readinto(rest)):
            rest = rest[count:]
    return bytes(content)


def _reach(uri: str) -> "ArrowStore":
    shown = without_secrets(uri)
    try:
        from pyarrow import fs
    except ImportError:
        raise BadInput(shown, expected="pyarrow to reach it", got="none installed") from None
    try:
        system, path = fs.FileSystem.from_uri(uri)
    except _arrow_errors() as error:  # which may quote the URI
        # If the URI cannot be parsed, as with a slash in the secret, its path contains the key.
        scheme, _, rest = uri.partition("://")
        key, _, host_and_path = rest.rpartition("@")
        text = str(error).replace(uri, shown).replace(f"{key}@", "") if key else str(error)
        shown = without_secrets(f"{scheme}://{host_and_path}")
        raise BadInput(f"{shown}: {_line(text)}") from None
    if not path.strip("/"):
        raise BadInput(shown, expected="a place after ://", got="none")
    return ArrowStore(system, path, shown, uri)


def without_secrets(location: Place) -> str:
    """A path or URI that may be printed: without the key, secret and options of an S3 URI.

    Raises BadInput for an invalid URI.
    """
    if "://" not in str(location):
        return str(location)
    parts = _split(str(location))
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")


def _split(uri: str) -> SplitResult:
    try:
        return urlsplit(uri)
    except ValueError as error:  # such as a bracket without its other half
        raise BadInput(f"{argument_checks.describe_value(uri)}: {error}") from None


def _line(error: BaseException | str) -> str:
    return " ".join(str(error).split())[:300]


class LocalStore:
    """A folder of this machine, or a folder below it.

    A missing root folder is created for its owner only. An existing one keeps its mode, and files
    in it get the mode of the umask, so its owner decides whether to share it.
    """

    def __init__(self, path: Path, root: Path | None = None) -> None:
        """`path` is `root`, or a folder in it."""
        self.path = path
        self._root = root or path

    @property
    def place(self) -> str:
        return str(self.path)

    @property
    def address(self) -> str:
        return str(self.path.absolute())

    def below(self, name: str) -> "LocalStore":
        return LocalStore(self.path / name, self._root)

    def names(self) -> list[str]:
        try:
            return sorted(entry.name for entry in self.path.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def folders(self) -> list[str]:
        return [name for name in self.names() if (self.path / name).is_dir()]

    def put(self, name: str, content: Content) -> None:
        self._make()
        with (
            whole_file(self.path / name, flush=Flush.CONTENT, contended=True) as partial,
            partial.open("wb", buffering=0) as file,
        ):
            written = 0
            for part in content:
                piece = memoryview(part).cast("B")
                _write(file, piece)
                # The disk works while the next part is made, so the flush has less to do.
                begin_flushing(file.fileno(), written, len(piece))
                written += len(piece)

    def take(self, name: str, source: str) -> None:
        self._make()
        origin, target = self.path.parent / source, self.path / name
        target.unlink(missing_ok=True)
        try:
            target.hardlink_to(origin)
        except FileNotFoundError:
            raise
        except OSError:  # not every file system has hard links
            with _open_regular(origin, os.O_NOFOLLOW) as file:
                self.put(name, iter(lambda: file.read(_PIECE_BYTES), b""))
        # Checked here and not at the source, which another user could replace after the check.
        if not stat.S_ISREG(target.lstat().st_mode):
            target.unlink()
            raise _no_file(origin)

    def _make(self) -> None:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.mkdir(parents=True, exist_ok=True)

    def settle(self) -> None:
        for folder in (self.path, self.path.parent):
            flush_to_disk(folder)

    def size(self, name: str) -> int:
        return (self.path / name).stat().st_size

    @contextmanager
    def open(self, name: str) -> Iterator[OpenFile]:
        with _open_regular(self.path / name) as file:
            yield file

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def drop(self) -> None:
        with suppress(OSError):
            self.path.rmdir()


def _open_regular(path: Path, flags: int = 0) -> FileIO:
    """Open a regular file for reading; not a pipe, which could block us for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _no_file(path)
    return FileIO(descriptor, "r")


def _no_file(path: Path) -> OSError:
    return OSError(errno.EINVAL, f"expected {path.name} to be a file, got something else")


def _write(file: Any, content: memoryview) -> None:
    while content:
        content = content[file.write(content) :]


class ArrowStore:
    """A folder of a `pyarrow.fs.FileSystem`."""

    def __init__(self, system: Any, path: str, shown: str, address: str) -> None:
        self._system = system
        self._path = path.rstrip("/")
        self.place = shown
        self.address = address

    def below(self, name: str) -> "ArrowStore":
        folder, mark, options = self.address.partition("?")
        address = f"{folder.rstrip('/')}/{name}{mark}{options}"
        return ArrowStore(self._system, f"{self._path}/{name}", f"{self.place}/{name}", address)

    def names(self) -> list[str]:
        return sorted(info.base_name for info in self._entries())

    def folders(self) -> list[str]:
        return sorted(info.base_name for info in self._entries() if not info.is_file)

    def _entries(self) -> list[Any]:
        from pyarrow import fs

        with _one_line_errors():
            infos = self._system.get_file_info(fs.FileSelector(self._path, allow_not_found=True))
        return list(infos)

    def put(self, name: str, content: Content) -> None:
        with _one_line_errors():
            self._system.create_dir(self._path, recursive=True)
            with self._system.open_output_stream(f"{self._path}/{name}") as file:
                for part in content:
                    file.write(memoryview(part).cast("B"))

    def take(self, name: str, source: str) -> None:
        with _one_line_errors():
            self._system.create_dir(self._path, recursive=True)
            parent = self._path.rpartition("/")[0]
            self._system.copy_file(f"{parent}/{source}", f"{self._path}/{name}")

    def settle(self) -> None:
        """Do nothing: an object store answers a write only when it holds the data."""

    def size(self, name: str) -> int:
        with _one_line_errors():
            info = self._system.get_file_info(f"{self._path}/{name}")
        if info.size is None:
            raise FileNotFoundError(2, "No such file", name)
        return int(info.size)

    @contextmanager
    def open(self, name: str) -> Iterator[OpenFile]:
        with _one_line_errors(), self._system.open_input_stream(f"{self._path}/{name}") as file:
            yield file

    def remove(self, name: str) -> None:
        with _one_line_errors(), suppress(FileNotFoundError):
            self._system.delete_file(f"{self._path}/{name}")

    def drop(self) -> None:
        with suppress(OSError):
            if not self.names():
                self._system.delete_dir(self._path)


def _arrow_errors() -> tuple[type[Exception], ...]:
    """The errors of pyarrow's file systems: some are neither OSErrors nor ValueErrors."""
    from pyarrow import ArrowException

    return OSError, ValueError, ArrowException


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Turn pyarrow's errors into OSError with one line."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(2, "No such file") from None
    except _arrow_errors() as error:
        raise OSError(error.errno if isinstance(error, OSError) else None, _line(error)) from None


def begin_flushing(descriptor: int, at: int, size: int) -> None:
    """Ask the disk to start writing these bytes; errors are left to the sync that follows."""
    begin = _sync_file_range()
    if begin is not None:
        begin(descriptor, at, size, _SYNC_FILE_RANGE_WRITE)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Linux's sync_file_range, which Python does not offer; None elsewhere."""
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError, TypeError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return cast(Callable[[int, int, int, int], int], call)
