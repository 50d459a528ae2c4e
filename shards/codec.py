"""Messages to bytes and back.

A header is at most 4 KB of MessagePack: one flat map with exactly the keys of its struct. The
limits below are handed to the parser, so that no length it reads can make it allocate more than
a header is worth, and everything about a payload (number of frames, element type, length) is
checked before its first byte is looked at. A header that fails names its sender's mistake in one
line; nothing else about the connection changes.
"""

from collections.abc import Sequence
from typing import TypeVar

import msgpack
import msgspec
import numpy as np
from numpy.typing import NDArray

from shards.errors import BadMessage
from shards.messages import Keys, Kind, Message, Reply, Request
from shards.tables import KeyRange

MAX_HEADER_BYTES = 4096
MAX_STATE_BYTES = 64 << 20

_DTYPES = {Kind.F4: np.dtype("<f4")}

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")


def encode(message: Message) -> bytes:
    """The header of `message`; its frames travel beside it."""
    header: bytes = msgpack.packb(msgspec.to_builtins(message))
    assert len(header) <= MAX_HEADER_BYTES, "our own headers are bounded by their fields"
    return header


def decode_request(header: Buffer) -> Request:
    """What a client said; raises BadMessage."""
    return _decode(header, Request)  # type: ignore[arg-type]


def decode_reply(header: Buffer) -> Reply:
    """What a shard said; raises BadMessage."""
    return _decode(header, Reply)  # type: ignore[arg-type]


def encode_state(state: msgspec.Struct) -> bytes:
    """A struct that travels as a frame of its own because it may outgrow a header."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(state))
    return packed


def decode_state(frame: Buffer, kind: type[T]) -> T:
    """The struct in such a frame; raises BadMessage."""
    if len(frame) > MAX_STATE_BYTES:
        raise BadMessage(f"state frame: expected at most {MAX_STATE_BYTES} bytes, got {len(frame)}")
    return _convert(frame, kind, max_array_len=1 << 20, max_map_len=1 << 20)


def _decode(header: Buffer, kind: type[T]) -> T:
    if len(header) > MAX_HEADER_BYTES:
        raise BadMessage(f"header: expected at most {MAX_HEADER_BYTES} bytes, got {len(header)}")
    return _convert(header, kind, max_array_len=64, max_map_len=32)


def _convert(packed: Buffer, kind: type[T], *, max_array_len: int, max_map_len: int) -> T:
    try:
        plain = msgpack.unpackb(
            packed,
            max_array_len=max_array_len,
            max_map_len=max_map_len,
            max_str_len=1024,  # 256 characters, the most a field may have, of 4 bytes
            max_bin_len=4096,
            max_ext_len=0,
        )
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        detail = str(error) or type(error).__name__
        raise BadMessage(f"header: expected MessagePack within limits, got {detail}") from None
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise BadMessage(f"header: {error}") from None


def wrap(frames: Sequence[NDArray[np.float32] | bytes]) -> list[Buffer]:
    """Frames as a socket sends them, without a copy."""
    return [frame.data if isinstance(frame, np.ndarray) else frame for frame in frames]


def flatten(ranges: Sequence[KeyRange]) -> list[int]:
    """Key ranges as a header carries them: [start, stop, start, stop, ...]."""
    return [bound for keys in ranges for bound in (keys.start, keys.stop)]


def show(keys: Keys) -> str:
    """Flattened key ranges as a person reads them."""
    return " ".join(f"[{a}, {b})" for a, b in zip(keys[::2], keys[1::2], strict=False)) or "no keys"


def arrays(
    what: str, kind: Kind, ranges: Sequence[KeyRange], frames: Sequence[Buffer]
) -> tuple[NDArray[np.float32], ...]:
    """The frames of a payload as arrays, one a range, without a copy; raises BadMessage."""
    dtype = _DTYPES[kind]
    if len(frames) != len(ranges):
        raise BadMessage(f"{what}: expected {len(ranges)} frames, got {len(frames)}")
    for keys, frame in zip(ranges, frames, strict=True):
        if memoryview(frame).nbytes != len(keys) * dtype.itemsize:
            raise BadMessage(
                f"{what}: keys {keys} as {kind} take {len(keys) * dtype.itemsize} bytes,"
                f" got {memoryview(frame).nbytes}"
            )
    return tuple(np.frombuffer(frame, dtype) for frame in frames)
