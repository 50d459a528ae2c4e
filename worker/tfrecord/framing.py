"""The framing of TFRecord files: a length, its checksum, a record, its checksum.

    length uint64 | masked CRC-32C of the length uint32 | record | masked CRC-32C of it uint32

All numbers are little-endian. The mask turns a checksum by 15 bits and adds a constant, so that the
checksum of data that contains checksums stays sound. A file may be compressed as a whole by gzip,
or by zlib, in one member or in several.

Every checksum is compared, so a flipped bit anywhere in a file is found. A file that ends between
two records is whole as far as the format knows.
"""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from io import BufferedReader, RawIOBase
from struct import Struct
from typing import IO, Any, NamedTuple, cast

import numpy as np
from google_crc32c import value as crc32c
from numpy.typing import NDArray

from shards.errors import BadInput
from worker.tfrecord.wire import gather

BLOCK_BYTES = 4 << 20
_LENGTH, _CRC = Struct("<Q"), Struct("<I")
_HEADER_BYTES, _FOOTER_BYTES = 12, 4
_LONGEST = (1 << 31) - 1  # the largest message of protobuf
_FORMS = "TFRecord file, raw or compressed by gzip or ZLIB"
_GZIP = b"\x1f\x8b"
_ZLIB = 0x78
_OTHERS = {
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"\x04\x22\x4d\x18": "LZ4",
    b"\xfd7zXZ": "xz",
    b"\xff\x06\x00\x00sNaPpY": "Snappy",
    b"PK\x03\x04": "zip",
    b"PAR1": "Parquet",
    b"ORC": "ORC",
    b"Obj\x01": "Avro",
}
"""The first bytes of files that are not read, and what they are."""
_PIECE_BYTES = 1 << 16


class Block(NamedTuple):
    """Consecutive records of a file: `data[starts[i]:ends[i]]` is record `first + i`."""

    first: int
    data: bytes
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


def mask(crc: Any) -> Any:
    """The checksum as it is stored; `crc` is a number, or an array of uint64."""
    return ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF


def read_blocks(stream: BufferedReader, where: str) -> Iterator[Block]:
    """The records of a file, raw or compressed, in blocks of about 4 MiB.

    Errors are a BadInput that names the file `where` and the record, numbered from 0.
    """
    number, rest, missing = 0, b"", 0
    source, packing = _decompress(stream, where)
    while True:
        try:
            piece = source.read(max(BLOCK_BYTES, missing))
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise BadInput(
                f"{where}: record {number}: expected whole {packing} data, got: {error}"
            ) from None
        rest += piece
        block, end, missing = _scan(rest, number, where)
        if len(block.starts):
            yield block
        number, rest = number + len(block.starts), rest[end:]
        if not piece:
            break
    if rest:
        raise BadInput(
            f"{where}: record {number}",
            expected=f"{len(rest) + missing} bytes with length and checksums",
            got=f"{len(rest)}: the file is truncated{'' if number else f', or no {_FORMS}'}",
        )


def begins_record(stream: BufferedReader) -> bool:
    """Return whether a length and its checksum come next in a stream; nothing is consumed."""
    start = stream.peek(_HEADER_BYTES)[:_HEADER_BYTES]
    return len(start) == _HEADER_BYTES and start == _header(_LENGTH.unpack_from(start)[0])


def frames(records: Iterable[bytes]) -> bytes:
    """Records with their lengths and checksums, as they stand in a file."""
    pieces: list[bytes] = []
    for record in records:
        pieces += (_header(len(record)), record, _CRC.pack(mask(crc32c(record))))
    return b"".join(pieces)


def _decompress(stream: BufferedReader, where: str) -> tuple[IO[bytes] | BufferedReader, str]:
    """The stream of records, and how the file is compressed, known by its first bytes.

    A raw file is known by the checksum of its first length. A damaged one may begin with the byte
    of zlib, but then the upper bytes of its length are zeros. Raises BadInput for other formats.
    """
    if begins_record(stream):
        return stream, "raw"
    start = stream.peek(_HEADER_BYTES)[:_HEADER_BYTES]
    if start.startswith(_GZIP):
        return cast(IO[bytes], gzip.GzipFile(fileobj=stream)), "gzip"
    checked = len(start) > 2 and int.from_bytes(start[:2], "big") % 31 == 0  # RFC 1950
    if checked and start[0] == _ZLIB and any(start[2:8]):
        return BufferedReader(_Inflated(stream), _PIECE_BYTES), "ZLIB"
    other = next((name for magic, name in _OTHERS.items() if start.startswith(magic)), None)
    if other is not None:
        raise BadInput(where, expected=_FORMS, got=other)
    return stream, "raw"


class _Inflated(RawIOBase):
    """The content of a stream that zlib has compressed, in one member or in several.

    Reading raises zlib.error and EOFError.
    """

    def __init__(self, stream: BufferedReader) -> None:
        self._stream = stream
        self._inflate = zlib.decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        room = memoryview(buffer).cast("B")
        content = b""
        while not content:
            rest = self._inflate.unused_data or self._inflate.unconsumed_tail
            piece = rest or self._stream.read(_PIECE_BYTES)
            if self._inflate.eof:
                if not piece:
                    break
                self._inflate = zlib.decompressobj()
            elif not piece:
                raise EOFError("the file ends within the compressed data")
            content = self._inflate.decompress(piece, len(room))
        room[: len(content)] = content
        return len(content)


def _scan(data: bytes, number: int, where: str) -> tuple[Block, int, int]:
    """The whole records in `data`, the position after them, and the bytes that the next one lacks.

    `number` is the number of the first record.
    """
    at, size = 0, len(data)
    starts: list[int] = []
    ends: list[int] = []
    crcs: list[int] = []
    missing = 0
    while True:
        start = at + _HEADER_BYTES
        if start > size:
            missing = start - size
            break
        header = data[at:start]
        try:
            end = start + _length(header)
        except ValueError as error:
            record = number + len(starts)
            hint = "" if record else f": it is damaged, or no {_FORMS}"
            raise BadInput(f"{where}: record {record}: {error}{hint}") from None
        if end + _FOOTER_BYTES > size:
            missing = end + _FOOTER_BYTES - size
            break
        starts.append(start)
        ends.append(end)
        crcs.append(crc32c(data[start:end]))
        at = end + _FOOTER_BYTES
    block = Block(number, data, np.array(starts, np.int64), np.array(ends, np.int64))
    _check(block, np.array(crcs, np.uint64), where)
    return block, at, missing


def _check(block: Block, crcs: NDArray[np.uint64], where: str) -> None:
    """Raise BadInput unless each record has the checksum that is stored after it."""
    if not len(crcs):
        return
    footers = np.full(len(crcs), _FOOTER_BYTES)
    stored = gather(block.data, block.ends, block.ends + footers).view("<u4")
    computed = mask(crcs)
    if wrong := np.flatnonzero(stored != computed)[:1].tolist():
        (i,) = wrong
        raise BadInput(
            f"{where}: record {block.first + i}",
            expected=f"the checksum {stored[i]:08x}",
            got=f"{computed[i]:08x}",
        )


# Records of a file have few lengths, and a lookup costs a tenth of a checksum in Python.
@lru_cache(maxsize=1 << 16)
def _header(length: int) -> bytes:
    packed = _LENGTH.pack(length)
    return packed + _CRC.pack(mask(crc32c(packed)))


@lru_cache(maxsize=1 << 16)
def _length(header: bytes) -> int:
    """The length of the record after a header; raises ValueError."""
    (length,), (stored,) = _LENGTH.unpack_from(header), _CRC.unpack_from(header, 8)
    computed = mask(crc32c(header[:8]))
    if stored != computed:
        raise ValueError(f"expected the length's checksum {stored:08x}, got {computed:08x}")
    if length > _LONGEST:
        raise ValueError(f"expected a record of at most {_LONGEST} bytes, got {length}")
    return int(length)
