"""The columns that a net reads of each row of data, and how they are found by name.

A net has a column of images (`data`), usually one of labels, and may have others by name, such as
the datasets of an HDF5 file. An image or a label may have a name of the net's own: the rows are
searched for that name first, and then for the usual one.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from shards.errors import BadInput

Shape = tuple[int, int, int]
"""(channels, height, width) of an image."""

PIXEL_COLUMNS = ("data", "image")


class ColumnKind(StrEnum):
    """The kind of a column: images, whole labels, or numbers of any kind, float32 here."""

    IMAGE = "image"
    LABEL = "label"
    NUMBERS = "numbers"


class ColumnSpec(msgspec.Struct, frozen=True):
    """A column of a batch: its name, and the shape of one row (None: what the data says).

    `encoded` is whether images are files, such as PNG, where the rows do not say so (None: their
    first bytes do).
    """

    name: str
    shape: tuple[int, ...] | None = None
    kind: ColumnKind = ColumnKind.NUMBERS
    encoded: bool | None = None

    def find(self, names: Sequence[str], where: str) -> str:
        """The name of this column among `names`; raises BadInput."""
        if self.name in names:
            return _check_once(self.name, names, where)
        if self.kind is ColumnKind.IMAGE:
            return pixel_column(names, where)
        if self.kind is ColumnKind.LABEL and "label" in names:
            return _check_once("label", names, where)
        raise BadInput(where, expected=f"a column {self.name}", got=", ".join(names) or "none")

    def among(self, names: Sequence[str]) -> bool:
        """Return whether this column is one of `names`."""
        return self.name in names or (self.kind is ColumnKind.LABEL and "label" in names)


DATA = ColumnSpec("data", kind=ColumnKind.IMAGE)
LABEL = ColumnSpec("label", kind=ColumnKind.LABEL)


def pixel_column(names: Sequence[str], where: str) -> str:
    """Which of the columns `names` holds the pixels: `data` or `image`."""
    for name in PIXEL_COLUMNS:
        if name in names:
            return _check_once(name, names, where)
    raise BadInput(where, expected="a column data or image", got=", ".join(names) or "none")


def _check_once(name: str, names: Sequence[str], where: str) -> str:
    """`name`, which is among `names`; raises BadInput if several columns have it."""
    if (count := list(names).count(name)) > 1:
        raise BadInput(where, expected=f"one column {name}", got=f"{count} of this name")
    return name
