"""The columns of a worker's rows: what decides about each, and rows that do not fit."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shards.errors import BadInput
from worker.data.batches import Batches
from worker.data.column_spool import ColumnSpool

FLOATS = pa.list_(pa.float32())
NESTED = pa.list_(FLOATS)


def batches(*columns: Any, **options: Any) -> Batches:
    """Minibatches of one column `x`, which comes as these record batches."""
    stream = iter([pa.record_batch({"x": column}) for column in columns])
    spool = ColumnSpool("worker w0's rows", **options)
    return Batches(stream, spool, 2, 1, "w0", epochs=1, shuffle=False)


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int64()), pa.large_list(pa.int64()), pa.list_(pa.int32()), FLOATS], ids=str
)
def test_ragged_lists_that_are_named(kind: Any) -> None:
    """The values of a minibatch are one array of the column's type, with where each row begins.

    So are lists that a record batch has of one length, and those of slices.
    """
    first = pa.array([[9], [1], [2, 3], []], kind)[1:]
    second = pa.array([[4], [5], []], kind)
    with batches(first, second, ragged=["x"]) as fed:
        columns: list[Any] = [batch["x"] for batch in fed]
    assert [column.values.tolist() for column in columns] == [[1, 2, 3], [4], [5]]
    assert [column.offsets.tolist() for column in columns] == [[0, 1, 3], [0, 0, 1], [0, 1, 1]]
    assert {column.values.dtype for column in columns} == {
        np.dtype(kind.value_type.to_pandas_dtype())
    }
    assert {column.offsets.dtype for column in columns} == {np.dtype(np.int64)}
    assert [row.tolist() for row in columns[0]] == [[1], [2, 3]]
    assert columns[0][-1].tolist() == [2, 3]
    assert columns[0].lengths.tolist() == [1, 2]
    assert columns[1].row_numbers.tolist() == [1]
    assert repr(columns[2]) == f"Ragged(2 rows, 1 values of {columns[2].values.dtype})"


def test_named_lists_of_one_length_are_ragged_as_well() -> None:
    """A list of a fixed size has the same form, and a column without lists keeps its own."""
    fixed = pa.array([[9, 9], [1, 2], [3, 4]], pa.list_(pa.int64(), 2))[1:]
    with batches(fixed, ragged=["x"]) as fed:
        column: Any = next(fed)["x"]
    assert (column.values.tolist(), column.offsets.tolist()) == ([1, 2, 3, 4], [0, 2, 4])
    with batches(pa.array([1, 2]), ragged=["x"]) as fed:
        assert next(fed)["x"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (
            [pa.array([[1], [2, 3]], FLOATS)],
            {},
            (
                "worker w0's rows, column x: row 1: expected 1 values, as in the first row, got 2;"
                " a column of lists that differ needs its name in `ragged`"
            ),
        ),
        (
            [pa.array([[1], [2]], FLOATS), pa.array([[1], [2, 3]], FLOATS)],
            {},
            (
                "worker w0's rows, column x: row 3: expected 1 values, as in the first row, got 2;"
                " a column of lists that differ needs its name in `ragged`"
            ),
        ),
        (
            [pa.array([[1], [2]], FLOATS), pa.array([[1, 2], [2, 3]], FLOATS)],
            {},
            (
                "worker w0's rows, column x: row 2: expected 1 values, as in the first row, got 2;"
                " a column of lists that differ needs its name in `ragged`"
            ),
        ),
        (
            [pa.array([[[1]], [[1, 2]]], NESTED)],
            {},
            (
                "worker w0's rows, column x: expected lists of lists of one length, got others;"
                " a column of lists that differ needs its name in `ragged`"
            ),
        ),
        (
            [pa.array([[1, 2], [3, None]], FLOATS)],
            {},
            (
                "worker w0's rows, column x: expected lists without nulls, got a null in row 1 of a"
                " batch"
            ),
        ),
        (
            [pa.array([[1, 2], [None, 3]], pa.list_(pa.float32(), 2))],
            {},
            (
                "worker w0's rows, column x: expected lists without nulls, got a null in row 1 of a"
                " batch"
            ),
        ),
        (
            [pa.array([[1], None], FLOATS)],
            {"ragged": ["x"]},
            (
                "worker w0's rows, column x: expected a value in each row, got a null in row 1 of a"
                " batch; coalesce(x, array()) of pyspark.sql.functions makes it an empty list"
            ),
        ),
        (
            [pa.array([[1], [2, None]], FLOATS)],
            {"ragged": ["x"]},
            (
                "worker w0's rows, column x: expected lists without nulls, got a null in row 1 of a"
                " batch"
            ),
        ),
        (
            [pa.array([1, None], pa.float32())],
            {},
            (
                "worker w0's rows, column x: expected a value in each row, got a null in row 1 of a"
                " batch"
            ),
        ),
        (
            [pa.array([[1], [2]], FLOATS)],
            {"ragged": ["words"]},
            "worker w0's rows: expected a column words, got x",
        ),
    ],
)
def test_rows_that_do_not_fit(columns: list[Any], options: dict[str, Any], message: str) -> None:
    """The first minibatch that would have them is refused, by column and row."""
    with batches(*columns, **options) as fed, pytest.raises(BadInput) as caught:
        list(fed)
    assert str(caught.value) == message


def test_lists_of_text_may_differ() -> None:
    """They are ragged in any case, so nothing depends on the first record batch."""
    words = pa.array([["a"], ["b", "c"]], pa.list_(pa.string()))
    with batches(words) as fed:
        column: Any = next(fed)["x"]
    assert column.values.tolist() == ["a", "b", "c"]
    assert [list(row) for row in column] == [["a"], ["b", "c"]]
