"""What two sides that share memory say beside their messages: a frame that may precede an envelope.

    Offer    with a Hello       my segment is called so
    Accept   with a Welcome     I see it, for I read its number; mine is called so
    Decline  with a Welcome     I don't share memory with you, because
    Carried  with any request   proof that I see yours; what I have returned; where my frames lie
    Lent     with Weights       the frames are references, under this loan

A note starts with bytes that no envelope begins with (wire_format.py), for no header is so long. So
an envelope without one is what it always was, and a peer that shares nothing need not know of
notes.
"""

import msgspec

from shards import wire_format
from shards.messages import Count, Name, Text
from shards.wire_format import Buffer

_MARK = b"\xff\xff"
assert int.from_bytes(_MARK, "little") > wire_format.MAX_HEADER_BYTES


class _Note(msgspec.Struct, frozen=True, tag_field="e", forbid_unknown_fields=True):
    pass


class Offer(_Note, frozen=True, tag="offer"):
    segment: Name


class Accept(_Note, frozen=True, tag="accept"):
    """`read` is the number found in the segment that was offered."""

    read: Name
    segment: Name


class Decline(_Note, frozen=True, tag="decline"):
    reason: Text


class SharedFrames(_Note, frozen=True, tag="carried"):
    """`mine` and `yours` are the numbers in the two segments; `referred`: frames are references.

    Loans up to `seen` that are not in `held` are returned (loans.py).
    """

    mine: Name
    yours: Name
    referred: bool
    seen: Count
    held: list[Count]


class Lent(_Note, frozen=True, tag="lent"):
    loan: Count


FromWorker = Offer | SharedFrames
FromShard = Accept | Decline | Lent


_FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_FROM_SHARD: msgspec.msgpack.Decoder[FromShard] = msgspec.msgpack.Decoder(FromShard)


def encode(note: FromWorker | FromShard) -> bytes:
    """The note's frame."""
    return _MARK + wire_format.encode_state(note)


def is_note(frame: Buffer) -> bool:
    """Whether the first frame of what has come is a note."""
    return bytes(frame[: len(_MARK)]) == _MARK


def decode_from_worker(frame: Buffer) -> FromWorker:
    """What a worker's link said; raises BadMessage."""
    return wire_format.decode(frame[len(_MARK) :], _FROM_WORKER)


def decode_from_shard(frame: Buffer) -> FromShard:
    """What a shard's link said; raises BadMessage."""
    return wire_format.decode(frame[len(_MARK) :], _FROM_SHARD)
