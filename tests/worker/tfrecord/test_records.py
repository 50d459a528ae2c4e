"""Examples and SequenceExamples to Arrow and back, against protobuf and another library's files."""

import random
import zlib
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shards.errors import BadInput
from tests.support.tfrecord_bytes import framed
from worker.tfrecord.columns import columns_of
from worker.tfrecord.encode import encode
from worker.tfrecord.example_pb2 import Feature, Features, SequenceExample
from worker.tfrecord.files import File, find_files, read_batches, schema_of, write_file
from worker.tfrecord.partitions import partition_fields

DATA = Path(__file__).parents[2] / "data" / "tfrecord"

# The Example in TensorFlow's tutorial on TFRecord, as TensorFlow serialised it.
GOAT = (
    b"\nR\n\x11\n\x08feature0\x12\x05\x1a\x03\n\x01\x00\n\x11\n\x08feature1\x12\x05\x1a\x03\n\x01"
    b"\x04\n\x14\n\x08feature2\x12\x08\n\x06\n\x04goat\n\x14\n\x08feature3\x12\x08\x12\x06\n\x04["
    b"\xd3|?"
)
EVERY_TYPE = pa.schema(
    [
        ("long", pa.int64()),
        ("int", pa.int32()),
        ("float", pa.float32()),
        ("double", pa.float64()),
        ("text", pa.string()),
        ("bytes", pa.binary()),
        ("longs", pa.list_(pa.int64())),
        ("floats", pa.list_(pa.float32())),
        ("texts", pa.list_(pa.string())),
        ("", pa.list_(pa.binary())),
        ("steps", pa.list_(pa.list_(pa.int64()))),
        ("words", pa.list_(pa.list_(pa.binary()))),
    ]
)
Write = Callable[..., list[File]]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes records, or bytes as they are, as a file, and returns what finds it."""

    def to_file(*records: bytes, name: str = "f") -> list[File]:
        (tmp_path / name).write_bytes(framed(*records))
        return find_files(str(tmp_path / name))

    return to_file


def rows(files: list[File], schema: Any) -> list[Any]:
    return [
        row for each in files for batch in read_batches(each, schema) for row in batch.to_pylist()
    ]


def test_tensorflows_own_bytes(write: Write) -> None:
    """An Example that TensorFlow serialised is read, and ours of the same values is the same."""
    files = write(GOAT)
    schema = schema_of(files, 10)
    assert schema.types == [pa.int64(), pa.int64(), pa.binary(), pa.float32()]
    (row,) = rows(files, schema)
    assert row == {
        "feature0": 0,
        "feature1": 4,
        "feature2": b"goat",
        "feature3": float(np.float32(0.9876)),
    }
    batch = pa.RecordBatch.from_pylist([row], schema)
    assert b"".join(encode(batch, columns_of(schema))) == framed(GOAT)


def test_examples_of_another_writer() -> None:
    """Its file is read with an inferred schema: one value is a scalar, other numbers an array."""
    files = find_files(str(DATA / "example.tfrecord"))
    assert rows(files, schema_of(files, 10)) == [
        {"ids": [1, -2, 300], "label": 3, "name": b"caf\xc3\xa9", "score": 0.5, "x": [1.5, -2.0]},
        {"ids": [2**40], "label": -7, "name": b"", "score": 1.0, "x": [0.0, 4.0, 8.0]},
    ]


def test_sequence_examples_of_another_writer() -> None:
    """Context features and feature lists become columns alike."""
    files = find_files(str(DATA / "sequence.tfrecord"))
    assert rows(files, schema_of(files, 10)) == [
        {
            "frames": [[0.5], [1.5, 2.5]],
            "label": [7, 9],
            "length": 2,
            "tokens": [[1, 2], [3]],
        }
    ]


def random_rows(seed: int, count: int) -> list[dict[str, Any]]:
    """Rows of every type: the ends of each range, empty texts and arrays, and nulls among them."""
    dice = random.Random(seed)

    def value(kind: Any) -> Any:
        if pa.types.is_list(kind):
            return [value(kind.value_type) for _ in range(dice.choice((0, 1, 2, 40)))]
        if pa.types.is_floating(kind):
            return dice.choice(
                (0.0, -0.5, 2.0**127, float("inf"), float(np.float32(dice.random())))
            )
        if pa.types.is_integer(kind):
            most = 1 << dice.randrange(kind.bit_width)
            return dice.choice((most - 1, -most, dice.randrange(most)))
        size = dice.choice((0, 1, 17, 200))
        if pa.types.is_string(kind):
            return "".join(dice.choices("a0 é深\0", k=size))
        return dice.randbytes(size)

    return [
        {field.name: value(field.type) if dice.random() > 0.2 else None for field in EVERY_TYPE}
        for _ in range(count)
    ]


@pytest.mark.parametrize("compression", ["none", "gzip"])
@pytest.mark.parametrize(("seed", "count"), [(1, 0), (2, 1), (3, 2), (4, 200)])
def test_round_trip(tmp_path: Path, seed: int, count: int, compression: str) -> None:
    """Rows of every type come back as they were, nulls and empty arrays too."""
    batch = pa.RecordBatch.from_pylist(random_rows(seed, count), EVERY_TYPE)
    for skip in (0, 1):
        part = batch.slice(skip)
        write_file(str(tmp_path), "f", [part], EVERY_TYPE, compression)
        assert rows(find_files(f"{tmp_path}/f"), EVERY_TYPE) == part.to_pylist()


def test_protobuf_reads_ours() -> None:
    """Each record is the message that the protobuf library makes of the same values."""
    batch = pa.RecordBatch.from_pylist(random_rows(5, 100), EVERY_TYPE)
    data = b"".join(encode(batch, columns_of(EVERY_TYPE)))
    for row in batch.to_pylist():
        message = SequenceExample(context={}, feature_lists={})
        for column in columns_of(EVERY_TYPE):
            value = row[column.name]
            if value is None:
                continue
            if column.depth == 2:
                steps = message.feature_lists.feature_list[column.name].feature
                steps.extend(feature(column.kind.name, step) for step in value)
            else:
                values = value if column.depth else [value]
                message.context.feature[column.name].CopyFrom(feature(column.kind.name, values))
        size = int.from_bytes(data[:8], "little")
        assert SequenceExample.FromString(data[12 : 12 + size]) == message
        data = data[16 + size :]
    assert not data


def feature(kind: str, values: list[Any]) -> Feature:
    """A Feature of the protobuf library."""
    coded = [each.encode() if isinstance(each, str) else each for each in values]
    return Feature(**{f"{kind.lower()}_list": {"value": coded}})


UNUSUAL = {
    "numbers that are not packed": b"\x0a\x10\x0a\x0e\x0a\x01a"
    b"\x12\x09\x1a\x07\x08\x01\x08\xac\x02\x08\x03",
    "a value before its key": b"\x0a\x0f\x0a\x0d\x12\x08\x1a\x06\x0a\x04\x01\xac\x02\x03\x0a\x01a",
    "a list in two parts": b"\x0a\x10\x0a\x0e\x0a\x01a\x12\x09\x1a\x07\x0a\x03\x01\xac\x02\x08\x03",
    "a key twice": b"\x0a\x1a\x0a\x09\x0a\x01a\x12\x04\x1a\x02\x0a\x00"
    b"\x0a\x0d\x0a\x01a\x12\x08\x1a\x06\x0a\x04\x01\xac\x02\x03",
    "an unknown field": b"\x18\x05"
    b"\x0a\x0f\x0a\x0d\x0a\x01a\x12\x08\x1a\x06\x0a\x04\x01\xac\x02\x03",
    "a long form of a length": b"\x0a\x90\x80\x00\x0a\x8d\x00"
    b"\x0a\x01a\x12\x08\x1a\x06\x0a\x04\x01\xac\x02\x03",
}


@pytest.mark.parametrize("form", UNUSUAL)
def test_unusual_forms(write: Write, form: str) -> None:
    """What protobuf allows is read, though no common writer produces it."""
    record = UNUSUAL[form]
    usual = framed(
        SequenceExample(context=Features(feature={"a": feature("INT64", [4])})).SerializeToString()
    )
    assert list(SequenceExample.FromString(record).context.feature["a"].int64_list.value) == [
        1,
        300,
        3,
    ]
    schema = pa.schema([("a", pa.list_(pa.int64()))])
    files = write(record, usual[12:-4])
    assert rows(files, schema) == [{"a": [1, 300, 3]}, {"a": [4]}]


def example(**features: Feature) -> bytes:
    return SequenceExample(context=Features(feature=features)).SerializeToString()


LONG, FLOAT, TEXT = feature("INT64", [1]), feature("FLOAT", [0.5]), feature("BYTES", [b"\xff"])
LIST = SequenceExample()
LIST.feature_lists.feature_list["a"].feature.append(LONG)


@pytest.mark.parametrize(
    ("record", "kind", "message"),
    [
        (example(a=FLOAT), pa.int64(), "column a: expected int64, got float"),
        (example(a=TEXT), pa.list_(pa.float32()), "column a: expected float, got bytes"),
        (example(a=LONG), pa.list_(pa.list_(pa.int64())), "a: expected a feature list, got a feat"),
        (LIST.SerializeToString(), pa.int64(), "column a: expected a feature, got a feature list"),
        (example(a=feature("INT64", [1, 2])), pa.int64(), "a: expected one value (or an array"),
        (example(a=feature("INT64", [])), pa.int64(), "in the schema), got 0"),
        (
            example(a=feature("INT64", [2**31])),
            pa.int32(),
            "column a: expected int32, got 2147483648",
        ),
        (example(a=TEXT), pa.string(), "column a: expected string, got b'\\xff'"),
        (b"no Example", pa.int64(), "expected an Example or a SequenceExample, got other bytes"),
        (b"\x22\x01x", pa.int64(), "expected an Example or a SequenceExample, got other bytes"),
        (b"\x0a\x05abc", pa.int64(), "expected an Example or a SequenceExample, got other bytes"),
    ],
)
def test_wrong_records_are_named(write: Write, record: bytes, kind: Any, message: str) -> None:
    """One line: the file, the record's number, what was expected and what was found."""
    files = write(example(), record, example())
    with pytest.raises(BadInput) as caught:
        rows(files, pa.schema([("a", kind)]))
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{files[0].uri}: record 1: ")
    assert "\n" not in str(caught.value)


def test_a_missing_value_that_must_be_there(write: Write) -> None:
    """A column that is not nullable names the record without a value."""
    schema = pa.schema([pa.field("a", pa.int64(), nullable=False)])
    with pytest.raises(BadInput, match="record 1: column a: expected a value, got none"):
        rows(write(example(a=LONG), example(b=LONG)), schema)


def test_other_features_are_left_out(write: Write) -> None:
    """A schema may name few of the features, and some that are nowhere; those are null."""
    schema = pa.schema([("b", pa.float32()), ("nowhere", pa.list_(pa.string()))])
    assert rows(write(example(a=LONG, b=FLOAT), example()), schema) == [
        {"b": 0.5, "nowhere": None},
        {"b": None, "nowhere": None},
    ]


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        ([[1, None]], pa.list_(pa.int64()), "column a: expected arrays without nulls"),
        (
            [[[1], [None]]],
            pa.list_(pa.list_(pa.int64())),
            "column a: expected arrays without nulls",
        ),
        ([[[1], None]], pa.list_(pa.list_(pa.int64())), "column a: expected arrays without nulls"),
        ([True], pa.bool_(), "column a: expected long, int, float, .* got bool"),
        ([[[[1]]]], pa.list_(pa.list_(pa.list_(pa.int64()))), "column a: .* got list<"),
    ],
)
def test_what_cannot_be_written(tmp_path: Path, values: Any, kind: Any, message: str) -> None:
    """A null in an array and a type that TFRecord lacks are refused, and no file is left."""
    schema = pa.schema([("a", kind)])
    batch = pa.RecordBatch.from_pylist([{"a": each} for each in values], schema)
    with pytest.raises(BadInput, match=message):
        write_file(str(tmp_path), "f", [batch], schema, "none")
    assert list(tmp_path.iterdir()) == []


def test_many_rows_in_blocks(tmp_path: Path) -> None:
    """Rows of several blocks, of fixed and of varying sizes, keep their order and values."""
    dice = np.random.default_rng(3)
    rows_wanted = 30_000
    batch = pa.record_batch(
        {
            "i": dice.integers(-(2**40), 2**40, rows_wanted),
            "image": [dice.bytes(size) for size in dice.integers(0, 600, rows_wanted)],
            "x": pa.FixedSizeListArray.from_arrays(
                pa.array(dice.standard_normal(20 * rows_wanted).astype(np.float32)), 20
            ).cast(pa.list_(pa.float32())),
        }
    )
    write_file(str(tmp_path), "f", [batch], batch.schema, "none")
    read = list(read_batches(find_files(str(tmp_path / "f"))[0], batch.schema))
    assert len(read) > 2
    assert pa.Table.from_batches(read).combine_chunks().equals(pa.table(batch).combine_chunks())


def test_conflicts_name_both_files(write: Write) -> None:
    """A feature of two kinds is refused with the first record of each, in whichever file."""
    write(example(a=LONG, b=LONG), example(), name="1")
    files = find_files(f"{Path(write(example(), example(a=FLOAT), name='2')[0].uri).parent}")
    one, two = (file.uri for file in files)
    with pytest.raises(BadInput) as caught:
        schema_of(files, 10)
    assert str(caught.value) == (
        f"feature a: expected int64 as in {one}: record 0, got float in {two}: record 1"
    )
    assert schema_of(files, 2).names == ["a", "b"], "a sample of two takes one record of each file"


def test_the_sample_decides_what_is_an_array(write: Write) -> None:
    """A scalar by the first record may be an array by the second; a later one says what to do."""
    files = write(example(a=LONG), example(a=feature("INT64", [1, 2])))
    assert schema_of(files, 2).types == [pa.list_(pa.int64())]
    assert schema_of(files, 1).types == [pa.int64()]
    assert rows(files, schema_of(files, 2)) == [{"a": [1]}, {"a": [1, 2]}]


def test_no_features_no_schema(write: Write) -> None:
    """Without a feature in the sample no schema can be inferred."""
    with pytest.raises(BadInput, match="expected a schema, or records with features, got neither"):
        schema_of(write(example(), b""), 10)


def test_files_are_found(tmp_path: Path) -> None:
    """A file, a folder's files or a pattern's; hidden ones are no data."""
    for name in ("a-0", "a-1", "b", "_SUCCESS", ".a.partial"):
        (tmp_path / name).touch()

    def names(path: str) -> list[str]:
        return [file.name for file in find_files(path)]

    assert names(str(tmp_path)) == names(f"file://{tmp_path}/") == ["a-0", "a-1", "b"]
    assert names(f"{tmp_path}/a-*") == ["a-0", "a-1"]
    assert names(f"file://{tmp_path}/b") == ["b"]
    for path in (f"{tmp_path}/c", f"{tmp_path}/c*", f"{tmp_path}/c/d"):
        with pytest.raises(BadInput, match="expected TFRecord files, got none there"):
            names(path)
    with pytest.raises(BadInput, match="nofs://a/b"):
        names("nofs://a/b")


def test_folders_of_partitions(tmp_path: Path) -> None:
    """Their values are columns after the records' own, however deep, of Spark's types."""
    batch = pa.record_batch({"a": pa.array([7, 8]), "kind": pa.array([b"x", b"x"])})
    for day, kind in (("2020-01-01", "1"), ("2020-01-02", "__HIVE_DEFAULT_PARTITION__")):
        folder = tmp_path / f"by/day={day}/kind={kind}/name=a%2Fb"
        folder.mkdir(parents=True)
        (folder.parent / "_SUCCESS").touch()
        write_file(str(folder), "part-0.tfrecord", [batch], batch.schema, "none")
    files = find_files(str(tmp_path / "by"))
    schema = schema_of(files, 10)
    assert schema == pa.schema(
        {"a": pa.int64(), "day": pa.date32(), "kind": pa.int32(), "name": pa.string()}
    )
    found = rows(files, schema)
    assert [row["a"] for row in found] == [7, 8] * 2
    assert [row["kind"] for row in found] == [1, 1, None, None]
    assert found[3]["day"] == date(2020, 1, 2)
    assert {row["name"] for row in found} == {"a/b"}
    other = pa.schema({"kind": pa.string(), "a": pa.int64()})
    assert rows(files, other)[0] == {"kind": "1", "a": 7}
    with pytest.raises(BadInput, match="column day: expected int32, got 2020-01-01 in the folder"):
        rows(files, pa.schema({"day": pa.int32()}))
    # A folder of one partition states nothing above itself.
    inner = find_files(str(tmp_path / "by/day=2020-01-01"))
    assert schema_of(inner, 10).names == ["a", "kind", "name"]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "-2"], pa.int32()),
        (["1", "3000000000"], pa.int64()),
        (["1", "2.5"], pa.float64()),
        (["2020-01-01", None], pa.date32()),
        (["2020-13-01"], pa.string()),
        (["1", "a"], pa.string()),
        ([None], pa.string()),
    ],
)
def test_the_type_of_a_partition(values: list[str | None], kind: pa.DataType) -> None:
    """It is the narrowest that all values have."""
    assert partition_fields([(("p", value),) for value in values]) == [pa.field("p", kind)]


def test_other_folders_are_refused(tmp_path: Path) -> None:
    """So are partitions that some files lack; both would leave rows out."""
    (tmp_path / "train").mkdir()
    with pytest.raises(BadInput, match=r"train: expected a file, or a folder of partitionBy such"):
        find_files(str(tmp_path))
    (tmp_path / "train").rename(tmp_path / "p=1")
    for place in (tmp_path / "p=1", tmp_path):
        (place / "a").touch()
    with pytest.raises(BadInput, match="expected the same folders of partitionBy for all files"):
        find_files(str(tmp_path))


@pytest.mark.parametrize("level", [0, 1, 6, 9])
def test_files_that_zlib_has_compressed(level: int, tmp_path: Path) -> None:
    """They are known by their first bytes; one that is cut is an error with its name."""
    batch = pa.record_batch({"a": pa.array(range(3000)), "b": pa.array([b"b" * 40] * 3000)})
    write_file(str(tmp_path), "raw", [batch], batch.schema, "none")
    packed = zlib.compress((tmp_path / "raw").read_bytes(), level)
    (tmp_path / "raw").unlink()
    (tmp_path / "packed").write_bytes(packed)
    files = find_files(str(tmp_path))
    assert rows(files, schema_of(files, 10)) == batch.to_pylist()
    (tmp_path / "packed").write_bytes(packed[:-40])
    with pytest.raises(BadInput, match=r"packed: record \d+: expected whole ZLIB data, got: the"):
        rows(files, batch.schema)
