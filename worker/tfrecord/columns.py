"""The columns that TFRecord files can hold, and their Arrow types.

An Example has features: lists of bytes, of floats of 32 bits, or of integers of 64 bits. A column
of numbers or text is a list of one value, an array a list of any length. A SequenceExample also has
feature lists, which are arrays of arrays. Doubles are rounded to floats in a file.
"""

from enum import Enum
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import types

from shards.errors import BadInput


class Kind(Enum):
    """The kind of a feature; the value is its tag in a Feature."""

    BYTES = 0x0A
    FLOAT = 0x12
    INT64 = 0x1A


ARROW = {Kind.BYTES: pa.binary(), Kind.FLOAT: pa.float32(), Kind.INT64: pa.int64()}
NAMES = {Kind.BYTES: "bytes", Kind.FLOAT: "float", Kind.INT64: "int64"}
"""What messages call a kind."""


class Column(NamedTuple):
    """A column: `depth` is 0 for one value, 1 for an array, 2 for an array of arrays."""

    name: str
    kind: Kind
    depth: int
    type: Any
    nullable: bool

    @property
    def leaf(self) -> Any:
        """The Arrow type of one value."""
        kind = self.type
        for _ in range(self.depth):
            kind = kind.value_type
        return kind


def columns_of(schema: Any) -> list[Column]:
    """The columns of an Arrow schema; raises BadInput for a type that TFRecord cannot hold."""
    return [_column(field) for field in schema]


def _column(field: Any) -> Column:
    leaf, depth = field.type, 0
    while types.is_list(leaf) or types.is_large_list(leaf):
        leaf, depth = leaf.value_type, depth + 1
    kind = next((kind for kind, fits in _FITS.items() if any(fit(leaf) for fit in fits)), None)
    if kind is None or depth > 2:
        raise BadInput(
            f"column {field.name}: expected long, int, float, double, string, binary, an array of"
            f" these or an array of arrays, got {field.type}"
        )
    return Column(field.name, kind, depth, field.type, field.nullable)


_FITS = {
    Kind.BYTES: (types.is_binary, types.is_string, types.is_large_binary, types.is_large_string),
    Kind.FLOAT: (types.is_float32, types.is_float64),
    Kind.INT64: (types.is_signed_integer,),
}
