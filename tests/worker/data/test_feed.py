"""The feed of a worker: the rows in order, as views of what Spark has sent."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.errors import BadInput
from worker.data.feed import RowFeed


def stream(sizes: Sequence[int]) -> Iterator[Any]:
    """Record batches of these sizes; row i has the id i, two numbers, a text, and i % 3 words."""
    ids = iter(range(sum(sizes)))
    for size in sizes:
        rows = [next(ids) for _ in range(size)]
        yield pa.record_batch(
            {
                "id": pa.array(rows, pa.int64()),
                "x": pa.array([[i, i + 1] for i in rows], pa.list_(pa.float32())),
                "name": pa.array([f"row {i}" for i in rows], pa.string()),
                "words": pa.array([[i] * (i % 3) for i in rows], pa.list_(pa.int32())),
            }
        )


@given(sizes=st.lists(st.integers(0, 9), max_size=8), size=st.integers(1, 12))
def test_each_row_comes_once_however_the_stream_is_cut(sizes: list[int], size: int) -> None:
    """In order; all batches but the last are full; a ragged column gives the lists of each row."""
    feed, seen = RowFeed(stream(sizes), "rows"), 0
    while not feed.should_stop():
        batch = feed.next_batch(size)
        ids = batch["id"].tolist()
        assert ids == list(range(seen, min(seen + size, sum(sizes))))
        assert batch["x"].tolist() == [[i, i + 1] for i in ids]
        assert batch["name"].tolist() == [f"row {i}" for i in ids]
        assert [list(words) for words in batch["words"]] == [[i] * (i % 3) for i in ids]
        seen += len(ids)
    assert seen == sum(sizes)


def test_numbers_are_not_copied() -> None:
    """Lists of one length and plain numbers are views of Arrow's memory."""
    (batch,) = stream([8])
    given = RowFeed(iter([batch]), "rows").next_batch(5)
    for name, values in (("id", batch.column("id")), ("x", batch.column("x").values)):
        assert np.shares_memory(given[name], values.to_numpy()), name
    assert given["x"].shape == (5, 2)


def test_a_feed_that_was_ended_gives_no_rows() -> None:
    feed = RowFeed(stream([4, 4]), "rows")
    feed.next_batch(3)
    feed.terminate()
    assert feed.should_stop()
    with pytest.raises(
        BadInput, match=r"rows: expected a call only while should_stop\(\) is false"
    ):
        feed.next_batch(1)
