"""The schema id changes with the form of a message, and with nothing else."""

from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

from shards.messages import Install, Kind
from shards.schema_digest import MESSAGES, SCHEMA, schema_id
from shards.wire_format import decode_request

Small = Annotated[int, Meta(ge=0, le=9)]


def struct(
    name: str = "Sent",
    fields: tuple[tuple[str, object], ...] = (("size", Small), ("kind", Kind)),
    **options: object,
) -> type[msgspec.Struct]:
    return msgspec.defstruct(name, fields, **options)  # type: ignore[arg-type]


BASE = schema_id([struct()])


def test_it_is_the_same_for_the_same_form() -> None:
    """Neither docstrings nor the order of a map's fields nor a second look count."""
    assert (
        schema_id([struct(namespace={"__doc__": "Something new.", "twice": lambda _: 2})]) == BASE
    )
    assert schema_id([struct(fields=(("kind", Kind), ("size", Small)))]) == BASE
    assert schema_id(MESSAGES) == SCHEMA
    assert len(SCHEMA) == 16


@pytest.mark.parametrize(
    "other",
    [
        struct(name="Taken"),
        struct(fields=(("sizes", Small), ("kind", Kind))),
        struct(fields=(("size", int), ("kind", Kind))),
        struct(fields=(("size", Small),)),
        struct(fields=(("size", Small), ("kind", str))),
        struct(fields=(("size", Small), ("kind", Kind, Kind.F4))),  # type: ignore[arg-type]
        struct(tag="sent"),
        struct(array_like=True),
        struct(forbid_unknown_fields=True),
    ],
)
def test_it_changes_with_the_form(other: type[msgspec.Struct]) -> None:
    """Names, types, limits, defaults, tags and the kind of container count."""
    assert schema_id([other]) != BASE


def test_the_order_of_an_array_counts() -> None:
    """Fields that travel without names are told apart by their places."""
    one = struct(array_like=True)
    other = struct(fields=(("kind", Kind), ("size", Small)), array_like=True)
    assert schema_id([one]) != schema_id([other])


def test_an_enum_counts() -> None:
    """A value more or less is another schema."""
    import enum

    kinds = enum.StrEnum("Kind", [*(kind.value for kind in Kind), "more"])  # type: ignore[misc]
    assert schema_id([struct(fields=(("size", Small), ("kind", kinds)))]) != BASE


def test_a_renamed_attribute_changes_nothing_on_the_wire() -> None:
    """The schema is that of the old name, and an Install in an earlier WAL can be read."""

    class Before(msgspec.Struct, tag="one"):
        old: int

    class After(msgspec.Struct, tag="one", rename={"new": "old"}):
        new: int

    After.__name__ = "Before"
    assert schema_id((After,)) == schema_id((Before,))
    install = {"t": "install", "request": 1, "job": "job", "goes_on": True, "piece": None}
    decoded = decode_request(msgspec.msgpack.encode(install))
    assert decoded == Install(1, "job", keep_workers=True)
