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
    definitions: dict[str, Any] = {}
    described = [
        _describe(type_info, definitions) for type_info in inspect.multi_type_info(list(types))
    ]
    canonical = msgspec.json.encode([described, definitions], order="deterministic")
    return hashlib.sha256(canonical).hexdigest()[:_DIGITS]


def _describe(value: Any, definitions: dict[str, Any]) -> Any:
    """A type of `msgspec.inspect` as plain values; `definitions` has those of structs and enums."""
    match value:
        case inspect.StructType(cls=cls):
            if cls.__name__ not in definitions:
                definitions[cls.__name__] = None  # a struct may refer to itself
                fields = [_describe(field, definitions) for field in value.fields]
                # The order of a map's fields is no part of the wire's form; that of an array's is.
                if not value.array_like:
                    fields.sort(key=lambda field: str(field["encode_name"]))
                layout = value.tag_field, value.tag, value.array_like, value.forbid_unknown_fields
                definitions[cls.__name__] = [layout, fields]
            return cls.__name__
        case inspect.EnumType(cls=cls):
            definitions[cls.__name__] = sorted(str(member.value) for member in cls)
            return cls.__name__
        case inspect.UnionType(types=types):
            return sorted((_describe(alternative, definitions) for alternative in types), key=str)
        case inspect.Metadata(type=plain):
            return _describe(plain, definitions)
        case inspect.Type() | inspect.Field():
            present = {
                name: part
                for name in value.__struct_fields__
                if (part := getattr(value, name)) not in (None, msgspec.NODEFAULT)
            }
            if "encode_name" in present:  # a renamed attribute changes nothing on the wire
                present["name"] = present["encode_name"]
            kind = type(value).__name__
            return {
                "kind": kind,
                **{
                    name: _describe(field_value, definitions)
                    for name, field_value in present.items()
                },
            }
        case list() | tuple():
            return [_describe(element, definitions) for element in value]
        case None | bool() | int() | float() | str():
            return value
    return getattr(value, "__qualname__", None) or repr(value)  # a default, or what makes it


SCHEMA = schema_id()


def differs(protocol: int, schema: str) -> str:
    """The difference of another side's protocol and schema from ours, in words; empty if none."""
    if (protocol, schema) == (PROTOCOL, SCHEMA):
        return ""
    if protocol != PROTOCOL:
        return f"expected protocol {PROTOCOL}, got protocol {protocol}"
    return f"expected schema {SCHEMA} of protocol {PROTOCOL}, got schema {schema}"
