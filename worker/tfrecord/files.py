"""TFRecord files in a folder: found, opened, read and written, on this machine or in a store.

Places are paths or URIs, as for snapshots: ps/storage.py reaches them.
"""

import zlib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from io import DEFAULT_BUFFER_SIZE, BufferedReader, RawIOBase
from typing import Any, NamedTuple

from ps.storage import OpenFile, open_store
from shards.errors import BadInput
from worker.tfrecord.columns import columns_of
from worker.tfrecord.decode import decode
from worker.tfrecord.encode import encode
from worker.tfrecord.framing import Block, read_blocks
from worker.tfrecord.infer_schema import infer_schema

COMPRESSIONS = {"none": ".tfrecord", "gzip": ".tfrecord.gz"}
"""How a file may be compressed, and the end of its name."""
SUCCESS = "_SUCCESS"
_GZIP_WBITS = 31


class File(NamedTuple):
    """A file: the path or URI of its folder, its name, and its place for messages."""

    folder: str
    name: str
    place: str


def find_files(path: str) -> list[File]:
    """The file at `path`, those of a folder, or those that match `*` in the last part of `path`.

    Names that begin with `_` or `.` are not data. Raises BadInput if there is no file.
    """
    folder, name = _split(path)
    try:
        if "*" in name:
            store = open_store(folder)
            names = [each for each in store.names() if fnmatch(each, name)]
        else:
            store = open_store(path)
            names = _names(store)
            if not names and name in open_store(folder).names():
                store, names = open_store(folder), [name]
    except OSError as error:
        raise BadInput(f"{path}: expected TFRecord files, got {error}") from None
    data = [each for each in names if each[0] not in "_." or each == name]
    if not data:
        raise BadInput(f"{path}: expected TFRecord files, got none there")
    return [File(store.address, each, f"{store.place}/{each}") for each in data]


def read_file(file: File) -> Iterator[Block]:
    """The records of a file in blocks; raises BadInput for anything that is wrong with it."""
    try:
        with open_store(file.folder).open(file.name) as opened:
            yield from read_blocks(BufferedReader(_Raw(opened), DEFAULT_BUFFER_SIZE), file.place)
    except OSError as error:
        raise BadInput(f"{file.place}: expected a file to read, got {error}") from None


def read_batches(file: File, schema: Any) -> Iterator[Any]:
    """The records of a file as Arrow record batches of `schema`; raises BadInput."""
    columns = columns_of(schema)
    for block in read_file(file):
        yield decode(block, columns, schema, file.place)


def schema_of(files: list[File], sample: int) -> Any:
    """The Arrow schema of files by `sample` records, as many of each; raises BadInput."""
    each = -(-sample // len(files))
    return infer_schema(((file.place, read_file(file)) for file in files), each)


def write_file(
    folder: str, name: str, batches: Iterable[Any], schema: Any, compression: str
) -> None:
    """Write Arrow record batches of `schema` as one file; raises BadInput, and OSError."""
    columns = columns_of(schema)
    pieces = (piece for batch in batches for piece in encode(batch, columns))
    open_store(folder).put(name, _gzipped(pieces) if compression == "gzip" else pieces)


def _gzipped(pieces: Iterable[bytes]) -> Iterator[bytes]:
    packer = zlib.compressobj(wbits=_GZIP_WBITS)
    for piece in pieces:
        yield packer.compress(piece)
    yield packer.flush()


def _split(path: str) -> tuple[str, str]:
    """A path's folder, with the options of a URI, and its last part."""
    place, mark, options = path.partition("?") if "://" in path else (path, "", "")
    folder, slash, name = place.rstrip("/").rpartition("/")
    return (folder or slash or ".") + mark + options, name


def _names(store: Any) -> list[str]:
    """The names in a folder; empty if it is a file, where some stores raise."""
    try:
        return list(store.names())
    except OSError:
        return []


class _Raw(RawIOBase):
    """An open file of a store as Python's own readers want it."""

    def __init__(self, file: OpenFile) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        return self._file.readinto(memoryview(buffer))
