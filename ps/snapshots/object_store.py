"""Where snapshots are put: a folder of this machine, or of a store that pyarrow reaches.

A place is named by a path or a URI. A path and `file://` are folders here, written with what makes
a local file safe: another name first, flushed, renamed, and the folder flushed. `s3://`, `hdfs://`
and the other schemes are `pyarrow.fs`'s, whose one door this file is. An object store has no
rename that is not a copy, so a file goes there under its own name at once, and may be found half
written (HDFS) or not at all (S3): whoever reads must know by other means whether it is whole.

What fails raises OSError; whoever knows what the file is for says so.
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from ps.snapshots.log_storage import begin_flushing
from shards.errors import BadInput

PARTIAL = ".partial"
_LOCAL = "file"
_PIECE_BYTES = 4 << 20

Content = Iterable[bytes | bytearray | memoryview]
Place = str | Path


class Reader(Protocol):
    """An open file to read."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill as much of `buffer` as there is; returns how many bytes."""
        ...


class Store(Protocol):
    """A folder somewhere. Names are of files or folders directly in it; all may raise OSError."""

    @property
    def place(self) -> str:
        """What a person calls it: a path or a URI, without secrets."""
        ...

    @property
    def address(self) -> str:
        """What opens it again in another process. A URI comes with its key and options: it is told
        to those who are to read or write here, and shown to nobody."""
        ...

    def below(self, name: str) -> "Store":
        """A folder in this one, which need not exist."""
        ...

    def names(self) -> list[str]:
        """What is in it, sorted; nothing where it does not exist."""
        ...

    def put(self, name: str, content: Content) -> None:
        """Write a file, making the folder where it is missing.

        Here, it is on disk when this returns, and a file of that name is replaced at one moment.
        """
        ...

    def take(self, name: str, source: str) -> None:
        """Have the file `source`, its folder's and its name below this folder's parent, here too.

        It need not be read for that where the store can do without. Another user may have put it
        there, so here it must be a file itself, and no link to one.
        """
        ...

    def settle(self) -> None:
        """What was put, renamed or removed survives a power failure once this has returned."""
        ...

    def size(self, name: str) -> int:
        """The bytes of a file."""
        ...

    def open(self, name: str) -> AbstractContextManager[Reader]:
        """A file to read, in a `with`."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        ...

    def drop(self) -> None:
        """Remove this folder if nothing is left in it."""
        ...


def open_store(place: Place) -> Store:
    """The store at a path or URI; nothing is made yet. Raises BadInput for what names none."""
    scheme, separator, _ = str(place).partition("://")
    if isinstance(place, Path) or not separator:
        return LocalStore(Path(place))
    if scheme == _LOCAL:
        parts = urlsplit(str(place))
        if parts.netloc not in ("", "localhost"):
            raise BadInput(f"{place}: expected file:///PATH, got a host, {parts.netloc}")
        return LocalStore(Path(unquote(parts.path)))
    return _reach(str(place))


def content_of(store: Store, name: str, most: int) -> bytes:
    """A small file; raises BadInput when it has more than `most` bytes, and OSError."""
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
        raise BadInput(f"{shown}: expected pyarrow to reach it, got none installed") from None
    try:
        system, path = fs.FileSystem.from_uri(uri)
    except (OSError, ValueError) as error:  # pyarrow's own are of these, and may quote the URI
        # In one that cannot be parsed, a secret with a slash in it say, the path has the key.
        scheme, _, rest = uri.partition("://")
        key, _, place = rest.rpartition("@")
        said = str(error).replace(uri, shown).replace(f"{key}@", "") if key else str(error)
        shown = without_secrets(f"{scheme}://{place}")
        raise BadInput(f"{shown}: {_line(said)}") from None
    return ArrowStore(system, path, shown, uri)


def without_secrets(place: Place) -> str:
    """A path or URI as it may be shown: an S3 URI may carry a key and its secret, and options."""
    if "://" not in str(place):
        return str(place)
    parts = urlsplit(str(place))
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")


def _line(error: BaseException | str) -> str:
    return " ".join(str(error).split())[:300]


class LocalStore:
    """A folder of this machine, or one below it.

    Where that folder does not exist it is made for its owner alone. One that exists keeps its mode,
    and what is in it is as readable as the umask has it: so a person shares it or does not.
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

    def put(self, name: str, content: Content) -> None:
        self._make()
        temporary = self.path / f".{name}.{os.getpid()}{PARTIAL}"
        try:
            with temporary.open("wb", buffering=0) as file:
                written = 0
                for part in content:
                    piece = memoryview(part).cast("B")
                    _write(file, piece)
                    # The disk works while the next is made, and the flush waits for the rest only.
                    begin_flushing(file.fileno(), written, len(piece))
                    written += len(piece)
                os.fsync(file.fileno())
            temporary.replace(self.path / name)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise

    def take(self, name: str, source: str) -> None:
        self._make()
        theirs, own = self.path.parent / source, self.path / name
        own.unlink(missing_ok=True)
        try:
            own.hardlink_to(theirs)
        except FileNotFoundError:
            raise
        except OSError:  # not every file system has them
            with _opened(theirs, os.O_NOFOLLOW) as file:
                self.put(name, iter(lambda: file.read(_PIECE_BYTES), b""))
        # Looked at here, where nobody can change any more what it is.
        if not stat.S_ISREG(own.lstat().st_mode):
            own.unlink()
            raise _no_file(theirs)

    def _make(self) -> None:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.mkdir(parents=True, exist_ok=True)

    def settle(self) -> None:
        for folder in (self.path, self.path.parent):
            flush(folder)

    def size(self, name: str) -> int:
        return (self.path / name).stat().st_size

    @contextmanager
    def open(self, name: str) -> Iterator[Reader]:
        with _opened(self.path / name) as file:
            yield file

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def drop(self) -> None:
        with suppress(OSError):
            self.path.rmdir()


def _opened(path: Path, flags: int = 0) -> FileIO:
    """A file to read; a pipe, whose writer could have us wait for ever, is none."""
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


def flush(folder: Path) -> None:
    """Have the names in a folder survive the power's failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ArrowStore:
    """A folder of a `pyarrow.fs.FileSystem`."""

    def __init__(self, system: Any, path: str, place: str, address: str) -> None:
        self._system = system
        self._path = path.rstrip("/")
        self.place = place
        self.address = address

    def below(self, name: str) -> "ArrowStore":
        folder, mark, options = self.address.partition("?")
        address = f"{folder.rstrip('/')}/{name}{mark}{options}"
        return ArrowStore(self._system, f"{self._path}/{name}", f"{self.place}/{name}", address)

    def names(self) -> list[str]:
        from pyarrow import fs

        with _told():
            found = self._system.get_file_info(fs.FileSelector(self._path, allow_not_found=True))
        return sorted(info.base_name for info in found)

    def put(self, name: str, content: Content) -> None:
        with _told():
            self._system.create_dir(self._path, recursive=True)
            with self._system.open_output_stream(f"{self._path}/{name}") as file:
                for part in content:
                    file.write(memoryview(part).cast("B"))

    def take(self, name: str, source: str) -> None:
        with _told():
            self._system.create_dir(self._path, recursive=True)
            parent = self._path.rpartition("/")[0]
            self._system.copy_file(f"{parent}/{source}", f"{self._path}/{name}")

    def settle(self) -> None:
        """An object store answers once it holds what it was given."""

    def size(self, name: str) -> int:
        with _told():
            info = self._system.get_file_info(f"{self._path}/{name}")
        if info.size is None:
            raise FileNotFoundError(2, "No such file", name)
        return int(info.size)

    @contextmanager
    def open(self, name: str) -> Iterator[Reader]:
        with _told(), self._system.open_input_stream(f"{self._path}/{name}") as file:
            yield file

    def remove(self, name: str) -> None:
        with _told(), suppress(FileNotFoundError):
            self._system.delete_file(f"{self._path}/{name}")

    def drop(self) -> None:
        with suppress(OSError):
            if not self.names():
                self._system.delete_dir(self._path)


@contextmanager
def _told() -> Iterator[None]:
    """pyarrow's errors as OSError in one line."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(2, "No such file") from None
    except (OSError, ValueError) as error:
        raise OSError(error.errno if isinstance(error, OSError) else None, _line(error)) from None
