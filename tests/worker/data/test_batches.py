"""Minibatches: the order of rows does not depend on the stream's cuts or a worker's start."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shards.errors import BadInput
from worker.data.batches import Batches
from worker.data.columns import DATA, LABEL
from worker.data.image_spool import ImageSpool

SIZES = st.lists(st.integers(0, 9), max_size=12)
BATCH = st.integers(1, 12)
BLOCK = st.integers(1, 20)


def stream(sizes: Sequence[int]) -> Iterator[Any]:
    """Record batches of these sizes; row i has label i and pixels (i, i + 1, i + 2, i + 3)."""
    start = 0
    for size in sizes:
        labels = np.arange(start, start + size)
        pixels = [bytes([i % 256, (i + 1) % 256, (i + 2) % 256, (i + 3) % 256]) for i in labels]
        yield pa.record_batch({"data": pa.array(pixels, pa.binary()), "label": labels})
        start += size


def numbers(
    sizes: Sequence[int],
    batch_size: int,
    count: int,
    *,
    seed: int = 5,
    worker: str = "w",
    **options: Any,
) -> list[list[int]]:
    """The row numbers of the first `count` minibatches; their pixels are checked on the way."""
    found = []
    with Batches(stream(sizes), ImageSpool("rows"), batch_size, seed, worker, **options) as batches:
        for batch in islice(batches, count):
            labels = batch["label"]
            assert batch["data"].shape == (batch_size, 1, 2, 2)
            expected = (labels[:, None] + np.arange(4)).astype(np.uint8)
            assert np.array_equal(batch["data"].reshape(-1, 4), expected)
            found.append(labels.tolist())
    return found


@given(sizes=SIZES, batch_size=BATCH, block=BLOCK, shuffle=st.booleans())
def test_every_epoch_sees_every_row_once(
    sizes: list[int], batch_size: int, block: int, shuffle: bool
) -> None:
    """Cut at the epochs' ends, the sequence of rows is one permutation after another."""
    rows = sum(sizes)
    steps = -(-4 * rows // batch_size)
    found = numbers(sizes, batch_size, steps, shuffle=shuffle, shuffle_rows=block)
    assert len(found) == steps
    sequence = [number for batch in found for number in batch]
    for epoch in range(4):
        assert sorted(sequence[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


@given(sizes=SIZES, batch_size=BATCH, block=BLOCK, start=st.integers(0, 40), shuffle=st.booleans())
def test_a_later_start_equals_skipping(
    sizes: list[int], batch_size: int, block: int, start: int, shuffle: bool
) -> None:
    """A worker retried at step k gets exactly what step k and those after it would have had."""
    options: dict[str, Any] = {"shuffle": shuffle, "shuffle_rows": block}
    whole = numbers(sizes, batch_size, start + 5, **options)
    assert numbers(sizes, batch_size, 5, start_step=start, **options) == whole[start:]


@given(
    rows=st.integers(1, 60),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    batch_size=BATCH,
    block=BLOCK,
)
def test_the_stream_s_cuts_do_not_matter(
    rows: int, cuts: list[int], batch_size: int, block: int
) -> None:
    """The same rows in record batches of any sizes, empty ones too, give the same minibatches."""
    edges = sorted([0, *(min(cut, rows) for cut in cuts), rows])
    ragged = np.diff(edges).tolist()
    once = numbers(ragged, batch_size, 12, shuffle_rows=block)
    assert once == numbers([rows], batch_size, 12, shuffle_rows=block)


def test_seed_worker_and_epoch_each_change_the_order() -> None:
    """Same seed and name, same order; another seed, another worker or another epoch, another."""
    first, later, again = numbers([50], 50, 3)
    assert [first, later, again] == numbers([50], 50, 3)
    others = [numbers([50], 50, 1, seed=6)[0], numbers([50], 50, 1, worker="v")[0]]
    assert len({tuple(order) for order in (first, later, again, *others)}) == 5


def test_the_first_epoch_is_shuffled_within_blocks_as_rows_arrive() -> None:
    """The first batch needs one block of the stream and no more; later epochs mix all blocks."""
    taken = []

    def watched() -> Iterator[Any]:
        for batch in stream([10] * 10):
            taken.append(batch.num_rows)
            yield batch

    with Batches(watched(), ImageSpool("rows"), 5, 1, "w", shuffle_rows=20) as batches:
        first = next(batches)["label"].tolist()
        assert sum(taken) == 20
        assert first != sorted(first)
        sequence = first + [n for batch in islice(batches, 39) for n in batch["label"].tolist()]
    for block in range(5):
        inside = sequence[20 * block : 20 * block + 20]
        assert sorted(inside) == list(range(20 * block, 20 * block + 20))
    assert len({number // 20 for number in sequence[100:120]}) > 1


def test_unshuffled_rows_come_in_the_stream_s_order_for_ever() -> None:
    """Without shuffling, batches run through the stream and begin again where it ended."""
    assert numbers([3, 4], 3, 5, shuffle=False) == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 0, 1],
        [2, 3, 4],
        [5, 6, 0],
    ]


def test_fewer_rows_than_a_batch_go_round() -> None:
    """A partition of three rows fills a batch of eight with epochs after epochs of them."""
    batch = numbers([3], 8, 1)[0]
    assert [sorted(batch[:3]), sorted(batch[3:6])] == [[0, 1, 2], [0, 1, 2]]
    assert Counter(batch).total() == 8


@pytest.mark.parametrize("sizes", [[], [0], [0, 0]])
def test_no_rows_give_no_batch(sizes: list[int]) -> None:
    """An empty partition, or one of empty record batches, ends at once, wherever it starts."""
    assert numbers(sizes, 4, 3) == []
    assert numbers(sizes, 4, 3, start_step=7) == []


FLAT = np.arange(36, dtype=np.float64).reshape(3, 12)


@pytest.mark.parametrize(
    ("pixels", "dtype"),
    [
        (pa.array([bytes(range(12 * i, 12 * i + 12)) for i in range(3)]), np.uint8),
        (pa.array([bytes(range(12 * i, 12 * i + 12)) for i in range(3)], pa.binary(12)), np.uint8),
        (pa.array(FLAT.tolist(), pa.list_(pa.float64())), np.float32),
        (pa.array(FLAT.tolist(), pa.large_list(pa.int32())), np.float32),
        (pa.array(FLAT.tolist(), pa.list_(pa.float32(), 12)), np.float32),
    ],
    ids=lambda value: str(getattr(value, "type", "")),
)
@pytest.mark.parametrize("kind", [pa.int8(), pa.uint64(), pa.float64(), pa.bool_()])
def test_a_user_s_own_columns_are_taken(pixels: Any, dtype: type[Any], kind: Any) -> None:
    """Bytes stay uint8 and are an image, lists of any number become float32 and are a vector;
    labels of any type become int64."""
    batch = pa.record_batch(
        {"name": ["a", "b", "c"], "label": pa.array([1, 0, 1]).cast(kind), "image": pixels}
    )
    for part in (batch, batch.slice(1)):  # a slice has offsets into the same buffers
        with Batches(iter([part]), ImageSpool("rows"), len(part), 1, "w", shuffle=False) as batches:
            got = next(batches)
        assert got["data"].dtype == dtype
        assert got["data"].shape == (len(part), *((3, 2, 2) if dtype is np.uint8 else (12, 1, 1)))
        assert np.array_equal(got["data"].reshape(-1, 12), FLAT[3 - len(part) :])
        assert got["label"].dtype == np.int64
        assert got["label"].tolist() == [1, 0, 1][3 - len(part) :]


def record(data: list[bytes] | Any, **columns: Any) -> Any:
    return pa.record_batch({"data": data, "label": [0] * len(data), **columns})


def shape(channels: int, height: int, width: int) -> dict[str, list[int]]:
    return {"channels": [channels], "height": [height], "width": [width]}


@pytest.mark.parametrize(
    ("parts", "options", "text"),
    [
        (
            [record([bytes(4)] * 3), record([bytes(4), bytes(5)])],
            {},
            "worker w's rows, column data: row 4: expected 4 values, got 5",
        ),
        ([record([bytes(4), None])], {}, "column data: row 1: expected a value, got null"),
        ([record([bytes(5)])], {}, "column data: expected a square image"),
        (
            [record([[0.0, 1.0]] * 2), record([[0.0, 1.0], [2.0, float("nan")]])],
            {},
            "column data: row 3: expected finite numbers that float32 holds, got nan at position 1",
        ),
        (
            [record([[0.0, 1e300]])],
            {},
            "column data: row 0: expected finite numbers that float32 holds, got inf at position 1",
        ),
        (
            [record([bytes(4)])],
            {"columns": (replace(DATA, shape=(1, 3, 3)), LABEL)},
            "row 0: expected 9 values, got 4",
        ),
        (
            [record([bytes(4)], **shape(1, 2, 2)), record([bytes(4)], **shape(1, 1, 4))],
            {},
            r"row 1: expected images of (1, 2, 2), got (1, 1, 4)",
        ),
        (
            [record([bytes(4)], **shape(1, 1, 4))],
            {"columns": (replace(DATA, shape=(1, 2, 2)), LABEL)},
            "row 0: expected images of (1, 2, 2), got (1, 1, 4)",
        ),
        ([pa.record_batch({"label": [1]})], {}, "expected a column data or image, got label"),
        ([pa.record_batch({"data": [b"1"]})], {}, "expected a column label, got data"),
        ([pa.record_batch({"data": [b"1"], "label": [0.5]})], {}, "row 0: expected a whole number"),
        (
            [pa.record_batch({"data": [b"1"] * 3, "label": [0, 9, 10]})],
            {"classes": 10},
            "column label: row 2: expected a label in [0, 10), got 10",
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_number(
    parts: list[Any], options: dict[str, Any], text: str
) -> None:
    """Each error is one line that names the worker's row, counted over the whole partition."""
    spool = ImageSpool("worker w's rows", **options)
    with pytest.raises(BadInput) as caught:
        next(Batches(iter(parts), spool, 2, 1, "w"))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("size", "options"), [(0, {}), (1, {"shuffle_rows": 0}), (1, {"start_step": -1})]
)
def test_wrong_sizes_are_refused(size: int, options: dict[str, Any]) -> None:
    """Before a row is read."""
    with pytest.raises(BadInput, match="worker w: expected batch_size and shuffle_rows of 1 or"):
        Batches(stream([]), ImageSpool("rows"), size, 1, "w", **options)


def test_a_shape_of_one_extent_gives_vectors() -> None:
    """A shape with other than three extents counts whatever the shape columns say."""
    part = record([[1.0, 2.0, 3.0]], **shape(3, 1, 1))
    spool = ImageSpool("rows", (replace(DATA, shape=(3,)), LABEL))
    with Batches(iter([part]), spool, 1, 1, "w") as batches:
        assert next(batches)["data"].tolist() == [[1.0, 2.0, 3.0]]


def test_labels_may_be_absent_where_none_are_asked_for() -> None:
    """Without a label column, as in prediction, a batch is its images."""
    batch = pa.record_batch({"data": [bytes(4)]})
    with Batches(iter([batch]), ImageSpool("rows", (DATA,)), 1, 1, "w") as batches:
        assert sorted(next(batches)) == ["data"]


def test_the_spool_is_in_the_given_folder_and_is_removed(tmp_path: Path) -> None:
    """The spool is in the folder given, unseen there, and closing twice is harmless."""
    with pytest.raises(BadInput, match=r"spool in .*/none: No such file"):
        next(Batches(stream([4]), ImageSpool("rows", folder=tmp_path / "none"), 2, 1, "w"))
    batches = Batches(stream([4]), ImageSpool("rows", folder=tmp_path), 2, 1, "w")
    assert next(batches)["label"].size == 2
    assert batches.rows == 4
    batches.close()
    batches.close()
    assert list(tmp_path.iterdir()) == []
