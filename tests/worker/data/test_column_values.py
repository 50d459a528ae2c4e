"""The table of types: what each column becomes, and what is refused with which remedy."""

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.ml.linalg import MatrixUDT, Vectors, VectorUDT
from pyspark.sql.pandas.types import to_arrow_type

from shards.errors import BadInput
from worker.data import column_values
from worker.data.arrow_images import number_rows, pixel_rows, read_nested_shape
from worker.data.batches import Batches
from worker.data.column_spool import ColumnSpool
from worker.data.column_values import VECTOR, column_array, number_array, slice_rows
from worker.data.feed import RowFeed

IMAGE = pa.struct(
    [
        ("origin", pa.string()),
        *((name, pa.int32()) for name in ("height", "width", "nChannels", "mode")),
        ("data", pa.binary()),
    ]
)


def vectors(*rows: Any) -> Any:
    """Vectors of Spark ML as Spark sends them."""
    names = [field.name for field in VECTOR]
    serial = [VectorUDT().serialize(row) for row in rows]
    return pa.array([dict(zip(names, each, strict=True)) for each in serial], VECTOR)


def image(height: int, width: int, channels: int = 1, mode: int = 0) -> dict[str, Any]:
    """An image of Spark's whose bytes count from 0."""
    return {
        "origin": "file:/a.png",
        "height": height,
        "width": width,
        "nChannels": channels,
        "mode": mode,
        "data": bytes(range(height * width * channels)),
    }


def fed(*columns: Any, size: int = 4, **options: Any) -> Any:
    """The first minibatch of the column `x` that comes as these record batches."""
    stream = iter([pa.record_batch({"x": column}) for column in columns])
    spool = ColumnSpool("worker w0's rows", **options)
    with Batches(stream, spool, size, 1, "w0", epochs=1, shuffle=False) as batches:
        return next(batches)["x"]


def test_vectors_are_of_the_type_that_spark_has() -> None:
    kind = to_arrow_type(VectorUDT())
    assert [field.name for field in kind] == [field.name for field in VECTOR]
    assert column_values.is_vector(kind)
    assert not column_values.is_vector(to_arrow_type(MatrixUDT()))


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([True, False]), np.array([True, False])),
        (pa.array([1, 2], pa.int8()), np.array([1, 2], np.int8)),
        (
            pa.array([Decimal("1.25"), Decimal("-3.50")], pa.decimal128(15, 2)),
            np.array([1.25, -3.5]),
        ),
        (
            pa.array([[Decimal("1.25")], [Decimal("2.00")]], pa.list_(pa.decimal128(5, 2))),
            np.array([[1.25], [2.0]]),
        ),
        (
            vectors(Vectors.dense([1, 0, 2]), Vectors.dense([3, 4, 5])),
            np.array([[1.0, 0, 2], [3, 4, 5]]),
        ),
        (
            vectors(Vectors.sparse(3, [1], [5.0]), Vectors.dense([3, 4, 5])),
            np.array([[0.0, 5, 0], [3, 4, 5]]),
        ),
        (
            vectors(Vectors.sparse(3, [], []), Vectors.sparse(3, [0, 2], [5.0, 6.0])),
            np.array([[0.0, 0, 0], [5, 0, 6]]),
        ),
        (vectors(Vectors.dense([]), Vectors.sparse(0, [], [])), np.empty((2, 0))),
        (
            pa.array([[[[1.0, 2], [3, 4]]]] * 2, pa.list_(pa.list_(pa.list_(pa.float32())))),
            np.array([[[[1, 2], [3, 4]]]] * 2, np.float32),
        ),
        (
            pa.array([image(2, 1, 3, 16)] * 2, IMAGE),
            np.array([[[[0], [3]], [[1], [4]], [[2], [5]]]] * 2, np.uint8),
        ),
        (
            pa.array([date(2020, 1, 2), date(1969, 12, 31)]),
            np.array(["2020-01-02", "1969-12-31"], "M8[D]"),
        ),
        (
            pa.array([datetime(2020, 1, 2, 3, tzinfo=UTC)] * 2, pa.timestamp("us", "UTC")),
            np.array(["2020-01-02T03"] * 2, "M8[us]"),
        ),
        (pa.array(["", "b"]), np.array(["", "b"], object)),
        (pa.array([b"", b"b"]), np.array([b"", b"b"], object)),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_what_a_column_becomes(column: Any, expected: Any) -> None:
    """The same from a worker's rows, from the feed and in slices of a longer array."""
    longer = pa.concat_arrays([column, column, column])
    for got in (
        column_array(column, "x"),
        column_array(longer.slice(2, 2), "x"),
        fed(column),
        fed(longer, size=2),
        RowFeed(iter([pa.record_batch({"x": column})]), "rows").next_batch(2)["x"],
    ):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("kind", "rows", "shape"),
    [
        (pa.list_(pa.float32()), [[]] * 6, (4, 0)),
        (pa.list_(pa.list_(pa.float32())), [[[]]] * 6, (4, 1, 0)),
        (pa.list_(pa.list_(pa.float32())), [[]] * 6, (4, 0, 0)),
        (pa.list_(pa.bool_()), [[]] * 6, (4, 0)),
        (pa.string(), [""] * 6, (4,)),
        (pa.binary(), [b""] * 6, (4,)),
    ],
    ids=str,
)
def test_empty_in_every_row(kind: Any, rows: list[Any], shape: tuple[int, ...]) -> None:
    """Lists, text and bytes that are empty in all rows are no error."""
    assert fed(pa.array(rows, kind)).shape == shape
    named = fed(pa.array(rows, kind), ragged=["x"])
    assert len(named) == 4
    assert all(not len(row) or row.size == 0 for row in named)


@pytest.mark.parametrize(
    ("column", "line"),
    [
        (
            vectors(Vectors.dense([1, 2]), Vectors.sparse(3, [1], [5.0])),
            "column x: expected vectors of one size, got 2 and 3 values in rows 0 and 1 of a batch",
        ),
        (
            pa.array([Decimal(1)], pa.decimal128(38, 18)),
            (
                "column x: expected decimals of up to 15 digits, which float64 holds exactly, got"
                " decimal128(38, 18): cast it to double"
            ),
        ),
        (
            pa.array([{"a": 1, "b": 2}]),
            (
                "column x: expected numbers, lists of numbers or vectors, got a struct of a, b:"
                " select its fields as columns"
            ),
        ),
        (
            pa.array([[{"a": 1, "b": 2}]]),
            "got a struct of a, b: select its fields as columns",
        ),
        (
            pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
            "got a map: take its values by pyspark.sql.functions.element_at",
        ),
        (
            pa.array([{}], to_arrow_type(MatrixUDT())),
            "got a matrix of Spark ML: give its values as a list of numbers",
        ),
        (pa.array([None, None]), "got null: leave it out"),
        (pa.array([None, None], pa.int32()), "expected a value in each row, got a null in row 0"),
        (pa.array([None], VECTOR), "got a null"),
        (
            pa.array([image(2, 2), image(2, 3)], IMAGE),
            "expected images of one size, got 1x2x2 and 1x2x3 in rows 0 and 1 of a batch: resize",
        ),
        (
            pa.array([image(2, 2), image(2, 2, -1)], IMAGE),
            'one in row 1 of a batch that Spark could not read: read them with .option("dropInv',
        ),
        (
            pa.array([image(2, 2, mode=5)], IMAGE),
            "expected images of bytes, got 4 bytes of OpenCV's type 5 in row 0 of a batch",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value.type)[:30],
)
def test_what_is_refused(column: Any, line: str) -> None:
    """One line names the column, what came, and the remedy."""
    with pytest.raises(BadInput) as caught:
        fed(column)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_vectors_of_another_size_in_a_later_batch() -> None:
    """They are refused when they are read, whatever is taken first."""
    one, two = (vectors(*[Vectors.dense([1.0] * size)] * 3) for size in (2, 3))
    with pytest.raises(BadInput, match=r"row 3: expected 2 values, as in the first row, got 3$"):
        fed(one, two, size=5)


def test_a_wide_sparse_column_is_not_filled_in_at_once() -> None:
    """Rows of a feed come in slices, of which the zeros take little memory; none is lost."""
    wide = vectors(*(Vectors.sparse(1 << 20, [row], [float(row)]) for row in range(40)))
    batch = pa.record_batch({"x": wide})
    slices = list(slice_rows(batch))
    assert [len(piece) for piece in slices] == [8] * 5
    found = fed(wide, size=3)
    assert found.shape == (3, 1 << 20)
    assert [row.argmax() for row in found] == [0, 1, 2]


@pytest.mark.parametrize(
    ("column", "line"),
    [
        (pa.array(["a"]), "got string: index it by pyspark.ml.feature.StringIndexer, or cast it"),
        (pa.array([date(2020, 1, 1)]), "convert it by pyspark.sql.functions.unix_timestamp"),
        (pa.array([b"ab", b"a"]), "expected rows of one length, got others"),
        (pa.array([[1.0], [1.0, 2.0]]), "expected rows of one length, got others"),
        (pa.array([[[1.0]], [[1.0, 2.0]]]), "expected lists of one length, got others"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value.type),
)
def test_what_a_network_refuses(column: Any, line: str) -> None:
    with pytest.raises(BadInput) as caught:
        number_array(column, "the column")
    assert line in str(caught.value)


def test_a_network_reads_bytes_as_pixels() -> None:
    found = number_array(pa.array([b"\x01\xff", b"\x02\x03"]), "x")
    assert found.dtype == np.uint8
    assert found.tolist() == [[1, 255], [2, 3]]


def test_a_caffe_net_reads_the_same_numbers() -> None:
    """As float32: vectors, decimals and lists of lists, which state an image's shape."""
    assert pixel_rows(vectors(Vectors.sparse(3, [1], [5.0])), "x").tolist() == [[0, 5, 0]]
    nested = pa.array([[[[1.0, 2], [3, 4]]]] * 2)
    assert pixel_rows(nested, "x").tolist() == [[1, 2, 3, 4]] * 2
    assert read_nested_shape(nested) == (1, 2, 2)
    assert read_nested_shape(pa.array([[[1.0, 2, 3]] * 2])) == (1, 2, 3)
    assert read_nested_shape(pa.array([[1.0, 2, 3]])) is None
    decimals = pa.array([Decimal("1.25")], pa.decimal128(5, 2))
    assert number_rows(decimals, "x").tolist() == [[1.25]]
