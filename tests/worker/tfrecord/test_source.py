"""Spark's data source `tfrecord`: files to DataFrames and back, and its errors."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

import worker
from shards.errors import BadInput
from worker.job import function_run
from worker.tfrecord.files import find_files, read_file, write_file
from worker.tfrecord.source import _Writer, _Written

DATA = Path(__file__).parents[2] / "data" / "tfrecord"
SCHEMA = "i long, d double, s string, b binary, a array<float>, q array<array<int>>"
ROWS = [
    (1, 2.5, "é", b"\0\xff", [1.0, -2.0], [[1], [], [2, -3]]),
    (-(2**60), None, "", b"", [], []),
    (None, 0.5, None, None, None, None),
]


@pytest.fixture
def source(spark: Any) -> Any:
    """The shared session, which knows the data source."""
    spark.dataSource.register(worker.TFRecord)
    return spark


def test_frames_come_back(source: Any, tmp_path: Path) -> None:
    """A DataFrame is written and read, raw and gzipped files together, by a schema or without."""
    df = source.createDataFrame(ROWS, SCHEMA).repartition(2)
    path = str(tmp_path / "out")
    write = df.write.format("tfrecord").mode("append")
    write.save(path)
    write.option("compression", "gzip").save(path)
    files = find_files(path)
    assert sorted({"".join(Path(file.name).suffixes) for file in files}) == [
        ".tfrecord",
        ".tfrecord.gz",
    ]
    read = source.read.format("tfrecord").schema(df.schema).load(path)
    assert read.rdd.getNumPartitions() == len(files) == 4
    assert sorted(read.collect(), key=str) == sorted([*df.collect(), *df.collect()], key=str)
    inferred = source.read.format("tfrecord").option("sample", 100).load(path)
    assert inferred.schema.simpleString() == (
        "struct<a:array<float>,b:binary,d:float,i:bigint,q:array<array<bigint>>,s:binary>"
    )

    df.coalesce(1).write.format("tfrecord").mode("overwrite").save(path)
    assert source.read.format("tfrecord").schema(df.schema).load(path).count() == 3
    assert "_SUCCESS" in {file.name for file in Path(path).iterdir()}


def test_folders_of_partition_by(source: Any, tmp_path: Path) -> None:
    """They are read as Spark reads its own, with a schema and without."""
    path = str(tmp_path / "by")
    batch = pa.record_batch({"a": pa.array([1, 2])})
    for day in (1, 2):
        write_file(f"{path}/day={day}", "part-0.tfrecord", [batch], batch.schema, "none")
    read = source.read.format("tfrecord")
    df = read.load(path)
    assert df.schema.simpleString() == "struct<a:bigint,day:int>"
    expected = [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert sorted(map(tuple, df.collect())) == expected
    given = read.schema("day string, a long").load(path)
    assert sorted((row.a, int(row.day)) for row in given.collect()) == expected
    assert function_run.table_format(path) == "tfrecord"


def test_files_of_another_writer(source: Any) -> None:
    """One file or several, by their paths."""
    read = source.read.format("tfrecord")
    (row,) = read.load(str(DATA / "sequence.tfrecord")).collect()
    assert row.asDict() == {
        "frames": [[0.5], [1.5, 2.5]],
        "label": [7, 9],
        "length": 2,
        "tokens": [[1, 2], [3]],
    }
    both = [str(DATA / "sequence.tfrecord"), str(DATA / "example.tfrecord")]
    assert read.schema("name binary").load(both).count() == 3


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["a.tfrecords", "_SUCCESS"], "tfrecord"),
        (["day=1/_SUCCESS", "day=2/a.tfrec.gz"], "tfrecord"),
        (["_SUCCESS", "part-r-00000"], "tfrecord"),
        (["day=1/part-r-00000"], "tfrecord"),
        (["a.snappy.parquet", ".a.crc"], "parquet"),
        (["_SUCCESS"], ""),
    ],
)
def test_a_folder_of_tables_is_known(tmp_path: Path, names: list[str], kind: str) -> None:
    """By suffixes of any writer, or by the content of files without one, as Hadoop writes."""
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        data = (DATA / "example.tfrecord").read_bytes() if "part-r" in name else b""
        (tmp_path / name).write_bytes(data)
    assert function_run.table_format(str(tmp_path)) == kind


def test_wrong_input_is_named(tmp_path: Path) -> None:
    """Files, columns and options: one line each, before a task starts."""
    flipped = bytearray((DATA / "example.tfrecord").read_bytes())
    flipped[50] ^= 1
    (tmp_path / "flipped").write_bytes(flipped)
    (tmp_path / "text").write_text("a,b,c,d,e,f,g\n")
    (tmp_path / "empty").mkdir()
    example = str(DATA / "example.tfrecord")
    date = StructType().add("day", "date")

    def source(path: str = example, **options: str) -> worker.TFRecord:
        return worker.TFRecord({"path": path, **options})

    for work, message in (
        (source(f"{tmp_path}/none").schema, f"{tmp_path}/none: expected TFRecord files, got none"),
        (source(f"{tmp_path}/empty").schema, f"{tmp_path}/empty: expected TFRecord files, got no"),
        (source(f"file:{tmp_path}/text").schema, f"{tmp_path}/text: record 0: expected the lengt"),
        (source(f"{tmp_path}/flipped").schema, f"{tmp_path}/flipped: record 0: expected the check"),
        (source(sample="0").schema, "tfrecord, option sample: expected a number from 1, got 0"),
        (source(samples="3").schema, "tfrecord: expected the options sample and compression, got"),
        (worker.TFRecord({}).schema, "tfrecord: expected a path, got none"),
        (lambda: source().reader(date), "column day: expected long, int, float, double, string,"),
        (lambda: source().writer(date, False), "column day: expected long, int, float, double,"),
        (
            lambda: source(compression="zip").writer(StructType(), False),
            "tfrecord, option compression: expected none or gzip, got zip",
        ),
    ):
        with pytest.raises(BadInput) as caught:
            work()
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)


def test_a_lost_attempt_leaves_no_row(tmp_path: Path) -> None:
    """The commit removes what a task wrote whose attempt does not count."""
    schema = pa.schema([("a", pa.int64())])
    batch = pa.RecordBatch.from_pylist([{"a": 1}], schema)
    names = ["part-00000-1-job.tfrecord", "part-00000-2-job.tfrecord", "part-00000-1-old.tfrecord"]
    for name in names:
        write_file(str(tmp_path), name, [batch], schema, "none")
    (tmp_path / "notes").touch()
    _Writer(str(tmp_path), schema, "none", False, "job").commit([_Written(names[1]), None])
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*names[1:], "notes", "_SUCCESS"}
    assert (
        sum(
            len(block.starts)
            for file in find_files(f"{tmp_path}/*.tfrecord")
            for block in read_file(file)
        )
        == 2
    )
    _Writer(str(tmp_path), schema, "none", True, "new").commit([])
    assert {path.name for path in tmp_path.iterdir()} == {"notes", "_SUCCESS"}


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    """What tasks of a failed job wrote is removed, and nothing else."""
    for name in ("part-00000-1-job.tfrecord", "part-00000-1-old.tfrecord", "notes"):
        (tmp_path / name).touch()
    _Writer(str(tmp_path), pa.schema([]), "none", True, "job").abort([None])
    assert {path.name for path in tmp_path.iterdir()} == {"part-00000-1-old.tfrecord", "notes"}
