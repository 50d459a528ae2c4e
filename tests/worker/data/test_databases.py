"""LMDB and LevelDB: what Caffe's own tools wrote, what the libraries write, and damaged files."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import plyvel
import pyarrow as pa
import pytest

from shards.errors import BadInput
from worker.caffe.caffe_pb2 import Datum
from worker.data import image_decoding
from worker.data.databases import datum_bytes
from worker.data.leveldb_files import LevelDbReader
from worker.data.lmdb_file import LmdbReader, write_lmdb
from worker.data.source import Source, part_rows, ranges
from worker.data.sources import open_source

REAL = Path(__file__).parents[2] / "data" / "caffe" / "databases"
DEMO = Path(__file__).parents[3] / "deploy" / "demo" / "mnist"
REALS = (REAL / "mnist500_lmdb", REAL / "mnist500_leveldb")
Records = list[tuple[bytes, bytes]]


def rows(source: Any, **part: Any) -> Any:
    return pa.Table.from_batches(list(source.batches(**part)), source.schema)


def some_records(count: int, seed: int = 1) -> Records:
    """Records with values of very different sizes."""
    dice = np.random.default_rng(seed)
    sizes = dice.choice([0, 10, 3000, 20000], count)
    return [(b"%06d" % i, dice.bytes(int(size))) for i, size in enumerate(sizes)]


def write_leveldb(path: Path, records: Records, **options: Any) -> None:
    with plyvel.DB(str(path), create_if_missing=True, write_buffer_size=1 << 16, **options) as made:
        for key, value in records:
            made.put(key, b"an older value")
            made.put(b"x" + key, value)
            made.put(key, value)
            made.delete(b"x" + key)


@pytest.mark.parametrize("path", REALS, ids=lambda path: path.name)
def test_databases_of_caffe_hold_mnist(path: Path) -> None:
    """Caffe's converter wrote the first 500 test images of MNIST, in order."""
    read, expected = rows(open_source(path, classes=10)), rows(open_source(DEMO, "test"))
    assert read.equals(expected.slice(0, 500))
    assert open_source(path).shape == (1, 28, 28)


def test_lmdb_of_the_library(tmp_path: Path) -> None:
    """Every range of a database with large values and a deep tree, as the library wrote it."""
    records = some_records(700)
    assert write_lmdb(tmp_path / "made", iter(records)) == 700
    with LmdbReader(tmp_path / "made") as reader:
        assert reader.rows == 700
        assert list(reader.records(0, 700)) == records
        for start, stop in ((0, 1), (699, 700), (123, 456), (700, 900), (5, 5)):
            assert list(reader.records(start, stop)) == records[start:stop]


def test_an_lmdb_without_a_folder(tmp_path: Path) -> None:
    """A file of any name: the library writes one with `subdir=False`."""
    path = tmp_path / "train.lmdb"
    with lmdb.open(str(path), subdir=False) as database, database.begin(write=True) as writing:
        writing.put(b"0", datum_bytes(3, np.zeros((1, 2, 2), np.uint8)))
    source = open_source(path)
    assert (source.rows, source.shape) == (1, (1, 2, 2))


@pytest.mark.parametrize("compression", ["snappy", None])
def test_leveldb_of_the_library(tmp_path: Path, compression: str | None) -> None:
    """Tables of several levels and a log, with values overwritten and keys deleted."""
    records = some_records(300)
    write_leveldb(tmp_path / "made", records, compression=compression)
    assert len(list((tmp_path / "made").glob("*.ldb"))) > 1
    reader = LevelDbReader(tmp_path / "made")
    assert reader.rows == 300
    assert list(reader.records(0, 300)) == records
    for start, stop in ((0, 1), (299, 300), (123, 256), (300, 900), (5, 5)):
        assert list(reader.records(start, stop)) == records[start:stop]


def test_an_empty_database_is_refused(tmp_path: Path) -> None:
    """The error names the database."""
    write_lmdb(tmp_path / "lmdb", iter([]))
    write_leveldb(tmp_path / "leveldb", [])
    for name in ("lmdb", "leveldb"):
        with pytest.raises(BadInput, match=rf"{name}: expected rows, got none"):
            open_source(tmp_path / name)


def test_parts_are_disjoint_and_cover_all_rows() -> None:
    """Each task reads its own ranges, from all over the database, of nearly equal numbers."""
    for total, parts in ((500, 3), (7, 7), (100_000, 4), (17, 2)):
        found = [ranges(total, parts, part) for part in range(parts)]
        every = sorted(row for part in found for span in part for row in range(*span))
        assert every == list(range(total))
        sizes = [sum(stop - start for start, stop in part) for part in found]
        assert max(sizes) - min(sizes) <= 16
    source = open_source(REALS[0])
    assert isinstance(source, Source)
    ids = [batch["id"].to_pylist() for part in range(3) for batch in part_rows(source, 3, part)]
    assert sorted(row for part in ids for row in part) == list(range(500))


def images(count: int, seed: int = 2) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (count, 3, 8, 6), np.uint8)


def database(path: Path, values: list[bytes]) -> Path:
    write_lmdb(path, ((b"%04d" % number, value) for number, value in enumerate(values)))
    return path


def test_encoded_and_float_datums(tmp_path: Path) -> None:
    """A PNG gives the pixels that it was made of, in the order BGR; float_data gives float32."""
    made = images(5)
    encoded = [
        Datum(encoded=True, data=image_decoding.encode(image), label=number).SerializeToString()
        for number, image in enumerate(made)
    ]
    read = rows(open_source(database(tmp_path / "png", encoded)))
    assert read["data"].to_pylist() == [image.tobytes() for image in made]
    assert read["label"].to_pylist() == [0, 1, 2, 3, 4]
    floats = made.astype(np.float32) / 7
    read = rows(open_source(database(tmp_path / "float", [datum_bytes(3, row) for row in floats])))
    np.testing.assert_array_equal(np.array(read["data"].to_pylist()), floats.reshape(5, -1))


def test_images_that_cannot_be_decoded_are_skipped_up_to_a_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are counted and named in a warning; one more than the limit is an error."""
    good = Datum(encoded=True, data=image_decoding.encode(images(1)[0])).SerializeToString()
    bad = Datum(encoded=True, data=b"no image").SerializeToString()
    path = database(tmp_path / "made", [good, bad, good, bad, good])
    assert rows(open_source(path, max_skipped=2))["id"].to_pylist() == [0, 2, 4]
    assert "skipped 2 of 5 images, which cannot be decoded: record 0001, record 0003" in caplog.text
    with pytest.raises(BadInput, match=r"record 0003: .*; expected at most 1 images that cannot"):
        rows(open_source(path, max_skipped=1))


def _bad(label: int = 1, **fields: Any) -> bytes:
    whole: dict[str, Any] = {
        "channels": 3,
        "height": 8,
        "width": 6,
        "data": bytes(144),
        "label": label,
    }
    return Datum(**(whole | fields)).SerializeToString()


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (b"\xff" * 9, "record 0002: expected a Datum, got 9 other bytes"),
        (_bad(data=b"x" * 143), "field data: expected 144 values for 3x8x6, got 143"),
        (_bad(float_data=[1.0]), "field float_data: expected 144 values for 3x8x6, got 1"),
        (_bad(height=-8), "fields channels, height, width: expected extents of at least 1, got 3x"),
        (_bad(channels=2**30, height=2**30), "expected extents of at least 1"),
        (_bad(label=10), r"record 0002: expected a label in \[0, 10\), got 10"),
        (_bad(label=-1), r"expected a label in \[0, 10\), got -1"),
        (
            _bad(height=4, width=12),
            "record 0002: expected an image of 3x8x6, as the first",
        ),
        (
            _bad(data=b"", float_data=[float("nan")] * 144),
            "record 0002: field float_data: expected finite numbers",
        ),
    ],
)
def test_a_record_that_does_not_fit_is_named(tmp_path: Path, value: bytes, error: str) -> None:
    """The error names the database, the record, the field, what was expected and what was found."""
    path = database(tmp_path / "made", [_bad(), _bad(), value])
    with pytest.raises(BadInput, match=error) as caught:
        rows(open_source(path, classes=10))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def damaged(path: Path, seeds: range, of: str) -> Iterator[Path]:
    """Copies of a database with a few bytes of a file overwritten, or the file cut off."""
    for seed in seeds:
        dice = np.random.default_rng(seed)
        copy = path.parent / f"copy{seed}"
        shutil.copytree(path, copy)
        file = dice.choice(sorted(copy.glob(of)))
        data = bytearray(file.read_bytes())
        if seed % 4 == 0:
            del data[int(dice.integers(len(data))) :]
        else:
            # Headers of pages and blocks are where numbers point to other places.
            for _ in range(4):
                page = int(dice.integers(max(len(data) // 4096, 1))) * 4096
                data[min(page + int(dice.integers(64)), len(data) - 1)] = int(dice.integers(256))
        file.write_bytes(data)
        yield copy
        shutil.rmtree(copy)


@pytest.mark.parametrize("kind", ["lmdb", "leveldb", "manifest"])
def test_a_damaged_database_is_an_error_and_never_ends_the_process(
    tmp_path: Path, kind: str
) -> None:
    """Whatever bytes are wrong, reading either raises BadInput or returns records."""
    records = some_records(60)
    if kind == "lmdb":
        write_lmdb(tmp_path / "made", iter(records))
    else:
        write_leveldb(tmp_path / "made", records)
    read: Callable[[Path], Any] = LmdbReader if kind == "lmdb" else LevelDbReader
    of = {"lmdb": "data.mdb", "leveldb": "*.l*", "manifest": "MANIFEST*"}[kind]
    refusals = list[tuple[str, str]]()
    for copy in damaged(tmp_path / "made", range(80), of):
        try:
            assert len(list(read(copy).records(0, 10**6))) <= 10**4
        except BadInput as error:
            refusals.append((str(copy), str(error)))
    assert len(refusals) >= 20
    assert all(copy in error and "\n" not in error for copy, error in refusals)


@pytest.mark.parametrize("size", [0, 1, 16, 100, 4095, 4096, 8192, 20000])
def test_a_database_that_was_cut_off(tmp_path: Path, size: int) -> None:
    """An interrupted copy is refused when it is opened."""
    (tmp_path / "data.mdb").write_bytes((REALS[0] / "data.mdb").read_bytes()[:size])
    with pytest.raises(BadInput, match=r"data\.mdb: expected "):
        open_source(tmp_path)


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    """A file of another kind under the name of a database."""
    (tmp_path / "data.mdb").write_bytes(b"PK\x03\x04" * 5000)
    with pytest.raises(BadInput, match="expected an LMDB database, got a file of another kind"):
        open_source(tmp_path)


def test_our_lmdb_is_read_by_the_library(tmp_path: Path) -> None:
    """What `write_lmdb` makes, other programs read."""
    records = some_records(50)
    write_lmdb(tmp_path / "made", iter(records))
    with lmdb.open(str(tmp_path / "made"), readonly=True, lock=False) as made, made.begin() as read:
        assert list(read.cursor()) == records
