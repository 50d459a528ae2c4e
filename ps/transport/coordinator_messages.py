"""What travels between the copies of a shard, the coordinator and those who look for a primary.

shards/replication_messages.py says what copies and coordinator tell each other by boot number; here
stands what a network adds to that: which job is meant (its id is a secret, which a stranger does
not know), and where each process listens. Control messages are as small as headers are; between
copies the frames of an entry or a state follow.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from shards import wire_format
from shards.messages import Count, Name
from shards.replication_messages import Assignment, Beat, Epoch, ToPeer
from shards.wire_format import Buffer

Endpoint = Name


class PeerMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From copy `origin` to copy `to`, by their boot numbers."""

    job: Name
    origin: Count
    to: Count
    message: ToPeer


class Heartbeat(msgspec.Struct, frozen=True, tag="report", forbid_unknown_fields=True):
    """A copy's beat, and where it listens: for clients, and for its peer."""

    job: Name
    beat: Beat
    endpoint: Endpoint
    peer: Endpoint


class LocatePrimaries(msgspec.Struct, frozen=True, tag="where", forbid_unknown_fields=True):
    """Who serves? Whoever asks is also told of changes, for a while."""

    job: Name


class AdmitCopies(msgspec.Struct, frozen=True, tag="admit", forbid_unknown_fields=True):
    """These are copies, by boot number, and their keys; the operator says so (copy_registry.py)."""

    job: Name
    copies: dict[int, Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]]


class AssignmentNotice(msgspec.Struct, frozen=True, tag="word", forbid_unknown_fields=True):
    """The coordinator's decision, and where the copies named in it await their peer."""

    assignment: Assignment
    peers: dict[int, str]


class PrimaryInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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


class PrimaryList(msgspec.Struct, frozen=True, tag="seats", forbid_unknown_fields=True):
    """The answer to `LocatePrimaries`: every shard whose primary is known and has been heard."""

    seats: list[PrimaryInfo]


Asked = Heartbeat | LocatePrimaries | AdmitCopies

_CARRIED = msgspec.msgpack.Decoder(PeerMessage)
_ASKED: msgspec.msgpack.Decoder[Asked] = msgspec.msgpack.Decoder(Asked)
_WORD = msgspec.msgpack.Decoder(AssignmentNotice)


def decode_peer_message(frames: Sequence[Buffer]) -> PeerMessage:
    """The message between copies that `frames` begin with; raises BadMessage."""
    first = frames[0] if frames else b""
    if len(first) > wire_format.MAX_HEADER_BYTES:  # many leases ran out at once
        return wire_format.decode_state(first, PeerMessage)
    return wire_format.decode(first, _CARRIED)


def decode_coordinator_request(frame: Buffer) -> Asked:
    """What the coordinator was told or asked; raises BadMessage."""
    return wire_format.decode(frame, _ASKED)


def decode_assignment(frame: Buffer) -> AssignmentNotice:
    """What the coordinator told a copy; raises BadMessage."""
    return wire_format.decode(frame, _WORD)


def decode_primaries(frame: Buffer) -> PrimaryList:
    """What the coordinator answered; raises BadMessage."""
    return wire_format.decode_state(frame, PrimaryList)
