"""JSON files that notice when they are damaged: an object whose field `check` is a checksum.

The checksum is the crc32 of all other fields, as compact JSON in the order of the file. So the
layout of the text does not count, and any other change shows: a value, a name, the order, a field
that is missing or added. A file that a person wrote or edited needs no `check`.
"""

import zlib
from typing import Any, TypeVar

import msgspec

from shards.errors import BadInput

CHECK = "check"

T = TypeVar("T")


def encode(value: object) -> bytes:
    """A struct or mapping as a JSON object that ends with its checksum, laid out for people."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    return msgspec.json.format(msgspec.json.encode(plain | {CHECK: _check(plain)}))


def decode(content: bytes, kind: type[T], *, required: bool = False, dec_hook: Any = None) -> T:
    """What `encode` gave, as a `kind`; a file without a checksum will do unless it is `required`.

    Raises BadInput and what msgspec raises (`errors.UNDECODABLE`).
    """
    plain = msgspec.json.decode(content, type=dict[str, Any])
    told = plain.pop(CHECK, None)
    # First, for it says better what is wrong with a file that was edited.
    value = msgspec.convert(plain, kind, str_keys=True, dec_hook=dec_hook)
    found = _check(plain)
    if told is None and required:
        raise BadInput(f"expected a field `{CHECK}`, its checksum, got none")
    if told is not None and told != found:
        remedy = "" if required else f"; if it was edited on purpose, remove the field `{CHECK}`"
        raise BadInput(f"it is damaged or was edited: expected checksum {found}{remedy}")
    return value


def _check(plain: dict[str, Any]) -> str:
    return f"{zlib.crc32(msgspec.json.encode(plain)):08x}"
