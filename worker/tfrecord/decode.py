"""Records to Arrow: all records of a block at once, a column at a time.

Each level of an Example is one pass over all its messages (wire.py):

    record > Features > entry of the map > key, Feature > list of a kind > values

A record in an unusual form, such as numbers that are not packed, is first rewritten by the protobuf
library. What that library refuses is no Example.
"""

from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError
from pyarrow.compute import index_in

from shards.errors import BadInput
from worker.tfrecord.columns import ARROW, NAMES, FeatureColumn, FeatureKind
from worker.tfrecord.example_pb2 import SequenceExample
from worker.tfrecord.framing import Block
from worker.tfrecord.wire import (
    Positions,
    Unusual,
    decode_varints,
    field_at,
    fields,
    gather,
    varint,
)

_CONTENT = 0x0A  # the tag of field 1: a list's values, a map's entries and their keys
_MAX_SHORT = (1 << 15) - 1
_VALUE = 0x12  # the tag of field 2: a map's value, a SequenceExample's feature lists


class _Entries(NamedTuple):
    """Entries of the maps of a block: the record's index, the column's index, and the value.

    They are in the order of columns, and of records within a column.
    """

    record: Positions
    column: Positions
    starts: Positions
    ends: Positions

    def of(self, column: int) -> "_Entries":
        first, last = np.searchsorted(self.column, (column, column + 1))
        return _Entries(*(array[first:last] for array in self))


class _Features(NamedTuple):
    """The values of Features: how many each holds (-1 in one without a kind), and all of them.

    `record` is the index of each one's record.
    """

    record: Positions
    counts: Positions
    values: Any


def decode(block: Block, columns: list[FeatureColumn], schema: Any, where: str) -> Any:
    """The records of `block` as a record batch of `schema`, which has the columns `columns`.

    A feature that is missing is null; features of other names are left out. Raises BadInput, which
    names the file `where` and the record, for a feature of another kind and for a record that is no
    Example.
    """
    try:
        return _decode(block, columns, schema, where)
    except Unusual:
        return _decode(_rewrite(block, where), columns, schema, where)


def parse(record: bytes, label: str) -> SequenceExample:
    """A record as a message; raises BadInput, which names the record as `label`, if it is none."""
    try:
        message = SequenceExample.FromString(record)
    except DecodeError:
        message = None
    if message is not None:
        message.DiscardUnknownFields()
    if message is None or (record and not message.ByteSize()):
        raise BadInput(label, expected="an Example or a SequenceExample", got="other bytes")
    return message


def _rewrite(block: Block, where: str) -> Block:
    """Rewrite records as the protobuf library writes them."""
    records = [
        parse(block.data[i:j], f"{where}: record {block.first + n}").SerializeToString()
        for n, (i, j) in enumerate(zip(block.starts, block.ends, strict=True))
    ]
    ends = np.cumsum([len(record) for record in records])
    starts = np.concatenate(([0], ends[:-1]))
    return Block(block.first, b"".join(records), starts, ends)


def _decode(block: Block, columns: list[FeatureColumn], schema: Any, where: str) -> Any:
    parts = fields(block.data, block.starts, block.ends)
    names = [column.name for column in columns]
    context = _entries(block.data, parts, _CONTENT, names)
    lists = _entries(block.data, parts, _VALUE, names)
    if np.any((parts.tag != _CONTENT) & (parts.tag != _VALUE)):
        raise Unusual
    arrays = []
    for n, column in enumerate(columns):
        reader = _ColumnReader(block, column, where)
        entries, other = context.of(n), lists.of(n)
        if column.depth == 2:
            entries, other = other, entries
        if len(other.record):
            expected, got = "a feature", "a feature list"
            if column.depth == 2:
                expected, got = got, expected
            reader.fail(other.record[0], expected, got)
        arrays.append(reader.array(entries))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _entries(data: bytes, parts: Any, tag: int, names: list[str]) -> _Entries:
    """The entries, with a known name, of the map in the field `tag` of each record."""
    some = parts.tag == tag
    record = parts.parent[some]
    _once(record)
    pairs = fields(data, parts.starts[some], parts.ends[some])
    key_tag, key, key_end = field_at(data, pairs.starts, pairs.ends)
    value_tag, value, value_end = field_at(data, key_end, pairs.ends)
    if (
        np.any(pairs.tag != _CONTENT)
        or np.any(key_tag != _CONTENT)
        or np.any(value_tag != _VALUE)
        or np.any(value_end != pairs.ends)
    ):
        raise Unusual
    column = _match(data, key, key_end, names)
    # NumPy sorts numbers of 16 bits by their digits, which takes a tenth of the time.
    short = column.astype(np.int16) if len(names) <= _MAX_SHORT else column
    order = np.argsort(short, kind="stable")
    order = order[np.searchsorted(column[order], 0) :]  # without unknown names
    records = record.take(pairs.parent.take(order))
    return _Entries(records, column.take(order), value.take(order), value_end.take(order))


def _match(data: bytes, starts: Positions, ends: Positions, names: list[str]) -> Positions:
    """The index of each key in `names`, or -1."""
    # With the last byte of its length, for a key may be empty.
    keys = [varint(len(name.encode()))[-1:] + name.encode() for name in names]
    sizes, column = ends - starts + 1, np.full(len(starts), -1)
    for size in {len(key) for key in keys}:
        same = np.flatnonzero(sizes == size)
        if not len(same):
            continue
        candidates = np.array([n for n, key in enumerate(keys) if len(key) == size])
        content = pa.py_buffer(gather(data, starts[same] - 1, ends[same]))
        contents = pa.Array.from_buffers(pa.binary(size), len(same), [None, content])
        position = index_in(contents, pa.array([keys[n] for n in candidates], pa.binary(size)))
        position = position.fill_null(-1).to_numpy()
        column[same] = np.where(position >= 0, candidates[position], -1)
    return column


def _once(record: Positions) -> None:
    """Refuse fields that a record has twice: in protobuf the last one wins, or they are joined."""
    if np.any(record[1:] == record[:-1]):
        raise Unusual


class _ColumnReader:
    """Reads one column of a block."""

    def __init__(self, block: Block, column: FeatureColumn, where: str) -> None:
        self.block, self.column, self.where = block, column, where

    def array(self, entries: _Entries) -> Any:
        """The column as an Arrow array, null where a record has no entry or an empty one."""
        _once(entries.record)
        column, rows = self.column, len(self.block.starts)
        counts = np.full(rows, -1)
        if column.depth == 2:
            steps = fields(self.block.data, entries.starts, entries.ends)
            if np.any(steps.tag != _CONTENT):
                raise Unusual
            features = self.features(steps.starts, steps.ends, entries.record[steps.parent])
            counts[entries.record] = np.bincount(steps.parent, minlength=len(entries.record))
            inner = self.lists(features.counts, self.leaves(features), column.type.value_type)
            array = self.lists(counts, inner, column.type)
        else:
            features = self.features(entries.starts, entries.ends, entries.record)
            counts[entries.record] = features.counts
            leaves = self.leaves(features)
            array = self.lists(counts, leaves, column.type) if column.depth else None
        if not column.nullable and np.any(counts < 0):
            self.fail(np.argmax(counts < 0), "a value", "none")
        return self.scalars(counts, leaves) if array is None else array

    def features(self, starts: Positions, ends: Positions, record: Positions) -> _Features:
        """The values of Features; `record` is the index of each one's record."""
        data, kind = self.block.data, self.column.kind
        some = np.flatnonzero(starts < ends)
        counts = np.full(len(starts), -1)
        tag, start, end = field_at(data, starts[some], ends[some])
        if np.any(end != ends[some]):
            raise Unusual
        if np.any(wrong := tag != kind.value):
            got = next(
                (
                    NAMES[feature_kind]
                    for feature_kind in FeatureKind
                    if feature_kind.value == tag[wrong][0]
                ),
                "no kind",
            )
            self.fail(record[some][wrong][0], NAMES[kind], got)
        values = fields(data, start, end)
        if np.any(values.tag != _CONTENT):
            raise Unusual
        if kind is FeatureKind.BYTES:
            counts[some] = np.bincount(values.parent, minlength=len(some))
            return _Features(record, counts, self.binary(values.starts, values.ends))
        _once(values.parent)
        content = gather(data, values.starts, values.ends)
        sizes = np.zeros(len(some), np.int64)
        sizes[values.parent] = values.ends - values.starts
        if kind is FeatureKind.INT64:
            integers, counts[some] = decode_varints(content, sizes)
            return _Features(record, counts, integers)
        if np.any(sizes % 4):
            raise Unusual
        counts[some] = sizes // 4
        return _Features(record, counts, content.view("<f4"))

    def binary(self, starts: Positions, ends: Positions) -> Any:
        """Byte strings as an Arrow array."""
        offsets = np.concatenate(([0], np.cumsum(ends - starts))).astype(np.int32)
        content = pa.py_buffer(gather(self.block.data, starts, ends))
        return pa.Array.from_buffers(
            pa.binary(), len(starts), [None, pa.py_buffer(offsets), content]
        )

    def leaves(self, features: _Features) -> Any:
        """All values of the column in their Arrow type; some may not fit it."""
        leaf = self.column.leaf
        values = features.values
        if isinstance(values, np.ndarray):
            values = pa.array(values, ARROW[self.column.kind])
        try:
            return values.cast(leaf)
        except pa.ArrowInvalid:
            owners = np.repeat(features.record, np.maximum(features.counts, 0))
            for record, value in zip(owners, values, strict=True):
                try:
                    value.cast(leaf)
                except pa.ArrowInvalid:
                    self.fail(record, str(leaf), repr(value.as_py()))
            raise

    def scalars(self, counts: Positions, leaves: Any) -> Any:
        """One value a record; -1 in `counts` is a null."""
        if np.any(wrong := (counts >= 0) & (counts != 1)):
            self.fail(np.argmax(wrong), "one value (or an array in the schema)", counts[wrong][0])
        if len(leaves) == len(counts):
            return leaves
        indices = pa.array(np.cumsum(counts > 0) - 1, mask=counts < 0)
        return leaves.take(indices)

    def lists(self, counts: Positions, values: Any, kind: Any) -> Any:
        """Lists of `counts` values each; -1 is a null."""
        offsets = np.concatenate(([0], np.cumsum(np.maximum(counts, 0)))).astype(np.int32)
        missing = pa.array(counts < 0) if np.any(counts < 0) else None
        return pa.ListArray.from_arrays(pa.array(offsets), values, type=kind, mask=missing)

    def fail(self, index: Any, expected: str, got: object) -> NoReturn:
        """Raise BadInput for the record at `index` of the block."""
        raise BadInput(
            (f"{self.where}: record {self.block.first + int(index)}: column {self.column.name}"),
            expected=expected,
            got=got,
        )
