"""Messages to bytes and back.

A header is at most 4 KB of MessagePack: one flat map with exactly the keys of its struct. It is
decoded straight into the struct by a decoder that checks each length against the bytes that are
there before it allocates, so that no header can cost more than its own size. One that fails names
its sender's mistake in one line; nothing else about the connection changes. What the frames behind
it may be is said in payloads.py.

What goes to one peer at one moment, as a push and the next pull do, travels in one envelope: its
first frame holds the headers, each behind its length and the number of its frames, and the frames
of all follow in order.
"""

import struct
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from shards.errors import UNDECODABLE, BadMessage
from shards.messages import Keys, Message, Probe, Reply, Request
from shards.tables import KeyRange

MAX_HEADER_BYTES = 4096
MAX_STATE_BYTES = 64 << 20
MAX_TOGETHER = 8  # messages in one envelope

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")

_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_ASKED: msgspec.msgpack.Decoder[Request | Probe] = msgspec.msgpack.Decoder(Request | Probe)
_REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_PLACE = struct.Struct("<HH")  # bytes of a header, frames that belong to it


def encode(message: Message) -> bytes:
    """The header of `message`; its frames travel beside it."""
    header = _ENCODER.encode(message)
    assert len(header) <= MAX_HEADER_BYTES, "our own headers are bounded by their fields"
    return header


def encode_state(state: msgspec.Struct) -> bytes:
    """A struct that travels as a frame of its own because it may outgrow a header."""
    return _ENCODER.encode(state)


def decode_state(frame: Buffer, kind: type[T]) -> T:
    """The struct in such a frame; raises BadMessage."""
    return decode(frame, msgspec.msgpack.Decoder(kind), MAX_STATE_BYTES, "state frame")


def decode(
    packed: Buffer,
    decoder: "msgspec.msgpack.Decoder[T]",
    most_bytes: int = MAX_HEADER_BYTES,
    what: str = "header",
) -> T:
    """What takes no more than that; raises BadMessage."""
    if len(packed) > most_bytes:
        raise BadMessage(f"{what}: expected at most {most_bytes} bytes, got {len(packed)}")
    try:
        return decoder.decode(packed)
    except UNDECODABLE as error:
        raise BadMessage(f"{what}: {error}") from None


decode_request = partial(decode, decoder=_REQUESTS)
"""What a client said to a shard; raises BadMessage."""

decode_asked = partial(decode, decoder=_ASKED)
"""What a client said to a shard, or to its host; raises BadMessage."""

decode_reply = partial(decode, decoder=_REPLIES)
"""What a shard said; raises BadMessage."""


# --- envelopes ------------------------------------------------------------------------------------

Frames = Sequence[NDArray[Any] | Buffer]


def enclose(messages: Sequence[tuple[Message, Frames]]) -> list[Buffer]:
    """An envelope as a socket sends it: the headers in one frame, then every frame, uncopied."""
    assert len(messages) <= MAX_TOGETHER, f"{len(messages)} messages in one envelope"
    headers: list[bytes] = []
    payload: list[Buffer] = []
    for message, frames in messages:
        header = _ENCODER.encode(message)
        assert len(header) <= MAX_HEADER_BYTES, "our own headers are bounded by their fields"
        headers.append(_PLACE.pack(len(header), len(frames)))
        headers.append(header)
        for frame in frames:
            plain = frame.data if isinstance(frame, np.ndarray) else frame
            payload.append(plain)  # as `wrap`, but that is a call, and it stands in every message
    return [b"".join(headers), *payload]


def disclose(first: Buffer, frames: Sequence[T]) -> Iterator[tuple[memoryview, Sequence[T]]]:
    """Each header of an envelope and the frames that are its own; raises BadMessage.

    Nothing is handed out before the whole adds up.
    """
    found: list[tuple[memoryview, Sequence[T]]] = []
    headers, end, base = memoryview(first), 0, 0
    came = len(headers)
    while end < came:
        start = end + _PLACE.size
        if start > came or len(found) == MAX_TOGETHER:
            raise BadMessage(f"envelope: expected at most {MAX_TOGETHER} headers with their places")
        size, count = _PLACE.unpack_from(headers, end)
        end, own = start + size, base
        base += count
        found.append((headers[start:end], frames[own:base]))
    if not found or end != came or base != len(frames):
        raise BadMessage(
            f"envelope: its headers take {end} bytes and {base} frames,"
            f" got {came} and {len(frames)}"
        )
    return iter(found)


def wrap(frames: Sequence[NDArray[Any] | Buffer]) -> list[Buffer]:
    """Frames as a socket sends them, without a copy."""
    return [frame.data if isinstance(frame, np.ndarray) else frame for frame in frames]


def flatten(ranges: Sequence[KeyRange]) -> list[int]:
    """Key ranges as a header carries them: [start, stop, start, stop, ...]."""
    return [bound for keys in ranges for bound in (keys.start, keys.stop)]


def show(keys: Keys) -> str:
    """Flattened key ranges as a person reads them."""
    return " ".join(f"[{a}, {b})" for a, b in zip(keys[::2], keys[1::2], strict=False)) or "no keys"
