"""The columns of a worker's rows: what decides about each, and rows that do not fit."""

from typing import Any

import pyarrow as pa
import pytest

from shards.errors import BadInput
from worker.data.feed import ColumnBatches

FLOATS = pa.list_(pa.float32())
NESTED = pa.list_(FLOATS)


def batches(*columns: Any, **options: Any) -> ColumnBatches:
    """Minibatches of one column `x`, which comes as these record batches."""
    stream = iter([pa.record_batch({"x": column}) for column in columns])
    return ColumnBatches(stream, 2, 1, "w0", epochs=1, shuffle=False, **options)


def test_ragged_lists_that_are_named() -> None:
    """An array a row, also where the lists of a record batch have one length."""
    column = pa.array([[1], [2, 3], [], [4]], FLOATS)
    with batches(column, ragged=["x"]) as fed:
        rows = [list(row) for batch in fed for row in batch["x"]]
    assert rows == [[1], [2, 3], [], [4]]


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
    """They are objects in any case, so nothing depends on the first record batch."""
    words = pa.array([["a"], ["b", "c"]], pa.list_(pa.string()))
    with batches(words) as fed:
        assert [list(row) for row in next(fed)["x"]] == [["a"], ["b", "c"]]
