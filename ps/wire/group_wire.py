"""What travels between the copies of a shard, the coordinator and those who look for a primary.

shards/group.py says what copies and coordinator tell each other by boot number; here stands what a
network adds to that: which job is meant (its id is a secret, which a stranger does not know), and
where each process listens. Control messages are as small as headers are; between copies the frames
of an entry or a state follow.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from shards import codec
from shards.codec import Buffer
from shards.group import Assignment, Beat, Epoch, ToPeer
from shards.messages import Count, Name

Endpoint = Name


class Carried(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From copy `origin` to copy `to`, by their boot numbers."""

    job: Name
    origin: Count
    to: Count
    message: ToPeer


class Report(msgspec.Struct, frozen=True, tag="report", forbid_unknown_fields=True):
    """A copy's beat, and where it listens: for clients, and for its peer."""

    job: Name
    beat: Beat
    endpoint: Endpoint
    peer: Endpoint


class Where(msgspec.Struct, frozen=True, tag="where", forbid_unknown_fields=True):
    """Who serves? Whoever asks is also told of changes, for a while."""

    job: Name


class Admit(msgspec.Struct, frozen=True, tag="admit", forbid_unknown_fields=True):
    """These are copies, by boot number, and their keys; the operator says so (roll.py)."""

    job: Name
    copies: dict[int, Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]]


class Word(msgspec.Struct, frozen=True, tag="word", forbid_unknown_fields=True):
    """The coordinator's decision, and where the copies named in it await their peer."""

    assignment: Assignment
    peers: dict[int, str]


class Seat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who holds a shard by its last confirmed configuration, and where the primary serves.

    `promotable` holds every acknowledged push, the primary first; `lonely` says that a process that
    could become the backup would be welcome.
    """

    shard: Count
    epoch: Epoch
    primary: Count
    backup: Count | None
    promotable: list[int]
    endpoint: str
    lonely: bool


class Seats(msgspec.Struct, frozen=True, tag="seats", forbid_unknown_fields=True):
    """The answer to `Where`: every shard whose primary is known and has been heard."""

    seats: list[Seat]


Asked = Report | Where | Admit

_CARRIED = msgspec.msgpack.Decoder(Carried)
_ASKED: msgspec.msgpack.Decoder[Asked] = msgspec.msgpack.Decoder(Asked)
_WORD = msgspec.msgpack.Decoder(Word)


def decode_carried(frames: Sequence[Buffer]) -> Carried:
    """The message between copies that `frames` begin with; raises BadMessage."""
    first = frames[0] if frames else b""
    if len(first) > codec.MAX_HEADER_BYTES:  # many leases ran out at once
        return codec.decode_state(first, Carried)
    return codec.decode(first, _CARRIED)


def decode_asked(frame: Buffer) -> Asked:
    """What the coordinator was told or asked; raises BadMessage."""
    return codec.decode(frame, _ASKED)


def decode_word(frame: Buffer) -> Word:
    """What the coordinator told a copy; raises BadMessage."""
    return codec.decode(frame, _WORD)


def decode_seats(frame: Buffer) -> Seats:
    """What the coordinator answered; raises BadMessage."""
    return codec.decode_state(frame, Seats)
