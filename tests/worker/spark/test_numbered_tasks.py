"""Tasks that read their rows themselves, as a job of Spark's core."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shards.errors import BadInput, GiveUp
from worker import spark as door
from worker.data.image_table import image_batch, image_schema
from worker.spark.dataframe_checks import check_columns, check_pythons, deal_rows
from worker.spark.worker_task import REPORT

WORKERS = 2  # the slots of the session that the tests share
SEEN = pa.schema([("part", pa.int64()), ("rows", pa.int64()), ("digest", pa.string())])


def table_of(rows: int, pixels: Any, batch_rows: int = 1000) -> Any:
    """Images of two pixels, in batches as a data source yields them."""
    schema = image_schema(pixels.type)
    starts = range(0, rows, batch_rows)
    return pa.Table.from_batches(
        image_batch(
            schema,
            np.arange(start, min(start + batch_rows, rows)),
            np.arange(start, min(start + batch_rows, rows)) % 10,
            (1, 1, 2),
            pixels.slice(start, batch_rows),
        )
        for start in starts
    )


def whole(rows: int) -> Any:
    """Pixels as bytes, some of which begin like an image file."""
    return pa.array([b"\x89P" if row % 7 == 0 else bytes([row % 256, 1]) for row in range(rows)])


def floats(rows: int) -> Any:
    """Pixels as numbers: also a negative zero, the smallest and the largest."""
    smallest, largest = np.finfo(np.float32).smallest_subnormal, np.finfo(np.float32).max
    values = [[-0.0, smallest], [largest, 1 / 3]]
    return pa.array([values[row % 2] for row in range(rows)], pa.list_(pa.float32()))


def batches_of(tasks: Any, source: Any = None) -> list[tuple[int, int, str]]:
    """Each batch of each task: the number of the task, the rows, and a digest of every value."""

    def look(rows: Iterator[Any], part: int, *_: Any) -> Iterator[Any]:
        from hashlib import sha256

        for batch in rows if source is None else source.batches(part):
            types = list(zip(batch.schema.names, map(str, batch.schema.types), strict=True))
            digest = sha256(repr((types, batch.to_pydict())).encode()).hexdigest()
            yield pa.record_batch([[part], [batch.num_rows], [digest]], schema=SEEN)

    return sorted(tuple(row) for row in door.run_tasks(tasks, look, SEEN, "look"))


@pytest.mark.parametrize(
    ("rows", "pixels"), [(2, whole), (9, floats), (1001, floats), (2050, whole), (24_001, whole)]
)
def test_the_rows_of_a_dataframe(rows: int, pixels: Any, spark: Any, tmp_path: Path) -> None:
    """Each task has the rows, the types and the record batches that the partition with its number
    has of a DataFrame: to the bit, in the same order."""
    table = table_of(rows, pixels(rows))
    frame = deal_rows(spark.createDataFrame(table), WORKERS, even=True, columns=["label", "data"])
    stored = door.store_rows(table, WORKERS, tmp_path)
    found = batches_of(door.NumberedTasks(spark, WORKERS), stored)
    assert found == batches_of(frame)
    assert sum(count for _, count, _ in found) == rows


def test_types_of_a_dataframe(spark: Any, tmp_path: Path) -> None:
    """A type that Spark does not have becomes the one that a DataFrame has for it, and the checks
    of columns find the same fault with either."""
    table = pa.table({"data": pa.array([b"x", b"y"], pa.large_binary()), "label": [[1], [2]]})
    stored, frame = door.store_rows(table, WORKERS, tmp_path), spark.createDataFrame(table)
    assert stored is not None
    numbered = door.NumberedTasks(spark, WORKERS)
    assert batches_of(numbered, stored) == batches_of(frame.coalesce(WORKERS))
    errors = []
    for rows in (stored, frame):
        with pytest.raises(BadInput) as caught:
            check_columns(rows)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert errors[0].startswith("the DataFrame, column label")


def test_other_tables_stay_dataframes(spark: Any, tmp_path: Path) -> None:
    """Fewer rows than workers, nulls and a table that Spark deals are left to a DataFrame."""
    few, nulls = table_of(1, whole(1)), pa.table({"label": [1, None]})
    large = pa.table({"data": [bytes(48 << 20), b""]})
    for table in (few, nulls, large):
        assert door.store_rows(table, WORKERS, tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_task_that_fails(spark: Any) -> None:
    """The error of a task is raised as from a DataFrame, with the traceback of its Python."""

    def refuse(*_: Any) -> Iterator[Any]:
        raise BadInput("row 3", expected="a label", got="none")

    def fail(*_: Any) -> Iterator[Any]:
        raise ValueError("no such luck")

    tasks = door.NumberedTasks(spark, WORKERS)
    with pytest.raises(BadInput, match=r"^row 3: expected a label, got none") as caught:
        door.run_tasks(tasks, refuse, REPORT, "tag")
    assert "in refuse" in "".join(caught.value.__notes__)
    with pytest.raises(GiveUp, match="a Spark task failed for good: ValueError: no such luck"):
        door.run_tasks(tasks, fail, REPORT, "tag")


def test_another_python(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a Python that is not this one is inspected before a job of numbered tasks."""
    tasks = door.NumberedTasks(spark, WORKERS)
    assert door.runs_this_python(tasks)
    assert check_pythons(tasks) == []
    monkeypatch.setattr(spark.sparkContext, "pythonExec", "/no/such/python")
    assert not door.runs_this_python(tasks)
    with pytest.raises(BadInput, match=r"Spark's Python \(/no/such/python\) is not there"):
        check_pythons(tasks)
