"""Feature ids: 64-bit hashes of columns, equal to those of `xxhash64` of Spark SQL bit for bit.

    ids = worker.hashed("carrier", batch["carrier"])          # xxhash64(lit("carrier"), carrier)
    pairs = worker.hashed("from-to", batch["from"], batch["to"])
    tags = worker.hashed("tag", batch["tags"], elements=True)  # transform(tags, t -> xxhash64(...))

The first value of a row is hashed with the seed 42, each further one with the hash so far as its
seed; a null leaves the hash as it is, and a list is hashed value by value. Values are hashed as
Spark stores them: text as UTF-8; booleans, dates and integers of up to 32 bits as 4 bytes, longer
integers, timestamps and intervals in microseconds as 8; floats by their bits, with -0.0 as 0.0 and
one NaN. Ids of features that begin with the name of their column differ between columns.

No loop of Python runs over rows: the kernels (cupy_kernels/xxhash64.py) read Arrow's buffers.
"""

from collections.abc import Callable
from typing import Any, Literal, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import types

from cupy_kernels.xxhash64 import Words, hash_half_words, hash_pieces, hash_words
from shards import argument_checks
from shards.errors import BadInput
from worker.data.column_values import is_binary, is_list, is_text, list_values
from worker.data.ragged import Ragged

Ids = NDArray[np.int64]
Rows = NDArray[np.intp]
Hash = Callable[[Rows, Words], Words]
"""The hashes of some rows of a column; the seed of each is given."""

_SEED = 42
_LONG_DIGITS = 18  # of decimals that Spark keeps as a long
_MICROSECONDS = pa.duration("us")


@overload
def hashed(*columns: Any, elements: Literal[False] = False) -> Ids: ...
@overload
def hashed(*columns: Any, elements: Literal[True]) -> Ragged: ...
@overload
def hashed(*columns: Any, elements: bool) -> Ids | Ragged: ...


def hashed(*columns: Any, elements: bool = False) -> Ids | Ragged:
    """The hash of each row of some columns, int64, as Spark's `xxhash64` has it.

    A column is an Arrow array, an array of NumPy or a list, of text, numbers, booleans, dates or
    timestamps, or of lists of these; or a column of `ctx.batches`. A text instead of a column is a
    literal, the same in each row. With `elements` the last column has lists, and each of their
    values has a hash of its own: the result is `Ragged`, and null lists are refused.

    Raises BadInput for no column, columns of different lengths, and a type that is not hashed.
    """
    arrays = [
        column if isinstance(column, str) else _arrow(f"hashed: column {number}", column)
        for number, column in enumerate(columns)
    ]
    lengths = {len(array) for array in arrays if not isinstance(array, str)}
    if len(lengths) != 1:
        got = " and ".join(map(str, sorted(lengths))) + " rows" if lengths else "none"
        raise BadInput("hashed", expected="columns of one length, at least one", got=got)
    (length,) = lengths
    argument_checks.flag("hashed: elements", elements)
    hashes = np.full(length, _SEED, np.uint64)
    rows = np.arange(length)
    last = len(arrays) - 1
    for number, array in enumerate(arrays):
        label = f"hashed: column {number}"
        if isinstance(array, str):
            hashes = _hasher(label, pa.array([array]))(np.zeros(length, np.intp), hashes)
        elif elements and number == last:
            return _hash_elements(label, array, hashes)
        else:
            hashes = _hasher(label, array)(rows, hashes)
    if elements:
        raise BadInput("hashed: elements", expected="a column of lists at the end", got="a text")
    return hashes.view(np.int64)


def _arrow(label: str, column: Any) -> Any:
    """A column as one Arrow array; raises BadInput."""
    if isinstance(column, Ragged):
        values = _arrow(label, column.values)
        return pa.LargeListArray.from_arrays(pa.array(column.offsets), values)
    if isinstance(column, pa.ChunkedArray):
        return column.combine_chunks()
    if isinstance(column, pa.Array):
        return column
    try:
        if isinstance(column, np.ndarray) and column.ndim > 1:
            column = list(column)
        return pa.array(column)
    except (pa.ArrowException, TypeError, ValueError) as error:
        line = str(error).splitlines()[0]
        raise BadInput(label, expected="a column of one type", got=f"another: {line}") from None


def _hash_elements(label: str, column: Any, seeds: Words) -> Ragged:
    """The hash of each value in a column of lists, which begins with the seed of its row."""
    if not is_list(column.type):
        raise BadInput(label, expected="lists, for `elements`", got=f"{column.type}")
    if column.null_count:
        hint = "coalesce(x, array()) of pyspark.sql.functions makes it an empty list"
        raise BadInput(label, expected="lists", got="a null", hint=hint)
    values, offsets = list_values(column)
    seeds = np.repeat(seeds, np.diff(offsets))
    hashes = _hasher(label, values)(np.arange(len(values)), seeds)
    return Ragged(hashes.view(np.int64), offsets)


def _hasher(label: str, column: Any) -> Hash:
    """The function that hashes rows of a column; raises BadInput for a type that is not hashed."""
    kind = column.type
    if types.is_dictionary(kind):
        return _hasher(label, column.dictionary_decode())
    if types.is_null(kind):
        return lambda _rows, seeds: seeds
    hash_rows = (_hasher_of_lists if is_list(kind) else _hasher_of_values)(label, column)
    if not column.null_count:
        return hash_rows
    valid = column.is_valid().to_numpy(zero_copy_only=False)

    def hash_valid(rows: Rows, seeds: Words) -> Words:
        hashes, present = seeds.copy(), valid[rows]
        hashes[present] = hash_rows(rows[present], seeds[present])
        return hashes

    return hash_valid


def _hasher_of_lists(label: str, column: Any) -> Hash:
    values, offsets = list_values(column)
    hash_values = _hasher(label, values)

    def hash_rows(rows: Rows, seeds: Words) -> Words:
        hashes, positions, ends = seeds.copy(), offsets[rows], offsets[rows + 1]
        # One value of each list at a time, because each needs the hash of the one before.
        while (rest := np.flatnonzero(positions < ends)).size:
            hashes[rest] = hash_values(positions[rest], hashes[rest])
            positions[rest] += 1
        return hashes

    return hash_rows


def _hasher_of_values(label: str, column: Any) -> Hash:
    kind = column.type
    words: Any
    if is_text(kind) or is_binary(kind) or _is_view(kind):
        return _hasher_of_bytes(column)
    if types.is_float64(kind) or types.is_float32(kind):
        floats = _buffer(column, np.float64 if types.is_float64(kind) else np.float32)
        floats = np.where(np.isnan(floats), np.array(np.nan, floats.dtype), floats) + 0
        words = floats.view(np.uint64 if types.is_float64(kind) else np.uint32)
    elif types.is_decimal128(kind) and kind.precision <= _LONG_DIGITS:
        words = _buffer(column, np.dtype((np.uint64, 2)))[:, 0]
    else:
        words = _integers(label, column)
    if words.dtype == np.uint32:
        return lambda rows, seeds: hash_half_words(words[rows], seeds)
    return lambda rows, seeds: hash_words(words[rows], seeds)


def _integers(label: str, column: Any) -> NDArray[np.uint32] | Words:
    """The values of a column that Spark has as an int or a long."""
    kind = column.type
    if types.is_boolean(kind) or types.is_int8(kind) or types.is_int16(kind):
        return _buffer(column.cast(pa.int32()), np.uint32)
    if types.is_date64(kind):
        return _buffer(column.cast(pa.date32()), np.uint32)
    if types.is_int32(kind) or types.is_date32(kind):
        return _buffer(column, np.uint32)
    try:
        if types.is_timestamp(kind):
            return _buffer(column.cast(pa.timestamp("us", kind.tz)), np.uint64)
        if types.is_duration(kind):
            return _buffer(column.cast(_MICROSECONDS), np.uint64)
    except pa.ArrowInvalid:
        expected = "times in whole microseconds, as Spark has them"
        raise BadInput(label, expected=expected, got=f"{kind}") from None
    if types.is_int64(kind):
        return _buffer(column, np.uint64)
    expected = "text, bytes, signed integers, float32, float64, booleans, dates, timestamps, lists"
    raise BadInput(label, expected=expected, got=f"{kind}")


def _hasher_of_bytes(column: Any) -> Hash:
    if _is_view(column.type):
        wide_kind = pa.large_string() if types.is_string_view(column.type) else pa.large_binary()
        column = column.cast(wide_kind)
    kind = column.type
    data = column.buffers()[-1]
    content = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    if types.is_fixed_size_binary(kind):
        starts = (column.offset + np.arange(len(column), dtype=np.int64)) * kind.byte_width
        lengths = np.full(len(column), kind.byte_width, np.int64)
    else:
        wide = types.is_large_string(kind) or types.is_large_binary(kind)
        edges = np.zeros(1, np.int64)
        if column.buffers()[1] is not None:
            offsets = np.frombuffer(column.buffers()[1], np.int64 if wide else np.int32)
            edges = offsets[column.offset : column.offset + len(column) + 1].astype(np.int64)
        starts, lengths = edges[:-1], np.diff(edges)
    return lambda rows, seeds: hash_pieces(content, starts[rows], lengths[rows], seeds)


def _buffer(column: Any, dtype: Any) -> NDArray[Any]:
    """The values of an Arrow array of numbers, read as `dtype`; a null has any value."""
    if not len(column):
        return np.zeros(0, dtype)
    return np.frombuffer(column.buffers()[1], dtype)[column.offset : column.offset + len(column)]


def _is_view(kind: Any) -> bool:
    return bool(types.is_string_view(kind) or types.is_binary_view(kind))
