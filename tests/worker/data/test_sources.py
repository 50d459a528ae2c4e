"""Data sources: their tables, and the one-line error for each kind of broken data."""

import gzip
from collections.abc import Callable
from hashlib import md5
from pathlib import Path
from struct import pack
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shards.errors import BadInput
from worker.data.sources import ImageSource, Split, has_test, open_source

DEMO = Path(__file__).parents[3] / "deploy" / "demo" / "mnist"
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
DICE = np.random.default_rng(11)
PIXELS = DICE.integers(0, 256, (20, 4, 5), np.uint8)
CLASSES = DICE.integers(0, 10, 20).astype(np.uint8)


def idx_images(pixels: Any = PIXELS, magic: int = 2051) -> bytes:
    return pack(">4I", magic, *pixels.shape) + bytes(pixels.tobytes())


def idx_labels(labels: Any = CLASSES, magic: int = 2049) -> bytes:
    return pack(">2I", magic, len(labels)) + bytes(labels.tobytes())


def idx_folder(folder: Path, images: bytes | None = None, labels: bytes | None = None) -> Path:
    (folder / IMAGES).write_bytes(idx_images() if images is None else images)
    (folder / LABELS).write_bytes(idx_labels() if labels is None else labels)
    return folder


def parquet(path: Path, **columns: Any) -> Path:
    """A Parquet file of 20 images of 4x5, with any columns replaced, added, or None: left out."""
    table = {
        "label": pa.array(CLASSES.astype(np.int64)),
        "data": pa.array([row.tobytes() for row in PIXELS]),
        "channels": pa.array([1] * 20),
        "height": pa.array([4] * 20),
        "width": pa.array([5] * 20),
        **columns,
    }
    pq.write_table(pa.table({k: v for k, v in table.items() if v is not None}), path)
    return path


def everything(source: ImageSource, rows: int = 7) -> Any:
    return pa.Table.from_batches(list(source.batches(rows)), source.schema)


def refusal(path: Path, split: Split = "train", **options: Any) -> str:
    """The one line with which the data at `path` is refused, at opening or while it is read."""
    with pytest.raises(BadInput) as caught:
        list(open_source(path, split, **options).batches())
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_real_mnist_is_read_byte_for_byte() -> None:
    """The test set's images and labels have the checksums under which it is known."""
    table = everything(open_source(DEMO, "test", classes=10), 999)
    pixels = b"".join(table["data"].to_pylist())
    images = pack(">4I", 2051, 10_000, 28, 28) + pixels
    labels = idx_labels(table["label"].to_numpy().astype(np.uint8))
    assert md5(images).hexdigest() == "2646ac647ad5339dbf082846283269ea"
    assert md5(labels).hexdigest() == "27ae3e4e09519cfbb04c329615203637"
    assert table["id"].to_pylist() == list(range(10_000))


@pytest.mark.parametrize("dotted", [False, True])
@pytest.mark.parametrize("zipped", [False, True])
def test_idx_files_raw_or_gzipped_give_the_image_schema(
    tmp_path: Path, zipped: bool, dotted: bool
) -> None:
    """Each form and name gives the same rows, with the columns and types of an image DataFrame."""
    idx_folder(tmp_path)
    if zipped:
        for name in (IMAGES, LABELS):
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
            (tmp_path / name).unlink()
    for file in list(tmp_path.iterdir()) if dotted else []:
        file.rename(file.with_name(file.name.replace("-idx", ".idx")))
    source = open_source(tmp_path)
    table = everything(source)
    assert (source.rows, source.shape) == (20, (1, 4, 5))
    types = ["int64", "int64", "int32", "int32", "int32", "binary"]
    names = ["id", "label", "channels", "height", "width", "data"]
    assert [(f.name, str(f.type)) for f in table.schema] == list(zip(names, types, strict=True))
    assert table["data"].to_pylist() == [row.tobytes() for row in PIXELS]
    assert table["label"].to_pylist() == CLASSES.tolist()
    assert {
        tuple(row) for row in zip(*(table[n].to_pylist() for n in names[2:5]), strict=True)
    } == {(1, 4, 5)}


@pytest.mark.parametrize(
    "pixels",
    [
        pa.array([row.tobytes() for row in PIXELS], pa.large_binary()),
        pa.array([row.tobytes() for row in PIXELS], pa.binary(20)),
        pa.array(PIXELS.reshape(20, 20).tolist(), pa.list_(pa.uint8())),
        pa.array(PIXELS.reshape(20, 20).tolist(), pa.list_(pa.int64())),
        pa.array(PIXELS.reshape(20, 20).tolist(), pa.large_list(pa.float64())),
        pa.array(PIXELS.reshape(20, 20).tolist(), pa.list_(pa.float32(), 20)),
    ],
    ids=lambda column: str(column.type),
)
@pytest.mark.parametrize("labels", [pa.int8(), pa.uint64(), pa.float64(), pa.int32()])
def test_parquet_of_any_number_type_is_normalised(tmp_path: Path, pixels: Any, labels: Any) -> None:
    """Bytes come out as binary, lists of any number as list<float>, labels as int64."""
    column = pa.array(CLASSES).cast(labels)
    source = open_source(parquet(tmp_path / "a.parquet", data=None, image=pixels, label=column))
    table = everything(source)
    assert (source.rows, source.shape) == (20, (1, 4, 5))
    if pa.types.is_binary(table.schema.field("data").type):
        flat = [list(row) for row in table["data"].to_pylist()]
    else:
        assert table.schema.field("data").type == pa.list_(pa.float32())
        flat = table["data"].to_pylist()
    assert flat == PIXELS.reshape(20, 20).tolist()
    assert table["label"].to_pylist() == CLASSES.tolist()


def test_a_parquet_folder_is_read_in_order_and_by_its_parts(tmp_path: Path) -> None:
    """Files follow each other by name, ids run on or are kept, and a split is found by its name."""
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
    (tmp_path / "train" / "_SUCCESS").touch()
    (tmp_path / "train" / "_old.parquet").write_text("not data")
    parquet(tmp_path / "train" / "part-1.parquet", label=pa.array([1] * 20))
    parquet(tmp_path / "train" / "part-0.parquet", label=pa.array([0] * 20))
    parquet(
        tmp_path / "test" / "part-0.parquet", label=pa.array([2] * 20), id=pa.array(range(7, 27))
    )
    train, test = everything(open_source(tmp_path)), everything(open_source(tmp_path, "test"))
    assert train["label"].to_pylist() == [0] * 20 + [1] * 20
    assert train["id"].to_pylist() == list(range(40))
    assert test["label"].to_pylist() == [2] * 20
    assert test["id"].to_pylist() == list(range(7, 27))


@pytest.mark.parametrize(
    ("name", "divided"),
    [
        ("test_notes.md", False),
        ("test.parquet", True),
        ("test", True),
        ("rows.parquet", False),
        ("val.parquet", True),
        ("validation-0.parquet", True),
        ("values.parquet", False),
    ],
)
def test_what_divides_parquet(tmp_path: Path, name: str, divided: bool) -> None:
    """A subfolder or a Parquet file named so; notes and the like divide nothing."""
    parquet(tmp_path / "train.parquet")
    if name == "test":
        (tmp_path / name).mkdir()
    else:
        parquet(tmp_path / name)
    assert has_test(tmp_path) == divided


def test_a_validation_part_is_tested_on_where_there_is_no_test_part(tmp_path: Path) -> None:
    """`train` and `val` are the names of ImageNet's parts; `val` alone is no part."""
    parquet(tmp_path / "val.parquet", label=pa.array([2] * 20))
    assert everything(open_source(tmp_path))["label"].to_pylist() == [2] * 20
    parquet(tmp_path / "train.parquet", label=pa.array([1] * 20))
    assert everything(open_source(tmp_path, "test"))["label"].to_pylist() == [2] * 20
    assert everything(open_source(tmp_path))["label"].to_pylist() == [1] * 20
    parquet(tmp_path / "test.parquet", label=pa.array([3] * 20))
    assert everything(open_source(tmp_path, "test"))["label"].to_pylist() == [3] * 20


def test_labels_of_pandas_and_spark(tmp_path: Path) -> None:
    """Categories are the values that they stand for; text may have spaces around a number."""
    for label in (pa.array(["2", " 0"] * 10), pa.array(["2", "0"] * 10).dictionary_encode()):
        source = open_source(parquet(tmp_path / "a.parquet", label=label))
        assert everything(source)["label"].to_pylist() == [2, 0] * 10
    assert (
        everything(open_source(parquet(tmp_path / "a.parquet", label=pa.array([-1] * 20))))[
            "label"
        ].to_pylist()
        == [-1] * 20
    )  # for a loss that ignores it


def test_an_undivided_parquet_file_is_training_data_alone(tmp_path: Path) -> None:
    """Data that does not say what is for testing is never tested on unnoticed."""
    path = parquet(tmp_path / "digits.parquet")
    assert open_source(path).rows == 20
    assert "expected a subfolder test or files test*.parquet for the test data" in refusal(
        path, "test"
    )


def test_a_square_shape_is_found_and_another_is_asked_for(tmp_path: Path) -> None:
    """Without columns that say it, an image is square, of one channel or three; or as told."""
    bare = dict.fromkeys(("channels", "height", "width"))
    rows = [bytes(48)] * 20
    path = parquet(tmp_path / "a.parquet", **bare, data=pa.array(rows))
    assert open_source(path).shape == (3, 4, 4)
    assert open_source(path, shape=(1, 6, 8)).shape == (1, 6, 8)
    assert open_source(path, shape=(2, 2, 2)).shape == (3, 4, 4), "the net says what it expected"
    path = parquet(tmp_path / "b.parquet", **bare, data=pa.array([bytes(50)] * 20))
    assert "b.parquet, column data: expected a square image, or columns" in refusal(path)


@pytest.mark.parametrize("size", [14, 100, 101])
def test_a_list_of_numbers_is_a_vector(tmp_path: Path, size: int) -> None:
    """Whether or not its length is a square; only a net that needs an image reads a square."""
    bare = dict.fromkeys(("channels", "height", "width"))
    path = parquet(tmp_path / "a.parquet", **bare, data=pa.array([[0.5] * size] * 20))
    assert open_source(path).shape == (size, 1, 1)
    if size == 100:
        assert open_source(path, image=True).shape == (1, 10, 10)
    else:
        assert "expected a square image, or columns" in refusal(path, image=True)


def cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def zipped(path: Path, content: bytes) -> None:
    path.with_name(path.name + ".gz").write_bytes(content)
    path.unlink()


BROKEN_IDX: dict[str, tuple[Callable[[Path], object], str]] = {
    "no images": (
        lambda f: (f / IMAGES).unlink(),
        f"expected {IMAGES} or {IMAGES}.gz, got {LABELS}",
    ),
    "no labels": (
        lambda f: (f / LABELS).unlink(),
        f"expected {LABELS} or {LABELS}.gz, got {IMAGES}",
    ),
    "cut in the data": (
        lambda f: cut(f / IMAGES, 300),
        f"{IMAGES}: expected 400 bytes of data, as its header says (20x4x5), got a file of 300",
    ),
    "cut by one byte": (lambda f: cut(f / LABELS, 27), "expected 20 bytes of data"),
    "cut in the header": (
        lambda f: cut(f / IMAGES, 9),
        f"{IMAGES}: expected a header of 16 bytes, got 9",
    ),
    "empty": (lambda f: cut(f / LABELS, 0), f"{LABELS}: expected a header of 8 bytes, got 0"),
    "too long": (
        lambda f: (f / IMAGES).write_bytes(idx_images() + b"x"),
        "expected 400 bytes of data, as its header says (20x4x5), got more",
    ),
    "labels for images": (
        lambda f: (f / IMAGES).write_bytes(idx_images(magic=2049)),
        f"{IMAGES}: expected the magic number 2051, got 2049",
    ),
    "another count": (
        lambda f: (f / LABELS).write_bytes(idx_labels(CLASSES[:19])),
        f"{LABELS}: expected 20 labels, one an image of {IMAGES}, got 19",
    ),
    "no rows": (
        lambda f: idx_folder(f, idx_images(PIXELS[:0]), idx_labels(CLASSES[:0])),
        f"{IMAGES}: expected images, got 0x4x5",
    ),
    "label out of range": (
        lambda f: (f / LABELS).write_bytes(idx_labels(np.array([3] * 19 + [10], np.uint8))),
        f"{LABELS}: row 19: expected a label in [0, 10), got 10",
    ),
    "cut gzip": (
        lambda f: zipped(f / IMAGES, gzip.compress(idx_images())[:-100]),
        f"{IMAGES}.gz: expected 400 bytes of data, as its header says (20x4x5), got ",
    ),
    "not gzip": (
        lambda f: zipped(f / IMAGES, idx_images()),
        f"{IMAGES}.gz: expected gzipped data, cannot unpack it: Not a gzipped file",
    ),
    "gzip with a wrong checksum": (
        lambda f: zipped(f / IMAGES, gzip.compress(idx_images())[:-8] + bytes(8)),
        "cannot unpack it: CRC check failed",
    ),
    "gzip that unpacks to more": (
        lambda f: zipped(f / IMAGES, gzip.compress(idx_images() + bytes(10**8))),
        "expected 400 bytes of data, as its header says (20x4x5), got more",
    ),
    "a promise too large": (
        lambda f: zipped(f / IMAGES, gzip.compress(pack(">4I", 2051, *[2**32 - 1] * 3))),
        f"expected {(2**32 - 1) ** 3} bytes of data",
    ),
}


@pytest.mark.parametrize("case", BROKEN_IDX)
def test_broken_idx_data_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    """Each error in an IDX folder names the file, and what was expected and found."""
    spoil, text = BROKEN_IDX[case]
    spoil(idx_folder(tmp_path))
    assert text in refusal(tmp_path, classes=10)


NUMBERS = pa.array(PIXELS.reshape(20, 20).tolist(), pa.list_(pa.float64()))
BROKEN_PARQUET: dict[str, tuple[dict[str, Any], str]] = {
    "no label": ({"label": None}, "expected a column label, got data, channels, height, width"),
    "no pixels": ({"data": None}, "expected a column data or image, got label, channels, height"),
    "text pixels": (
        {"data": pa.array(["x"] * 20)},
        "column data: expected binary pixels or a list of numbers a row, got string",
    ),
    "text labels": (
        {"label": pa.array(["7"] * 19 + ["seven"])},
        "column label: row 19: expected a number, got seven",
    ),
    "a fraction": (
        {"label": pa.array([1.0] * 5 + [1.5] + [2.0] * 14)},
        "column label: row 5: expected a whole number, got 1.5",
    ),
    "nan label": (
        {"label": pa.array([1.0] * 19 + [float("nan")])},
        "column label: row 19: expected a whole number, got nan",
    ),
    "huge label": (
        {"label": pa.array([1.0] * 3 + [1e30] + [0.0] * 16)},
        "column label: row 3: expected a whole number, got 1e+30",
    ),
    "text that is no number": (
        {"label": pa.array(["0"] * 4 + ["1_0"] + ["0"] * 15)},
        "column label: row 4: expected a number, got 1_0",
    ),
    "negative label": (
        {"label": pa.array([0] * 4 + [-1] + [0] * 15)},
        "column label: row 4: expected a label in [0, 10), got -1",
    ),
    "label out of range": (
        {"label": pa.array([0] * 4 + [10] + [0] * 15)},
        "column label: row 4: expected a label in [0, 10), got 10",
    ),
    "null label": (
        {"label": pa.array([0] * 8 + [None] + [0] * 11)},
        "column label: row 8: expected a value, got null",
    ),
    "null pixels": (
        {"data": pa.array([bytes(20)] * 8 + [None] + [bytes(20)] * 11)},
        "column data: row 8: expected a value, got null",
    ),
    "null pixel": (
        {"data": pa.array([[1.0] * 20] * 3 + [[1.0] * 19 + [None]] + [[1.0] * 20] * 16)},
        "column data: row 3: expected 20 numbers, got a null among them",
    ),
    "a shorter row": (
        {"data": pa.array([bytes(20)] * 6 + [bytes(19)] + [bytes(20)] * 13)},
        "column data: row 6: expected 20 values, got 19",
    ),
    "shape columns that disagree": (
        {"height": pa.array([4] * 9 + [5] * 11)},
        "column height: row 9: expected 4 as in the rows before, got 5",
    ),
    "shape columns that do not fit": (
        {"height": pa.array([3] * 20)},
        "column data: expected 1x3x5 = 15 values a row, got 20",
    ),
    "encoded images": (
        {"data": pa.array([b"\x89PNG\r\n\x1a\n" + bytes(9)] * 20), "channels": None},
        "got none with an image that can be decoded",
    ),
    "integers beyond float32": (
        {"data": pa.array([[2**25 + 1] * 20] * 20)},
        "column data: expected numbers that float32 holds: Integer value 33554433",
    ),
}


@pytest.mark.parametrize("case", BROKEN_PARQUET)
def test_broken_parquet_columns_are_refused_in_one_line(tmp_path: Path, case: str) -> None:
    """Each way a Parquet file's columns can be wrong names file, column, row, expected and got."""
    columns, text = BROKEN_PARQUET[case]
    path = parquet(tmp_path / "a.parquet", **columns)
    said = refusal(path, classes=10)
    assert said.startswith(str(path))
    assert text in said


@pytest.mark.parametrize("keep", [0, 3, 500, -1, -20])
def test_a_truncated_parquet_file_is_refused_at_opening(tmp_path: Path, keep: int) -> None:
    """A file without its footer never opens, whatever was cut off."""
    path = parquet(tmp_path / "a.parquet")
    cut(path, keep)
    with pytest.raises(BadInput, match=r"a\.parquet: expected a whole Parquet file, got \w+"):
        open_source(path)


def test_damaged_parquet_pages_are_refused_while_reading(tmp_path: Path) -> None:
    """A file with an intact footer and damaged pages fails with the file's name."""
    path = parquet(tmp_path / "a.parquet", label=pa.array(range(20)))
    content = bytearray(path.read_bytes())
    content[4:300] = b"\xff" * 296
    path.write_bytes(bytes(content))
    assert refusal(path).startswith(f"{path}: expected a whole Parquet file, got ")


def test_what_is_not_there_is_said_with_what_is(tmp_path: Path) -> None:
    """A missing path, and a folder without data, are refused; the error lists the contents."""
    assert refusal(tmp_path / "none").endswith("expected a folder or a file, got nothing there")
    assert refusal(tmp_path).endswith("got an empty folder")
    for number in range(12):
        (tmp_path / f"{number:02}.txt").touch()
    said = refusal(tmp_path)
    assert "expected data of one of these formats: IDX, Parquet, LMDB, " in said
    assert ", got 00.txt, 01.txt, " in said
    assert said.endswith("07.txt and 4 more")
    (tmp_path / "table.csv").write_text("label,a\n0,1\n")
    said = refusal(tmp_path / "table.csv")
    assert said.endswith(
        "got another file; read it with Spark, and pass the DataFrame to worker.train"
    )
