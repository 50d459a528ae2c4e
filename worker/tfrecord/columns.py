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


class FeatureKind(Enum):
    """The kind of a feature; the value is its tag in a Feature."""

    BYTES = 0x0A
    FLOAT = 0x12
    INT64 = 0x1A


ARROW = {
    FeatureKind.BYTES: pa.binary(),
    FeatureKind.FLOAT: pa.float32(),
    FeatureKind.INT64: pa.int64(),
}
NAMES = {FeatureKind.BYTES: "bytes", FeatureKind.FLOAT: "float", FeatureKind.INT64: "int64"}
"""What messages call a kind."""


class FeatureColumn(NamedTuple):
    """A column: `depth` is 0 for one value, 1 for an array, 2 for an array of arrays."""

    name: str
    kind: FeatureKind
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


def columns_of(schema: Any) -> list[FeatureColumn]:
    """The columns of an Arrow schema; raises BadInput for a type that TFRecord cannot hold."""
    return [_column(field) for field in schema]


def _column(field: Any) -> FeatureColumn:
    leaf, depth = field.type, 0
    while types.is_list(leaf) or types.is_large_list(leaf):
        leaf, depth = leaf.value_type, depth + 1
    kind = next((kind for kind, fits in _FITS.items() if any(fit(leaf) for fit in fits)), None)
    if kind is None or depth > 2:
        raise BadInput(
            f"column {field.name}",
            expected=(
                "long, int, float, double, string, binary, an array of these or an array of arrays"
            ),
            got=field.type,
        )
    return FeatureColumn(field.name, kind, depth, field.type, field.nullable)


_FITS = {
    FeatureKind.BYTES: (
        types.is_binary,
        types.is_string,
        types.is_large_binary,
        types.is_large_string,
    ),
    FeatureKind.FLOAT: (types.is_float32, types.is_float64),
    FeatureKind.INT64: (types.is_signed_integer,),
}
