"""The messages between the copies of a shard, the coordinator and clients that look for a primary.

shards/replication_messages.py defines what copies and the coordinator exchange by boot number. This
file adds what a network needs: the job's id, which is a secret that outsiders do not know, and the
address at which each process listens. Control messages are as small as headers; between copies the
frames of an entry or a state follow.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from shards import wire_format
from shards.messages import Count, Name, Text
from shards.replication_messages import Assignment, Beat, Epoch, ToPeer
from shards.wire_format import Buffer

Endpoint = Name


class PeerMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message from copy `origin` to copy `to`, named by their boot numbers."""

    job: Name
    origin: Count
    to: Count
    message: ToPeer


class Heartbeat(msgspec.Struct, frozen=True, tag="report", forbid_unknown_fields=True):
    """A copy's beat, and its addresses: `endpoint` for clients, `peer` for its peer."""

    job: Name
    beat: Beat
    endpoint: Endpoint
    peer: Endpoint


class LocatePrimaries(msgspec.Struct, frozen=True, tag="where", forbid_unknown_fields=True):
    """Asks which copies are the primaries; the sender also receives changes for a while."""

    job: Name


class AdmitCopies(msgspec.Struct, frozen=True, tag="admit", forbid_unknown_fields=True):
    """The operator registers copies, by boot number, with their public keys."""

    job: Name
    copies: dict[int, Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]]


class EndJob(msgspec.Struct, frozen=True, tag="end", forbid_unknown_fields=True):
    """The operator reports that the job cannot continue, with the reason for its clients."""

    job: Name
    reason: Text


class AssignmentNotice(msgspec.Struct, frozen=True, tag="word", forbid_unknown_fields=True):
    """The coordinator's assignment, and the peer addresses of the copies that it names."""

    assignment: Assignment
    peers: dict[int, str]


class PrimaryInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The holders of a shard by its last confirmed configuration, and the primary's address.

    `promotable` are the copies with every acknowledged push, the primary first. A shard that is
    `under_replicated` has no backup and could use a spare process as one.
    """

    shard: Count
    epoch: Epoch
    primary: Count
    backup: Count | None
    promotable: list[int]
    endpoint: str
    under_replicated: bool = msgspec.field(name="lonely")


class PrimaryList(msgspec.Struct, frozen=True, tag="seats", forbid_unknown_fields=True):
    """The answer to `LocatePrimaries`: every shard with a known primary that has reported.

    If the job has `ended`, for the reason given here, no shard will be served again.
    """

    primaries: list[PrimaryInfo] = msgspec.field(name="seats")
    ended: Text = ""


CoordinatorRequest = Heartbeat | LocatePrimaries | AdmitCopies | EndJob

_PEER_MESSAGE = msgspec.msgpack.Decoder(PeerMessage)
_REQUEST: msgspec.msgpack.Decoder[CoordinatorRequest] = msgspec.msgpack.Decoder(CoordinatorRequest)
_NOTICE = msgspec.msgpack.Decoder(AssignmentNotice)


def decode_peer_message(frames: Sequence[Buffer]) -> PeerMessage:
    """The message between copies in the first of `frames`; raises BadMessage."""
    first = frames[0] if frames else b""
    if len(first) > wire_format.MAX_HEADER_BYTES:  # many leases ran out at once
        return wire_format.decode_state(first, PeerMessage)
    return wire_format.decode(first, _PEER_MESSAGE)


def decode_coordinator_request(frame: Buffer) -> CoordinatorRequest:
    """A message to the coordinator; raises BadMessage."""
    return wire_format.decode(frame, _REQUEST)


def decode_assignment(frame: Buffer) -> AssignmentNotice:
    """A notice from the coordinator to a copy; raises BadMessage."""
    return wire_format.decode(frame, _NOTICE)


def decode_primaries(frame: Buffer) -> PrimaryList:
    """The coordinator's answer to `LocatePrimaries`; raises BadMessage."""
    return wire_format.decode_state(frame, PrimaryList)
