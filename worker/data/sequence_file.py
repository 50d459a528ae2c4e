"""Hadoop SequenceFiles of images, as CaffeOnSpark wrote them, as the rows of a DataFrame.

A key is a serialised tuple (worker/data/java_objects.py), a value the bytes of an image: raw, or an
image file. Spark reads the files, wherever Hadoop finds them; this file makes rows of its records.
"""

from typing import Any, NamedTuple

from shards.errors import BadInput, quote
from worker.data.java_objects import read_key

SCHEMA = "id string, label long, channels int, height int, width int, encoded boolean, data binary"


class ImageRecord(NamedTuple):
    """A row of `SCHEMA`. The extents are None where an image file states them itself."""

    id: str
    label: int
    channels: int | None
    height: int | None
    width: int | None
    encoded: bool
    data: bytes


def image_record(key: bytes, value: bytes, where: str) -> ImageRecord:
    """The row of one record; raises BadInput that begins with `where`."""
    fields = read_key(key, where)
    name, label, *rest = [*fields, None, None][: max(len(fields), 2)]
    if len(fields) not in {2, 6} or not isinstance(name, str) or not isinstance(label, str):
        raise BadInput(where, expected="a key with an id and a label", got=f"{len(fields)} values")
    where = f"{where}: record {quote(name)}"
    if not label.strip().lstrip("-").isdecimal():
        raise BadInput(f"{where}: field label", expected="a whole number", got=quote(label))
    if not rest:
        return ImageRecord(name, int(label), None, None, None, True, value)
    channels, height, width, encoded = rest
    if not encoded and not _fits(rest[:3], value):
        raise BadInput(
            f"{where}: field data", expected=f"{channels}x{height}x{width} bytes", got=len(value)
        )
    if encoded:
        channels = height = width = None
    return ImageRecord(name, int(label), channels, height, width, bool(encoded), value)


def _fits(extents: list[Any], value: bytes) -> bool:
    whole = all(isinstance(extent, int) and extent > 0 for extent in extents)
    return whole and extents[0] * extents[1] * extents[2] == len(value)
