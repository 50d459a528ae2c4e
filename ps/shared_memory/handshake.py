"""The notes that negotiate shared memory: an optional frame before an envelope.

    Offer         with a Hello      the name of the worker's segment
    Accept        with a Welcome    the number read there, as proof; the name of the shard's segment
    Decline       with a Welcome    no shared memory, with the reason
    SharedFrames  with any request  proof of sight; loans returned; whether frames are references
    Lent          with Weights      the frames are references, under this loan

A note starts with bytes that no envelope begins with (wire_format.py), because no header is that
long. So an envelope without a note is unchanged, and a peer that shares no memory need not know of
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
    """`read` is the random number found in the offered segment."""

    read: Name
    segment: Name


class Decline(_Note, frozen=True, tag="decline"):
    reason: Text


class SharedFrames(_Note, frozen=True, tag="carried"):
    """`mine` and `yours` are the random numbers in the sender's and the receiver's segment.

    `referred`: the frames are references. Loans up to `seen` that are not in `held` are returned
    (references.py).
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
    """Encode a note as a frame."""
    return _MARK + wire_format.encode_state(note)


def is_note(frame: Buffer) -> bool:
    """Return whether the first frame of a message is a note."""
    return bytes(frame[: len(_MARK)]) == _MARK


def decode_from_worker(frame: Buffer) -> FromWorker:
    """Decode a worker's note; raises BadMessage."""
    return wire_format.decode(frame[len(_MARK) :], _FROM_WORKER)


def decode_from_shard(frame: Buffer) -> FromShard:
    """Decode a shard's note; raises BadMessage."""
    return wire_format.decode(frame[len(_MARK) :], _FROM_SHARD)
