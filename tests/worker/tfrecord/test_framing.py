"""Records of a file: found whole, checked by two checksums each, raw or gzipped."""

import bz2
import gzip
import zlib
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shards.errors import BadInput
from tests.support.tfrecord_bytes import crc32c, framed
from worker.tfrecord import framing
from worker.tfrecord.framing import frames, read_blocks

DATA = Path(__file__).parents[2] / "data" / "tfrecord"
RECORDS = [b"first", b"", b"third " * 50]
FILE = framed(*RECORDS)


def read(content: bytes) -> list[bytes]:
    blocks = list(read_blocks(BufferedReader(BytesIO(content)), "f"))
    assert [block.first for block in blocks] == [
        sum(len(earlier.starts) for earlier in blocks[:n]) for n in range(len(blocks))
    ]
    return [b.data[i:j] for b in blocks for i, j in zip(b.starts, b.ends, strict=True)]


def test_the_reference_is_sound() -> None:
    """The tests' own checksum has the values of RFC 3720, appendix B.4."""
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(b"123456789") == 0xE3069283


@given(st.lists(st.binary(max_size=60)))
def test_files_are_as_specified(records: list[bytes]) -> None:
    """Ours are the bytes of the specification, and either is read."""
    content = framed(*records)
    assert frames(records) == content
    assert read(content) == records
    assert read(gzip.compress(content)) == records


@pytest.mark.parametrize("block_bytes", [1, 7, 100, 1 << 20])
def test_records_across_blocks(monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    """A record may be longer than a block, and begin in one and end in another."""
    monkeypatch.setattr(framing, "BLOCK_BYTES", block_bytes)
    assert read(FILE) == RECORDS
    for compress in (gzip.compress, zlib.compress):
        assert read(compress(FILE) + compress(FILE)) == RECORDS * 2


def test_every_flipped_bit_is_found() -> None:
    """No bit of a file can change without an error."""
    for bit in range(8 * len(FILE)):
        changed = bytearray(FILE)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadInput, match=r"^f: record \d: expected"):
            read(bytes(changed))


@given(st.data())
def test_a_flipped_bit_in_a_gzipped_file_changes_no_record(data: Any) -> None:
    """It is found, or it is in a header that says nothing about the records."""
    content = bytearray(gzip.compress(FILE, mtime=0))
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    try:
        found = read(bytes(content))
    except BadInput:
        return
    assert found == RECORDS


@given(st.integers(1, len(FILE) - 1))
@example(21)
@example(37)
def test_a_truncated_file_is_found(size: int) -> None:
    """Unless it ends between two records, where it is whole; the missing bytes are counted."""
    ends = [len(framed(*RECORDS[:n])) for n in range(4)]
    if size in ends:
        assert read(FILE[:size]) == RECORDS[: ends.index(size)]
    else:
        with pytest.raises(BadInput, match=r"record \d: expected \d+ bytes .* truncated"):
            read(FILE[:size])
    with pytest.raises(BadInput, match=r"expected whole gzip data|expected \d+ bytes"):
        read(gzip.compress(FILE)[:-size] if size < len(gzip.compress(FILE)) else b"\x1f\x8b")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (FILE[:-1] + b"!", "f: record 2: expected the checksum 2172e4ec, got 4472e4ec"),
        (FILE[:9] + b"!" + FILE[10:], "f: record 0: expected the length's checksum"),
        (framed(b"x")[:-3], "f: record 0: expected 17 bytes with length and checksums, got 14: "),
        (b"short", "f: record 0: expected 12 bytes with length and checksums, got 5: "),
        (framed(b"x") + b"\0" * 12, "f: record 1: expected the length's checksum 00000000, got "),
        (zlib.compress(FILE) + b"!", "f: record 0: expected whole ZLIB data, got: the file ends"),
        (zlib.compress(FILE) + b"rest", "f: record 0: expected whole ZLIB data, got: Error -3"),
        (bz2.compress(FILE), "f: expected TFRecord file, raw or compressed by gzip or ZLIB, got b"),
        (b"PAR1" + bytes(20), "f: expected TFRecord file, raw or compressed by gzip or ZLIB, got "),
        (b"\x1f\x8b\x08 no gzip", "f: record 0: expected whole gzip data, got: "),
    ],
)
def test_errors_name_the_record(content: bytes, message: str) -> None:
    """One line: the file, the record's number, what was expected and what was found."""
    with pytest.raises(BadInput) as caught:
        read(content)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_length_that_no_message_has() -> None:
    """A length of more than 2 GiB is refused before any memory is taken for it."""
    header = framing._header(1 << 40)
    with pytest.raises(BadInput, match="record 0: expected a record of at most 2147483647 bytes"):
        read(header + b"data")


def test_files_of_another_writer() -> None:
    """The PyPI package tfrecord 1.14.6 wrote these; every checksum is right."""
    assert [len(record) for record in read((DATA / "example.tfrecord").read_bytes())] == [101, 102]
    assert [len(record) for record in read((DATA / "sequence.tfrecord").read_bytes())] == [101]
