"""Encodes messages to bytes and decodes them.

A header is at most 48 KB of MessagePack: one map with exactly the keys of its struct. The
decoder checks each length against the bytes present before it allocates, so no header can cost more
memory than its own size. An invalid header raises an error that names its sender's mistake in one
line; the connection is not affected. payloads.py defines the frames that follow it.

Messages for one peer at the same moment, such as a push and the next pull, travel in one envelope.
Its first frame holds the headers, each preceded by its length and the number of its frames; the
frames of all messages follow in order.
"""

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from shards.errors import UNDECODABLE, BadMessage
from shards.messages import PROTOCOL, Message, Probe, Reply, Request

MAX_HEADER_BYTES = 48 << 10
MAX_STATE_BYTES = 64 << 20
MAX_TOGETHER = 8  # messages in one envelope
_SHOWN = 16  # characters of a foreign message's tag

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")

_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REQUEST: msgspec.msgpack.Decoder[Request | Probe] = msgspec.msgpack.Decoder(Request | Probe)
_REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class _Greeting(msgspec.Struct, frozen=True):
    """The fields that a Hello or Describe of any protocol has; others are ignored."""

    t: str
    protocol: int


_GREETINGS = msgspec.msgpack.Decoder(_Greeting)
_PLACE = struct.Struct("<HH")  # bytes of a header, frames that belong to it
MARKED = MAX_HEADER_BYTES >> 8
"""The second byte of an envelope is at most this; that of another message, such as a part of one,
is more. A receiver compares it before it calls the reader of such messages."""


def encode(message: Message) -> bytes:
    """The header of `message`; its frames are sent separately."""
    header = _ENCODER.encode(message)
    assert len(header) <= MAX_HEADER_BYTES, "our own headers are bounded by their fields"
    return header


def encode_state(state: msgspec.Struct) -> bytes:
    """Encode a struct that travels as a separate frame, because it may exceed a header's size."""
    return _ENCODER.encode(state)


def decode_state(frame: Buffer, kind: type[T]) -> T:
    """The struct in a frame of `encode_state`; raises BadMessage."""
    return decode(frame, msgspec.msgpack.Decoder(kind), MAX_STATE_BYTES, "state frame")


def decode(
    packed: Buffer,
    decoder: "msgspec.msgpack.Decoder[T]",
    max_bytes: int = MAX_HEADER_BYTES,
    label: str = "header",
) -> T:
    """Decode at most `max_bytes`; raises BadMessage, naming the input by its `label`."""
    if len(packed) > max_bytes:
        raise BadMessage(f"{label}: expected at most {max_bytes} bytes, got {len(packed)}")
    try:
        return decoder.decode(packed)
    except UNDECODABLE as error:
        raise BadMessage(f"{label}: {error}") from None


decode_request = partial(decode, decoder=_REQUESTS)
"""Decode a client's request to a shard; raises BadMessage."""


def decode_client_message(packed: Buffer) -> Request | Probe:
    """Decode a client's request to a shard, or its Probe; raises BadMessage.

    A greeting of another protocol may have other fields: the error then names the protocols.
    """
    try:
        if len(packed) <= MAX_HEADER_BYTES:  # as `decode`, but that is a call at every message
            return _REQUEST.decode(packed)
    except UNDECODABLE:
        # The protocols differ if the sender is of another release: say that, not which field is
        # unknown.
        with suppress(*UNDECODABLE):
            greeting = _GREETINGS.decode(packed)
            if greeting.protocol != PROTOCOL:
                text = f"expected protocol {PROTOCOL}, got protocol {greeting.protocol}"
                raise BadMessage(f"{greeting.t[:_SHOWN]}: {text}") from None
    return decode(packed, _REQUEST)  # which raises


decode_reply = partial(decode, decoder=_REPLIES)
"""Decode a shard's reply; raises BadMessage."""


# --- envelopes ------------------------------------------------------------------------------------

Frames = Sequence[NDArray[Any] | Buffer]


def enclose(messages: Sequence[tuple[Message, Frames]]) -> list[Buffer]:
    """The parts of an envelope for a socket: all headers in one, then every frame, uncopied."""
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
    """Each header of an envelope with its frames; raises BadMessage.

    The whole envelope is checked before the first header is returned.
    """
    messages: list[tuple[memoryview, Sequence[T]]] = []
    headers, end, base = memoryview(first), 0, 0
    size_of_headers = len(headers)
    while end < size_of_headers:
        start = end + _PLACE.size
        if start > size_of_headers or len(messages) == MAX_TOGETHER:
            raise BadMessage(f"envelope: expected at most {MAX_TOGETHER} headers with their places")
        # A wrong length is not found here: it makes the sums behind the loop differ.
        size, count = _PLACE.unpack_from(headers, end)
        end, begin = start + size, base
        base += count
        messages.append((headers[start:end], frames[begin:base]))
    if not messages or end != size_of_headers or base != len(frames):
        raise BadMessage(
            f"envelope: its headers take {end} bytes and {base} frames,"
            f" got {size_of_headers} and {len(frames)}"
        )
    return iter(messages)


def wrap(frames: Sequence[NDArray[Any] | Buffer]) -> list[Buffer]:
    """Frames as buffers for a socket, without a copy."""
    return [frame.data if isinstance(frame, np.ndarray) else frame for frame in frames]
