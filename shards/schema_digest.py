"""The schema id: a digest of the messages' fields and types, by which clients are accepted.

Two sides understand each other if they agree on `PROTOCOL`, which stands for the meaning of the
messages, and on the schema, which stands for their form. Both are unchanged by a release that
repairs code, so clients of one release work with shards of another. Docstrings and the order of
definitions do not count; names, fields, types, limits, defaults and tags do.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import inspect

from shards.messages import PROTOCOL, Cut, Probe, Reply, Request
from shards.shard_status import ShardStatus

MESSAGES = (Request, Probe, Reply, Cut, ShardStatus)
_DIGITS = 16


def schema_id(types: Iterable[Any] = MESSAGES) -> str:
    """Sixteen hexadecimal digits over the structs and enums that `types` refer to."""
    found: dict[str, Any] = {}
    described = [_described(one, found) for one in inspect.multi_type_info(list(types))]
    canonical = msgspec.json.encode([described, found], order="deterministic")
    return hashlib.sha256(canonical).hexdigest()[:_DIGITS]


def _described(value: Any, found: dict[str, Any]) -> Any:
    """A type of `msgspec.inspect` as plain values; structs and enums are described in `found`."""
    match value:
        case inspect.StructType(cls=cls):
            if cls.__name__ not in found:
                found[cls.__name__] = None  # a struct may refer to itself
                fields = [_described(field, found) for field in value.fields]
                if not value.array_like:
                    fields.sort(key=lambda field: str(field["encode_name"]))
                layout = value.tag_field, value.tag, value.array_like, value.forbid_unknown_fields
                found[cls.__name__] = [layout, fields]
            return cls.__name__
        case inspect.EnumType(cls=cls):
            found[cls.__name__] = sorted(str(one.value) for one in cls)
            return cls.__name__
        case inspect.UnionType(types=types):
            return sorted((_described(one, found) for one in types), key=str)
        case inspect.Metadata(type=plain):
            return _described(plain, found)
        case inspect.Type() | inspect.Field():
            present = {
                name: part
                for name in value.__struct_fields__
                if (part := getattr(value, name)) not in (None, msgspec.NODEFAULT)
            }
            if "encode_name" in present:  # a renamed attribute changes nothing on the wire
                present["name"] = present["encode_name"]
            kind = type(value).__name__
            return {"kind": kind, **{name: _described(one, found) for name, one in present.items()}}
        case list() | tuple():
            return [_described(one, found) for one in value]
        case None | bool() | int() | float() | str():
            return value
    return getattr(value, "__qualname__", None) or repr(value)  # a default, or what makes it


SCHEMA = schema_id()


def differs(protocol: int, schema: str) -> str:
    """How another side's protocol and schema differ from ours, in words; empty if they do not."""
    if (protocol, schema) == (PROTOCOL, SCHEMA):
        return ""
    if protocol != PROTOCOL:
        return f"expected protocol {PROTOCOL}, got protocol {protocol}"
    return f"expected schema {SCHEMA} of protocol {PROTOCOL}, got schema {schema}"
