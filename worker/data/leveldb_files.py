"""LevelDB databases, read only: the records in the order of their keys.

LevelDB's own library locks a database for one process, and changes its files when it opens them.
This reader does neither: many processes read one database at once, which must not be open for
writing meanwhile. Checksums are checked.

The format: CURRENT names a manifest, a log of edits, which say which tables and which log are
valid. A log consists of blocks of 32 KiB with parts of records; each record of the database's log
is a batch of puts and deletions. A table is sorted, and ends in a footer that points to the index
of its blocks. A block has entries with shared prefixes of keys, and may be packed with Snappy. In
tables a key is followed by 8 bytes, a sequence number and a kind; the highest number counts.
"""

import heapq
from collections.abc import Iterator
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from struct import Struct
from struct import error as struct_error
from typing import NamedTuple

import pyarrow as pa

from shards.errors import BadInput

_BLOCK = 32768
_HEAD = Struct("<IHB")  # checksum, length, kind
_BATCH = Struct("<QI")  # sequence number, number of operations
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_PUT = 1
_FOOTER = 48
_TABLE = 0xDB4775248B80FB57
_MARK = 1024  # the interval in records between two remembered keys
_LARGEST = 1 << 30  # of one unpacked block
_DAMAGED = (struct_error, IndexError, OverflowError, ValueError, pa.ArrowException, OSError)
_UNPACKER = pa.Codec("snappy")

Entry = tuple[bytes, int, bytes | None]
"""A key, minus its sequence number, and a value; None for one that was deleted."""


class _Table(NamedTuple):
    number: int
    smallest: bytes
    largest: bytes


class LevelDbReader:
    """The records of the database in a folder. Opening it counts them, which reads them once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._levels: dict[int, dict[int, _Table]] = {}
        self._log = self._earlier_log = 0
        self._read_manifest()
        self._recent = self._read_logs()
        self._marks: list[bytes] = []
        self.rows = 0
        for key, _ in self._from(b""):
            if self.rows % _MARK == 0:
                self._marks.append(key)
            self.rows += 1

    def records(self, start: int, stop: int) -> Iterator[tuple[bytes, bytes]]:
        """The keys and values of records [start, stop), counted in the order of the keys."""
        if start >= min(stop, self.rows):
            return iter(())
        mark = start // _MARK
        return islice(self._from(self._marks[mark]), start - mark * _MARK, stop - mark * _MARK)

    def _from(self, first: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The records with a key of at least `first`."""
        streams: list[Iterator[Entry]] = [iter(self._recent)]
        for level, tables in self._levels.items():
            matches = [table for table in tables.values() if table.largest >= first]
            matches.sort(key=lambda table: table.smallest)
            # Only tables of level 0 overlap.
            runs = [[table] for table in matches] if level == 0 else [matches]
            streams += [self._run(run, first) for run in runs]
        for key, entries in groupby(heapq.merge(*streams, key=itemgetter(0, 1)), itemgetter(0)):
            value = next(entries)[2]
            if value is not None and key >= first:
                yield key, value

    def _run(self, tables: list[_Table], first: bytes) -> Iterator[Entry]:
        for table in tables:
            yield from self._entries(table, first)

    def _read_manifest(self) -> None:
        name = self._bytes(self.path / "CURRENT").decode(errors="replace").strip()
        if not name.startswith("MANIFEST-") or "/" in name:
            raise BadInput(
                self.path / "CURRENT", expected="the name of a manifest", got=f"{name!r}"
            )
        path = self.path / name
        for number, record in enumerate(self._log_records(path)):
            try:
                self._edit(_Bytes(record))
            except _DAMAGED:
                raise BadInput(f"{path}: record {number}", expected="a whole edit") from None

    def _edit(self, edit: "_Bytes") -> None:
        """Apply one edit of the manifest."""
        while edit.has_more():
            match edit.number():
                case 1:
                    name = edit.text()
                    if name != b"leveldb.BytewiseComparator":
                        raise BadInput(self.path, expected="keys in byte order", got=f"{name!r}")
                case 2:
                    self._log = edit.number()
                case 3 | 4:
                    edit.number()
                case 9:
                    self._earlier_log = edit.number()
                case 5:
                    edit.number()
                    edit.text()
                case 6:
                    level = self._levels.setdefault(edit.number(), {})
                    level.pop(edit.number(), None)
                case 7:
                    level, number = self._levels.setdefault(edit.number(), {}), edit.number()
                    edit.number()  # its size
                    level[number] = _Table(number, edit.text()[:-8], edit.text()[:-8])
                case tag:
                    raise ValueError(tag)

    def _read_logs(self) -> list[Entry]:
        """The newest records, which are in no table yet, sorted."""
        names = {path: int(path.stem) for path in self.path.glob("*.log") if path.stem.isdigit()}
        valid = [p for p, n in names.items() if n >= self._log or n == self._earlier_log]
        newest: dict[bytes, Entry] = {}
        for path in sorted(valid):
            for number, record in enumerate(self._log_records(path)):
                try:
                    newest.update((entry[0], entry) for entry in _operations(record))
                except _DAMAGED:
                    raise BadInput(f"{path}: record {number}", expected="a whole batch") from None
        return sorted(newest.values(), key=itemgetter(0))

    def _log_records(self, path: Path) -> Iterator[bytes]:
        """The records of a log, joined from their parts; a last one that was cut off is dropped."""
        data, offset = self._bytes(path), 0
        parts: list[bytes] = []
        while offset + _HEAD.size <= len(data):
            room = _BLOCK - offset % _BLOCK
            if room < _HEAD.size:
                offset += room
                continue
            check, length, kind = _HEAD.unpack_from(data, offset)
            begin, end = offset + _HEAD.size, offset + _HEAD.size + length
            if kind == 0 and length == 0:  # space that was reserved, and never written
                offset += room
                continue
            if end > len(data):
                return  # the writer was ended in the middle of this part, as LevelDB expects
            if kind > _LAST or _checksum(data[begin - 1 : end]) != check:
                raise BadInput(
                    f"{path}: offset {offset}: the checksum does not match: it is damaged"
                )
            parts = [*parts, data[begin:end]] if kind in {_MIDDLE, _LAST} else [data[begin:end]]
            if kind in {_FULL, _LAST}:
                yield b"".join(parts)
                parts = []
            offset = end

    def _entries(self, table: _Table, first: bytes) -> Iterator[Entry]:
        """The entries of a table, from the block that may hold the key `first` on."""
        path = self.path / f"{table.number:06}.ldb"
        if not path.exists():
            path = path.with_suffix(".sst")
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                file.seek(max(size - _FOOTER, 0))
                footer = _Bytes(file.read(_FOOTER))
                if size < _FOOTER or footer.data[-8:] != _TABLE.to_bytes(8, "little"):
                    raise BadInput(path, expected="a table of LevelDB", got="another file")
                footer.number(), footer.number()  # the index of other things
                where = (footer.number(), footer.number())
                for last, handle in _block(_part(path, file, *where)):
                    if last[:-8] < first:
                        continue
                    at = _Bytes(handle)
                    for key, value in _block(_part(path, file, at.number(), at.number())):
                        order = int.from_bytes(key[-8:], "little")
                        yield key[:-8], -order, value if order & 0xFF == _PUT else None
        except OSError as failure:
            raise BadInput(f"{path}: cannot be read: {failure.strerror or failure}") from None
        except _DAMAGED:
            raise BadInput(path, expected="a whole table of LevelDB: it is damaged") from None

    def _bytes(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as failure:
            raise BadInput(f"{path}: cannot be read: {failure.strerror}") from None


class _Bytes:
    """Numbers of variable length, and texts after their length, one after the other."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.offset = 0

    def has_more(self) -> bool:
        return self.offset < len(self.data)

    def number(self) -> int:
        value = shift = 0
        while True:
            byte = self.data[self.offset]
            self.offset += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    def text(self) -> bytes:
        return self.take(self.number())

    def take(self, size: int) -> bytes:
        if self.offset + size > len(self.data):
            raise IndexError(size)
        self.offset += size
        return self.data[self.offset - size : self.offset]


def _operations(record: bytes) -> Iterator[Entry]:
    """The puts and deletions of one batch of the log."""
    sequence, count = _BATCH.unpack_from(record)
    rest = _Bytes(record)
    rest.offset = _BATCH.size
    for number in range(sequence, sequence + count):
        put = rest.take(1) == b"\x01"
        key = rest.text()
        yield key, -(number << 8 | put), rest.text() if put else None


def _part(path: Path, file: object, offset: int, size: int) -> bytes:
    """A block of a table, unpacked, after a check of its checksum."""
    file.seek(offset)  # type: ignore[attr-defined]
    data: bytes = file.read(size + 5)  # type: ignore[attr-defined]
    if len(data) != size + 5 or _checksum(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise BadInput(f"{path}: offset {offset}: a checksum does not match: it is damaged")
    if data[-5] == 0:
        return data[:size]
    if data[-5] != 1:
        raise BadInput(f"{path}: offset {offset}", expected="no packing, or Snappy's")
    unpacked = _Bytes(data[:10]).number()
    if unpacked > _LARGEST:
        raise BadInput(f"{path}: offset {offset}", expected=f"at most {_LARGEST} bytes a block")
    whole: bytes = _UNPACKER.decompress(data[:size], unpacked).to_pybytes()
    return whole


def _block(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The keys and values of a block."""
    restarts = int.from_bytes(data[-4:], "little")
    end, rest, key = len(data) - 4 * restarts - 4, _Bytes(data), b""
    while rest.offset < end:
        shared, more, size = rest.number(), rest.number(), rest.number()
        key = key[:shared] + rest.take(more)
        if len(key) != shared + more:
            raise IndexError(shared)
        yield key, rest.take(size)


def _checksum(data: bytes) -> int:
    """The masked CRC-32C that LevelDB stores."""
    import google_crc32c

    from worker.tfrecord.framing import mask

    checksum: int = mask(google_crc32c.value(data))
    return checksum


def is_leveldb(path: Path) -> bool:
    """Return whether the folder looks like a database of LevelDB."""
    return (path / "CURRENT").is_file()
