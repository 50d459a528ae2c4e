"""The folders that `partitionBy` leaves, such as `day=2020-01-01`: their values are columns.

The rules are Spark's: a value is taken from the folder's name, unquoted; the type of a column is
the narrowest of int, long, double and date that all its values have, or else a string; the name
that Hive gives to a missing value is null.
"""

import re
from collections.abc import Sequence
from urllib.parse import unquote

import pyarrow as pa

from shards.errors import BadInput

Partition = tuple[tuple[str, str | None], ...]
"""The columns of a file that its folders state, outermost first: name and value."""

_NULL = "__HIVE_DEFAULT_PARTITION__"
_WHOLE = re.compile(r"-?\d{1,19}")
_TYPES = (
    (_WHOLE, pa.int32()),
    (_WHOLE, pa.int64()),
    (re.compile(r"-?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?"), pa.float64()),
    (re.compile(r"\d{4}-\d\d-\d\d"), pa.date32()),
)


def partition_of(folder: str) -> tuple[str, str | None] | None:
    """The column and the value that a folder's name states; None for any other name."""
    name, equals, value = folder.partition("=")
    if not name or not equals or not value:
        return None
    return unquote(name), None if value == _NULL else unquote(value)


def partition_fields(partitions: Sequence[Partition]) -> list[pa.Field]:
    """The columns that these files have by their folders."""
    columns: dict[str, list[str | None]] = {}
    for partition in partitions:
        for name, value in partition:
            columns.setdefault(name, []).append(value)
    return [pa.field(name, _type_of(values)) for name, values in columns.items()]


def partition_column(partition: Partition, field: pa.Field, rows: int, where: str) -> pa.Array:
    """The value of a partition's column in each of its rows; raises BadInput for another type."""
    text = pa.array([dict(partition)[field.name]], pa.string())
    try:
        value = text.cast(field.type)[0]
    except (pa.ArrowException, NotImplementedError):
        raise BadInput(
            f"{where}: column {field.name}",
            expected=field.type,
            got=f"{text[0]} in the folder's name",
        ) from None
    return pa.repeat(value, rows) if value.is_valid else pa.nulls(rows, field.type)


def _type_of(values: Sequence[str | None]) -> pa.DataType:
    texts = pa.array([value for value in values if value is not None], pa.string())
    for pattern, kind in _TYPES:
        if len(texts) and all(pattern.fullmatch(text) for text in texts.to_pylist()):
            try:
                texts.cast(kind)
            except pa.ArrowException:
                continue
            return kind
    return pa.string()
