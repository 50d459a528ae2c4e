"""Feature ids: `worker.hashed` is Spark's `xxhash64` bit for bit."""

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import functions

import worker
from shards.errors import BadInput
from worker.data.batches import Batches
from worker.data.column_spool import ColumnSpool
from worker.data.column_values import column_arrays

SCHEMA = (
    "text string, long long, int int, short short, byte byte, bool boolean, double double,"
    " float float, day date, time timestamp, local timestamp_ntz, bytes binary,"
    " decimal decimal(12,2), spell interval day to second, words array<string>,"
    " numbers array<long>, nested array<array<int>>"
)
NAMES = [part.split()[0] for part in SCHEMA.split(", ")]

INSTANTS = st.integers(-(2**51), 2**51).map(
    lambda microseconds: datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)
)


def whole(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


TEXTS = st.text(max_size=90).map(lambda text: text.encode("utf-8", "ignore").decode())
ROWS = st.tuples(
    *(
        st.none() | values
        for values in (
            TEXTS,
            whole(64),
            whole(32),
            whole(16),
            whole(8),
            st.booleans(),
            st.floats() | st.just(-0.0),
            st.floats(width=32) | st.just(-0.0),
            st.dates(date(1902, 1, 1), date(2100, 1, 1)),
            INSTANTS,
            INSTANTS.map(lambda moment: moment.replace(tzinfo=None)),
            st.binary(max_size=80).map(bytearray),
            st.integers(-(10**11), 10**11).map(lambda cents: Decimal(cents) / 100),
            st.timedeltas(timedelta(-1000), timedelta(1000)),
            st.lists(st.none() | TEXTS, max_size=5),
            st.lists(st.none() | whole(64), max_size=5),
            st.lists(st.none() | st.lists(st.none() | whole(32), max_size=3), max_size=3),
        )
    )
)

FULL_ROW = (
    *("text", 2**62, 2**30, 2**14, 2**6, True, 0.1, 0.5, date(2000, 2, 29)),
    *(datetime(2000, 1, 1, tzinfo=UTC), datetime(2000, 1, 1), bytearray(b"bytes")),  # noqa: DTZ001
    *(Decimal("0.25"), timedelta(1), ["one", "two"], [1, 2], [[1], []]),
)


@pytest.fixture(scope="module")
def table(spark: Any) -> Any:
    """Rows made by hypothesis, with Spark's hashes of their columns, in one DataFrame.

    One row has no values, and one has all of them, whatever hypothesis draws.
    """
    rows: list[Any] = [(None,) * len(NAMES), FULL_ROW]

    @settings(
        max_examples=120, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(row=ROWS)
    def collect(row: Any) -> None:
        rows.append(row)

    collect()
    assert len(rows) > 100
    df = spark.createDataFrame(rows, SCHEMA)
    literal = functions.lit("feature")
    hashes = [functions.xxhash64(name).alias(f"hash of {name}") for name in NAMES]
    ids = [functions.xxhash64(literal, name).alias(f"id of {name}") for name in NAMES]
    tags = functions.transform(
        functions.coalesce("words", functions.array()),
        lambda word: functions.xxhash64(literal, "long", word),
    )
    every = functions.xxhash64(literal, *NAMES[:12], functions.lit("x"), *NAMES[12:])
    return df.select("*", *hashes, *ids, tags.alias("tags"), every.alias("every")).toArrow()


@pytest.mark.parametrize("name", NAMES)
def test_a_column_has_the_hashes_of_spark(table: Any, name: str) -> None:
    """Alone, after a literal, and in slices of it."""
    column = table.column(name)
    expected = table.column(f"hash of {name}").to_numpy()
    assert np.array_equal(worker.hashed(column), expected)
    ids = worker.hashed("feature", column)
    assert ids.dtype == np.int64
    assert np.array_equal(ids, table.column(f"id of {name}").to_numpy())
    part = column.combine_chunks().slice(3, 50)
    assert np.array_equal(worker.hashed(part), expected[3:53])


def test_columns_chain_and_elements_have_hashes_of_their_own(table: Any) -> None:
    """Seventeen columns and two literals in one hash; a hash for each word of each row."""
    columns = [table.column(name) for name in NAMES]
    every = worker.hashed("feature", *columns[:12], "x", *columns[12:])
    assert np.array_equal(every, table.column("every").to_numpy())
    words = [row or [] for row in table.column("words").to_pylist()]
    tags = worker.hashed(
        "feature", table.column("long"), pa.array(words, pa.list_(pa.string())), elements=True
    )
    assert [row.tolist() for row in tags] == table.column("tags").to_pylist()


def test_arrays_of_minibatches_are_hashed_as_their_columns(table: Any) -> None:
    """What `ctx.batches` gives, of rows without nulls, has the hashes of the Arrow columns."""
    names = ["text", "long", "words"]
    full = table.select(names)
    for name in names:
        full = full.filter(pa.compute.is_valid(full.column(name)))
    words = [all(word is not None for word in row["words"]) for row in full.to_pylist()]
    full = full.filter(pa.array(words, pa.bool_())).combine_chunks()
    assert full.num_rows
    stream = full.to_batches()
    spool = ColumnSpool("rows", ragged=["words"])
    with Batches(stream, spool, full.num_rows, 1, "w0", epochs=1, shuffle=False) as batches:
        batch: Any = next(batches)
    for name in names:
        assert np.array_equal(worker.hashed(batch[name]), worker.hashed(full.column(name))), name
    tags = worker.hashed("tag", batch["words"], elements=True)
    expected = worker.hashed("tag", full.column("words"), elements=True)
    assert np.array_equal(tags.values, expected.values)
    assert np.array_equal(tags.offsets, batch["words"].offsets)
    plain = column_arrays(full.select(["text", "long"]), "rows")
    pairs = worker.hashed("pair", plain["text"], plain["long"])
    assert np.array_equal(pairs, worker.hashed("pair", full.column("text"), full.column("long")))


def test_other_forms_of_a_column() -> None:
    """Dictionaries, views, fixed sizes, wide offsets and lists of Python have the plain hashes."""
    plain = pa.array(["a", None, "", "long enough for two stripes of thirty-two bytes and a tail"])
    expected = worker.hashed(plain).tolist()
    for other in (
        plain.dictionary_encode(),
        plain.cast(pa.large_string()),
        plain.cast(pa.string_view()),
        plain.cast(pa.binary()),
        pa.chunked_array([plain[:1], plain[1:]]),
        plain.to_pylist(),
    ):
        assert worker.hashed(other).tolist() == expected
    lists = pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2))
    assert worker.hashed(lists[1:]).tolist() == worker.hashed([[3, 4]]).tolist()
    assert worker.hashed(np.array([[1, 2], [3, 4]])).tolist() == worker.hashed(lists).tolist()
    assert worker.hashed(pa.array([b"ab"], pa.binary(2))).tolist() == worker.hashed(["ab"]).tolist()
    assert worker.hashed(pa.nulls(2)).tolist() == [42, 42]
    assert worker.hashed([]).tolist() == []


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ([], {}, "hashed: expected columns of one length, at least one, got none"),
        (["name"], {}, "hashed: expected columns of one length, at least one, got none"),
        ([[1], [1, 2]], {}, "hashed: expected columns of one length, at least one, got 1 and 2"),
        ([np.zeros(2, np.uint64)], {}, "hashed: column 0: expected text, bytes, .* got uint64"),
        ([np.zeros(2, np.float16)], {}, "column 0: expected text, bytes, .* got (half|float16)"),
        (["f", [{"a": 1}]], {}, "hashed: column 1: expected text, .* got struct<a: int64>"),
        ([[1, "a"]], {}, "hashed: column 0: expected a column of one type, got another"),
        ([[object()]], {}, "hashed: column 0: expected a column of one type, got another"),
        ([3], {}, "hashed: column 0: expected a column of one type, got another"),
        (
            [np.array(["2020-01-01T00:00:00.000000001"], "M8[ns]")],
            {},
            "column 0: expected times in whole microseconds, as Spark has them",
        ),
        (["f", [1]], {"elements": True}, "column 1: expected lists, for `elements`, got int64"),
        ([[1], "f"], {"elements": True}, "elements: expected a column of lists at the end"),
        ([[["a"], None]], {"elements": True}, r"column 0: expected lists, got a null; coalesce\("),
        ([[1]], {"elements": 1}, "hashed: elements: expected True or False"),
    ],
)
def test_what_is_not_hashed_is_named(columns: Any, options: Any, message: str) -> None:
    """One line says which column, and what was expected."""
    with pytest.raises(BadInput, match=message):
        worker.hashed(*columns, **options)
