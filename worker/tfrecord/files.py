"""TFRecord files in a folder: found, opened, read and written, on this machine or in a store.

Places are paths or URIs, as for snapshots: ps/storage.py reaches them. A folder may have folders of
`partitionBy` in it, however deep.
"""

import zlib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from io import DEFAULT_BUFFER_SIZE, BufferedReader, RawIOBase
from typing import Any, NamedTuple

import pyarrow as pa

from ps.storage import OpenFile, Store, open_store
from shards.errors import BadInput
from worker.tfrecord.columns import columns_of
from worker.tfrecord.decode import decode
from worker.tfrecord.encode import encode
from worker.tfrecord.framing import Block, begins_record, read_blocks
from worker.tfrecord.infer_schema import infer_schema
from worker.tfrecord.partitions import (
    Partition,
    partition_column,
    partition_fields,
    partition_of,
)

COMPRESSIONS = {"none": ".tfrecord", "gzip": ".tfrecord.gz"}
"""How a file may be compressed, and the end of its name."""
SUCCESS = "_SUCCESS"
_GZIP_WBITS = 31


class File(NamedTuple):
    """A file: the path or URI of its folder, its name, its place for messages, its partition."""

    folder: str
    name: str
    uri: str
    partition: Partition = ()


def find_files(path: str) -> list[File]:
    """The file at `path`, those of a folder, or those that match `*` in the last part of `path`.

    Names that begin with `_` or `.` are not data. Folders such as `day=2020-01-01` are read, too.
    Raises BadInput if there is no file, if there is another folder, and if some files lack a
    partition that others have.
    """
    folder, name = _split(path)
    try:
        if "*" in name:
            store = open_store(folder)
            names = [child for child in store.names() if fnmatch(child, name)]
        else:
            store = open_store(path)
            names = _names(store)
            parent = open_store(folder)
            if not names and name in set(parent.names()).difference(parent.folders()):
                store, names = parent, [name]
        data = [child for child in names if child[0] not in "_." or child == name]
        files = list(_files_in(store, data, ()))
    except OSError as error:
        raise BadInput(path, expected="TFRecord files", got=error) from None
    if not files:
        raise BadInput(path, expected="TFRecord files", got="none there")
    for file in files:
        expected, got = ([key for key, _ in part_file.partition] for part_file in (files[0], file))
        if expected != got:
            raise BadInput(
                path,
                expected="the same folders of partitionBy for all files",
                got=(
                    f"{', '.join(expected) or 'none'} for {files[0].name} and "
                    f"{', '.join(got) or 'none'} for {file.uri}"
                ),
            )
    return files


def _files_in(store: Store, names: list[str], partition: Partition) -> Iterator[File]:
    """The files of these names in a folder, and those in its folders of partitions."""
    folders = set(store.folders())
    for name in names:
        if name not in folders:
            yield File(store.address, name, f"{store.place}/{name}", partition)
            continue
        value = partition_of(name)
        if value is None:
            raise BadInput(
                f"{store.place}/{name}",
                expected="a file, or a folder of partitionBy such as day=2020-01-01",
                got="another folder: read it by its own path",
            )
        inner = store.below(name)
        below = [child for child in inner.names() if child[0] not in "_."]
        yield from _files_in(inner, below, (*partition, value))


def is_tfrecord(store: Store, name: str) -> bool:
    """Return whether a file begins as a raw TFRecord file does; raises OSError."""
    with store.open(name) as opened:
        return begins_record(BufferedReader(_Raw(opened), DEFAULT_BUFFER_SIZE))


def read_file(file: File) -> Iterator[Block]:
    """The records of a file in blocks; raises BadInput for anything that is wrong with it."""
    try:
        with open_store(file.folder).open(file.name) as opened:
            yield from read_blocks(BufferedReader(_Raw(opened), DEFAULT_BUFFER_SIZE), file.uri)
    except OSError as error:
        raise BadInput(file.uri, expected="a file to read", got=error) from None


def read_batches(file: File, schema: Any) -> Iterator[Any]:
    """The records of a file as Arrow record batches of `schema`; raises BadInput."""
    stated = [field for field in schema if field.name in dict(file.partition)]
    features = pa.schema([field for field in schema if field not in stated])
    columns = columns_of(features)
    for block in read_file(file):
        batch = decode(block, columns, features, file.uri)
        if stated:
            rows = len(block.starts)
            arrays = {name: batch[name] for name in features.names}
            for field in stated:
                arrays[field.name] = partition_column(file.partition, field, rows, file.uri)
            batch = pa.record_batch([arrays[name] for name in schema.names], schema=schema)
        yield batch


def schema_of(files: list[File], sample: int) -> Any:
    """The Arrow schema of files by `sample` records, as many of each; raises BadInput.

    The columns of partitions come last; a feature of their name is left out, as Spark does.
    """
    per_file = -(-sample // len(files))
    features = infer_schema(((file.uri, read_file(file)) for file in files), per_file)
    stated = partition_fields([file.partition for file in files])
    names = {field.name for field in stated}
    return pa.schema([*(field for field in features if field.name not in names), *stated])


def write_file(
    folder: str, name: str, batches: Iterable[Any], schema: Any, compression: str
) -> None:
    """Write Arrow record batches of `schema` as one file; raises BadInput, and OSError."""
    columns = columns_of(schema)
    pieces = (piece for batch in batches for piece in encode(batch, columns))
    open_store(folder).put(name, _gzip(pieces) if compression == "gzip" else pieces)


def _gzip(pieces: Iterable[bytes]) -> Iterator[bytes]:
    packer = zlib.compressobj(wbits=_GZIP_WBITS)
    for piece in pieces:
        yield packer.compress(piece)
    yield packer.flush()


def _split(path: str) -> tuple[str, str]:
    """A path's folder, with the options of a URI, and its last part."""
    base, mark, options = path.partition("?") if "://" in path else (path, "", "")
    folder, slash, name = base.rstrip("/").rpartition("/")
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
