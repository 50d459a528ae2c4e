"""Arrow to records: the features of a column are encoded together, then joined row by row.

A list of one byte string and a list of packed numbers have the same form on the wire. What precedes
the values, down to the entry of the map, depends on their size only. So it is made once a size, and
a feature costs one look-up and one concatenation.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow.compute import list_value_length

from shards.errors import BadInput
from worker.tfrecord.columns import FeatureColumn, FeatureKind
from worker.tfrecord.framing import BLOCK_BYTES, frames
from worker.tfrecord.wire import encode_varints, varint

_CONTENT, _VALUE = b"\x0a", b"\x12"  # the tags of the fields 1 and 2 of every message


def encode(batch: Any, columns: list[FeatureColumn]) -> Iterator[bytes]:
    """The rows of a record batch as framed records, in pieces of about 4 MiB.

    A null is a feature left out. A row is a SequenceExample if a column is an array of arrays, and
    otherwise an Example. Raises BadInput for a null in an array.
    """
    if not batch.num_rows:
        return
    step = max(1, BLOCK_BYTES * batch.num_rows // max(1, batch.nbytes))
    for row in range(0, batch.num_rows, step):
        yield frames(_records(batch.slice(row, step), columns))


def _records(batch: Any, columns: list[FeatureColumn]) -> Iterator[bytes]:
    arrays = list(zip(columns, batch.columns, strict=True))
    context = [_entries(column, array) for column, array in arrays if column.depth < 2]
    lists = [_entries(column, array) for column, array in arrays if column.depth == 2]
    features = _rows(context, batch.num_rows)
    heads = _Heads(_CONTENT)
    if not lists:
        return (heads[len(row)] + row for row in features)
    list_heads = _Heads(_VALUE)
    return (
        b"".join((heads[len(row)], row, list_heads[len(more)], more))
        for row, more in zip(features, _rows(lists, batch.num_rows), strict=True)
    )


def _rows(entries: list[list[bytes]], rows: int) -> Iterator[bytes]:
    return map(b"".join, zip(*entries, strict=True)) if entries else iter([b""] * rows)


def _entries(column: FeatureColumn, array: Any) -> list[bytes]:
    """The column's entry in the map of each row; empty for a null."""
    key = column.name.encode()
    around = _CONTENT, _CONTENT + varint(len(key)) + key + _VALUE
    if column.depth < 2:
        entries = _features(column, array, around)
    else:
        heads, flat = _Heads(*around), array.flatten()
        _no_null(column, flat)
        steps = _features(column, flat, (_CONTENT,))
        values = [b"".join(steps[i:j]) for i, j in pairwise(_offsets(array))]
        entries = [heads[len(value)] + value for value in values]
    if array.null_count:
        valid = array.is_valid().to_pylist()
        entries = [entry if present else b"" for entry, present in zip(entries, valid, strict=True)]
    return entries


def _features(column: FeatureColumn, array: Any, around: tuple[bytes, ...]) -> list[bytes]:
    """The Features of an array's rows, in the fields `around`; of a null, one without values."""
    if column.depth:
        leaves, cuts = array.flatten(), _offsets(array)
        _no_null(column, leaves)
    else:
        leaves = array.fill_null(b"" if column.kind is FeatureKind.BYTES else 0)
        if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
            leaves = array.fill_null("")
        cuts = np.arange(len(array) + 1)
    kind = bytes([column.kind.value])
    if column.kind is FeatureKind.BYTES:
        heads = _Heads(_CONTENT) if column.depth else _Heads(*around, kind, _CONTENT)
        content = [heads[len(value)] + value for value in leaves.cast(pa.binary()).to_pylist()]
        if not column.depth:
            return content
        content = [b"".join(content[i:j]) for i, j in pairwise(cuts)]
        heads = _Heads(*around, kind)
        return [heads[len(value)] + value for value in content]
    if column.kind is FeatureKind.FLOAT:
        packed = leaves.cast(pa.float32(), safe=False).to_numpy().tobytes()
        cuts = 4 * cuts
    else:
        numbers, sizes = encode_varints(leaves.cast(pa.int64()).to_numpy())
        packed = numbers.tobytes()
        cuts = np.concatenate(([0], np.cumsum(sizes)))[cuts]
    heads = _Heads(*around, kind, _CONTENT)
    heads[0] = _Heads(*around, kind)[0]  # a list without numbers is empty
    return [heads[j - i] + packed[i:j] for i, j in pairwise(cuts.tolist())]


def _no_null(column: FeatureColumn, values: Any) -> None:
    """Refuse a null in an array: a list in a file has none."""
    if values.null_count:
        raise BadInput(
            f"column {column.name}", expected="arrays without nulls", got="a null in one"
        )


def _offsets(array: Any) -> Any:
    """Where the values of each list begin and end in `array.flatten()`."""
    sizes = list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    return np.concatenate(([0], np.cumsum(sizes)))


class _Heads(dict[int, bytes]):
    """By the size of a content, what precedes it: the fields that it is in, outermost first.

    Each field is given by its tag, and by what else of the same message comes before it.
    """

    def __init__(self, *fields: bytes) -> None:
        self._fields = fields

    def __missing__(self, size: int) -> bytes:
        head = b""
        for before in reversed(self._fields):
            head = before + varint(len(head) + size) + head
        self[size] = head
        return head
