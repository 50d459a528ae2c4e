"""The values of columns as NumPy arrays: one table of types for functions, networks and streams.

    integers, floats, booleans       arrays of their type, (rows,)
    decimals of up to 15 digits      float64, which holds them exactly
    vectors of Spark ML              float64 (rows, size), the zeros of sparse ones filled in;
                                     `SparseVectors`, where the caller asks for ragged rows
    lists of these, however deep     arrays (rows, length, ...), if all lists are of one length;
                                     a `Ragged`, where the caller asks for it
    images of Spark's image schema   uint8 (rows, channels, height, width)
    dates, timestamps, intervals     datetime64 and timedelta64; a network refuses them
    text, bytes                      objects `str` and `bytes`; a network refuses text, and reads
                                     bytes of one length as uint8 (rows, length)
    anything else                    refused, with the remedy

So a column of numbers never becomes Python objects, except lists that differ in length and are not
asked for as `Ragged`: they are an object array of arrays. docs/how-to/data.md has the same table
for users.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import types

from shards.errors import BadInput
from worker.data.ragged import Ragged, SparseVectors

VECTOR = pa.struct(
    [
        pa.field("type", pa.int8(), nullable=False),
        ("size", pa.int32()),
        ("indices", pa.list_(pa.int32())),
        ("values", pa.list_(pa.float64())),
    ]
)
"""A vector of Spark ML as Arrow sees it."""
DENSE_TAG = 1
"""The `type` of a dense vector."""
EXACT_DIGITS = 15
"""The digits of a decimal that float64 holds exactly."""
BYTE_MODES = (0, 16, 24)
"""The types of OpenCV in Spark's image schema whose values are bytes: CV_8UC1, CV_8UC3, CV_8UC4."""

_VECTOR_NAMES = {field.name for field in VECTOR}
_MATRIX_NAMES = {"numRows", "numCols", "colPtrs", "rowIndices", "values"}
IMAGE_NAMES = {"height", "width", "nChannels", "mode", "data"}
_SLICE_BYTES = 64 << 20
_CAST = "cast it to double"
_NO_NULL_LISTS = "coalesce(x, array()) of pyspark.sql.functions makes it an empty list"


def column_arrays(rows: Any, where: str) -> dict[str, NDArray[Any]]:
    """The columns of an Arrow table or record batch as NumPy arrays, one element a row.

    The table above says what each type becomes. Lists that differ in length are an array of
    objects, an array a row. Raises BadInput, naming `where` and the column, for a null and for a
    type that is refused.
    """
    return {
        name: column_array(rows.column(index), f"{where}, column {name}")
        for index, name in enumerate(rows.schema.names)
    }


def ragged_column(column: Any, where: str) -> NDArray[Any] | Ragged:
    """One column, lists as `Ragged` and others as an array; raises BadInput as `column_array`."""
    column = _one_array(column)
    if not is_list(column.type):
        return column_array(column, where)
    refuse_nulls(column, where, hint=_NO_NULL_LISTS)
    return Ragged(*_split_lists(column, where))


def column_array(column: Any, where: str) -> NDArray[Any]:
    """One column as an array; raises BadInput."""
    column = _one_array(column)
    refuse_nulls(column, where)
    kind = column.type
    if types.is_list(kind) or types.is_large_list(kind):
        return _lists(column, where)
    if types.is_fixed_size_list(kind):
        _refuse_null_values(column.flatten(), where, lambda position: position // kind.list_size)
        values = column_array(column.flatten(), where)
        return values.reshape(len(column), kind.list_size, *values.shape[1:])
    if is_vector(kind):
        return _vectors(column, where)
    if is_spark_image(kind):
        return _images(column, where)
    if types.is_decimal(kind):
        return exact_decimals(column, where)
    if is_number(kind) or is_time(kind):
        array: NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return array
    if is_text(kind) or is_binary(kind):
        return objects(column.to_pylist())
    raise describe_unsupported_type(kind, where)


def number_array(column: Any, where: str) -> NDArray[Any]:
    """One column as numbers, as networks read it: (rows, ...), bytes as uint8; raises BadInput."""
    check_numbers(column.type, where)
    return as_numbers(column_array(column, where), where)


def as_numbers(values: NDArray[Any], where: str) -> NDArray[Any]:
    """An array of `column_array` as numbers: bytes of one length become uint8 (rows, length).

    Raises BadInput for bytes and lists that differ in length.
    """
    if values.dtype != object:
        return values
    if len({len(value) for value in values}) > 1:
        raise BadInput(where, expected="rows of one length", got="others")
    if any(not isinstance(value, bytes) for value in values):
        raise BadInput(where, expected="lists of one length", got="others")
    return np.stack([np.frombuffer(value, np.uint8) for value in values])


def check_column(kind: Any, where: str) -> None:
    """Raise BadInput unless a function can read a column of the Arrow type `kind`."""
    while is_list(kind):
        kind = kind.value_type
    fits = (is_vector, is_spark_image, _is_exact, is_number, is_time, is_text, is_binary)
    if not any(fit(kind) for fit in fits):
        raise describe_unsupported_type(kind, where)


def check_numbers(kind: Any, where: str) -> None:
    """Raise BadInput unless a network can read a column of the Arrow type `kind`."""
    leaf = kind
    while is_list(leaf):
        leaf = leaf.value_type
    whole = is_binary(leaf) or is_spark_image(leaf)
    if not (is_leaf_number(leaf) or (whole and leaf is kind)):
        raise describe_unsupported_type(leaf, where)


def is_leaf_number(kind: Any) -> bool:
    """Return whether values of an Arrow type are numbers, or vectors of them."""
    return is_number(kind) or is_vector(kind) or _is_exact(kind)


def describe_unsupported_type(
    kind: Any, where: str, expected: str = "numbers, lists of numbers or vectors"
) -> BadInput:
    """The error for a column of a type that is not read as numbers, with the remedy."""
    got, remedy = f"{kind}", "leave it out"
    if types.is_decimal(kind):
        return BadInput(
            where,
            expected=f"decimals of up to {EXACT_DIGITS} digits, which float64 holds exactly",
            got=f"{kind}: {_CAST}",
        )
    if is_text(kind):
        remedy = f"index it by pyspark.ml.feature.StringIndexer, or {_CAST}"
    elif is_binary(kind):
        got, remedy = "binary", "give the pixels of a row as one value or one list of numbers"
    elif is_time(kind) or types.is_time(kind):
        got, remedy = f"times ({kind})", "convert it by pyspark.sql.functions.unix_timestamp"
    elif types.is_map(kind):
        got, remedy = "a map", "take its values by pyspark.sql.functions.element_at"
    elif types.is_struct(kind) and {field.name for field in kind} >= _MATRIX_NAMES:
        got, remedy = "a matrix of Spark ML", "give its values as a list of numbers"
    elif types.is_struct(kind):
        names = [field.name for field in kind]
        got = f"a struct of {', '.join(names[:8])}{' and more' if len(names) > 8 else ''}"
        remedy = "select its fields as columns"
    return BadInput(where, expected=expected, got=f"{got}: {remedy}")


def value_shape(column: Any, where: str) -> tuple[int, ...]:
    """The shape of each row of a column of vectors or images; raises BadInput if rows differ."""
    return (_vector_size(column, where),) if is_vector(column.type) else _image_shape(column, where)


def slice_rows(batch: Any) -> Iterator[Any]:
    """A record batch in slices of which the filled-in vectors take little memory."""
    row_bytes = 0
    for column in batch.columns:
        if is_vector(column.type) and len(column):
            first = column[0].as_py() or {}
            row_bytes += 8 * (first.get("size") or len(first.get("values") or ()))
    rows = max(1, _SLICE_BYTES // row_bytes) if row_bytes else max(1, batch.num_rows)
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def is_list(kind: Any) -> bool:
    """Return whether an Arrow type is one of lists."""
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def is_number(kind: Any) -> bool:
    """Return whether values of an Arrow type are whole numbers, floats or booleans."""
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def is_text(kind: Any) -> bool:
    """Return whether values of an Arrow type are text."""
    return bool(types.is_string(kind) or types.is_large_string(kind))


def is_binary(kind: Any) -> bool:
    """Return whether values of an Arrow type are bytes."""
    kinds = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
    return any(fits(kind) for fits in kinds)


def is_vector(kind: Any) -> bool:
    """Return whether a column's Arrow type is that of vectors of Spark ML, dense or sparse."""
    return bool(types.is_struct(kind)) and {field.name for field in kind} == _VECTOR_NAMES


def is_spark_image(kind: Any) -> bool:
    """Return whether a column's Arrow type is Spark's image schema, as of `format("image")`."""
    return bool(types.is_struct(kind)) and {field.name for field in kind} >= IMAGE_NAMES


def exact_decimals(column: Any, where: str) -> NDArray[np.float64]:
    """A column of decimals as float64; raises BadInput for a type with too many digits."""
    if not _is_exact(column.type):
        raise describe_unsupported_type(column.type, where)
    array: NDArray[np.float64] = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    return array


def refuse_nulls(column: Any, where: str, hint: str | None = None) -> None:
    """Raise BadInput for a null among the rows of a column."""
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        got = f"a null in row {row} of a batch"
        raise BadInput(where, expected="a value in each row", got=got, hint=hint)


def objects(values: list[Any]) -> NDArray[Any]:
    """An array of objects, one a row, also where all are sequences of one length."""
    array = np.empty(len(values), object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def _one_array(column: Any) -> Any:
    """A column in one piece."""
    if isinstance(column, pa.ChunkedArray):
        return pa.concat_arrays(column.chunks) if column.num_chunks else column.combine_chunks()
    return column


def _lists(column: Any, where: str) -> NDArray[Any]:
    """A column of lists: (rows, length) if all are of one length, else an array of arrays."""
    values, offsets = _split_lists(column, where)
    lengths = np.diff(offsets)
    if not len(lengths):  # of no rows: the lists in lists that are all empty
        return values.reshape(0, 0, *values.shape[1:])
    if (lengths == lengths[0]).all():
        return values.reshape(len(column), int(lengths[0]), *values.shape[1:])
    return objects(np.split(values, offsets[1:-1]))


def _split_lists(column: Any, where: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The values of all lists of a column without nulls, and the offset of each list among them."""
    inner, offsets = list_values(column)
    _refuse_null_values(
        inner, where, lambda position: int(np.searchsorted(offsets, position, "right")) - 1
    )
    return column_array(inner, where), offsets


def list_values(column: Any) -> tuple[Any, NDArray[np.int64]]:
    """The values of all lists of an Arrow array, and the offset of each list among them."""
    if types.is_fixed_size_list(column.type):
        size = column.type.list_size
        inner = column.values.slice(column.offset * size, len(column) * size)
        return inner, np.arange(len(column) + 1, dtype=np.int64) * size
    edges = column.offsets.to_numpy().astype(np.int64)
    return column.values.slice(edges[0], edges[-1] - edges[0]), edges - edges[0]


def _refuse_null_values(values: Any, where: str, row_of: Callable[[int], int]) -> None:
    """Raise BadInput for a null in a list; `row_of` is the row of a value of the column."""
    if values.null_count:
        position = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        raise BadInput(
            where,
            expected="lists without nulls",
            got=f"a null in row {row_of(position)} of a batch",
        )


def sparse_vectors(column: Any, where: str) -> SparseVectors:
    """A column of vectors of one size with their stored values alone; raises BadInput."""
    column = _one_array(column)
    size, parts = _vector_size(column, where), _fields(column)
    stored = parts["values"].flatten().to_numpy(zero_copy_only=False)
    counts = parts["values"].value_lengths().to_numpy().astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    indices = np.arange(len(stored)) - np.repeat(offsets[:-1], counts)
    # Only sparse vectors have indices; the flat array has none of the nulls of dense ones.
    sparse = np.repeat(parts["type"].to_numpy() != DENSE_TAG, counts)
    indices[sparse] = parts["indices"].flatten().to_numpy()
    vectors = SparseVectors(indices, stored, offsets, size)
    outside = np.flatnonzero((indices < 0) | (indices >= size))
    if outside.size:
        got = f"index {indices[outside[0]]} in row {vectors.row_numbers[outside[0]]} of a batch"
        raise BadInput(where, expected=f"vectors with indices from 0 to {size - 1}", got=got)
    return vectors


def _vectors(column: Any, where: str) -> NDArray[np.float64]:
    """A column of vectors of one size as (rows, size)."""
    parts = _fields(column)
    if (parts["type"].to_numpy() == DENSE_TAG).all():
        flat = parts["values"].flatten().to_numpy(zero_copy_only=False)
        dense: NDArray[np.float64] = flat.reshape(len(column), _vector_size(column, where))
        return dense
    vectors = sparse_vectors(column, where)
    filled = np.zeros(vectors.shape)
    filled[vectors.row_numbers, vectors.indices] = vectors.values
    return filled


def _vector_size(column: Any, where: str) -> int:
    """The size of each vector; raises BadInput if they differ."""
    refuse_nulls(column, where)
    parts = _fields(column)
    dense = parts["type"].to_numpy() == DENSE_TAG
    counts = parts["values"].value_lengths().to_numpy()
    sizes = np.where(dense, counts, parts["size"].fill_null(0).to_numpy())
    odd = np.flatnonzero(sizes != sizes[:1])
    if odd.size:
        raise BadInput(
            where,
            expected="vectors of one size",
            got=f"{sizes[0]} and {sizes[odd[0]]} values in rows 0 and {odd[0]} of a batch",
        )
    return int(sizes[0]) if sizes.size else 0


def _images(column: Any, where: str) -> NDArray[np.uint8]:
    """A column of images of one size as (rows, channels, height, width), blue first."""
    channels, height, width = _image_shape(column, where)
    data = b"".join(_fields(column)["data"].to_pylist())
    pixels = np.frombuffer(data, np.uint8).reshape(len(column), height, width, channels)
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))


def _image_shape(column: Any, where: str) -> tuple[int, int, int]:
    """The (channels, height, width) of each image; raises BadInput if they differ."""
    refuse_nulls(column, where)
    parts = _fields(column)
    names = ("nChannels", "height", "width")
    extents = np.stack([parts[name].fill_null(0).to_numpy() for name in names], 1)
    unread = np.flatnonzero(extents.min(1, initial=2**31 - 1) < 1)
    if unread.size:
        raise BadInput(
            where,
            expected="images",
            got=(
                f"one in row {unread[0]} of a batch that Spark could not read: "
                'read them with .option("dropInvalid", True)'
            ),
        )
    odd = np.flatnonzero((extents != extents[:1]).any(1))
    if odd.size:
        first, other = ("x".join(map(str, extents[row])) for row in (0, odd[0]))
        raise BadInput(
            where,
            expected="images of one size",
            got=f"{first} and {other} in rows 0 and {odd[0]} of a batch: resize them",
        )
    modes, lengths = (
        parts["mode"].fill_null(-1).to_numpy(),
        [len(value or b"") for value in parts["data"].to_pylist()],
    )
    for row, (mode, length) in enumerate(zip(modes, lengths, strict=True)):
        if mode not in BYTE_MODES or length != extents[row].prod():
            raise BadInput(
                where,
                expected="images of bytes",
                got=f"{length} bytes of OpenCV's type {mode} in row {row} of a batch",
            )
    shape = extents[0].tolist() if len(extents) else [0, 0, 0]
    return shape[0], shape[1], shape[2]


def _fields(column: Any) -> dict[str, Any]:
    """The columns of a column of structs, by name."""
    return dict(zip((field.name for field in column.type), column.flatten(), strict=True))


def _is_exact(kind: Any) -> bool:
    """Return whether an Arrow type is one of decimals that float64 holds exactly."""
    return bool(types.is_decimal(kind)) and kind.precision <= EXACT_DIGITS


def is_time(kind: Any) -> bool:
    """Return whether NumPy has a type for the dates, times or intervals of an Arrow type."""
    return bool(types.is_date(kind) or types.is_timestamp(kind) or types.is_duration(kind))
