"""JSON files that reveal damage: an object with a checksum in its field `check`.

The checksum (shards/checksums.py) is that of all other fields, as compact JSON in the order of the
file. So white space does not matter, and any other change is detected: a value, a name, the order,
a field that is missing or added. A file that a person has written or edited needs no `check`.
"""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from shards.checksums import hex_checksum
from shards.errors import BadInput, quote

CHECK = "check"

T = TypeVar("T")


def encode(value: object) -> bytes:
    """Encode a struct or mapping as a readable JSON object that ends with its checksum."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    return msgspec.json.format(msgspec.json.encode(plain | {CHECK: _check(plain)}))


def decode(content: bytes, kind: type[T], *, required: bool = False, dec_hook: Any = None) -> T:
    """Decode the result of `encode` as a `kind`; the checksum may be missing unless `required`.

    Raises BadInput, and what msgspec raises (`errors.UNDECODABLE`).
    """
    plain = decode_fields(content)
    check = plain.pop(CHECK, None)
    # Convert first: its error says more about an edited file than a wrong checksum.
    value = msgspec.convert(plain, kind, str_keys=True, dec_hook=dec_hook)
    actual = _check(plain)
    if check is None and required:
        raise BadInput(f"expected a field `{CHECK}`, its checksum, got none")
    if check is not None and check != actual:
        remedy = "" if required else f"; if it was edited on purpose, remove the field `{CHECK}`"
        raise BadInput("it is damaged or was edited", expected=f"checksum {actual}{remedy}")
    return value


def decode_fields(content: bytes) -> dict[str, Any]:
    """The fields of a JSON object; raises BadInput for a repeated one, and as `decode` does."""
    fields = msgspec.json.decode(content, type=dict[str, Any])
    json.loads(content, object_pairs_hook=refuse_repeated)  # msgspec keeps the last of them
    return fields


def refuse_repeated(fields: Sequence[tuple[str, object]]) -> dict[str, object]:
    """The fields of a JSON object, as a hook of `json.loads`; raises BadInput for a repeated one.

    Its other value would be lost without a word.
    """
    values = dict(fields)
    if len(values) < len(fields):
        (repeated, _), *_ = Counter(name for name, _ in fields).most_common(1)
        raise BadInput(quote(repeated), expected="this field once", got="it again")
    return values


def _check(plain: dict[str, Any]) -> str:
    return hex_checksum([msgspec.json.encode(plain)])
