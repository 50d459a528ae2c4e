"""Protobuf's wire format, many messages at a time.

A decoder in Python costs some microseconds a field. Here each function takes a field of thousands
of messages in one pass of NumPy. Positions are int64 arrays of byte offsets in one buffer, and a
message is the bytes between a start and an end.

Only the form that writers produce is understood: fields of bytes, with tags of one byte. Anything
else raises Unusual, and the caller lets the protobuf library rewrite the messages into this form.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]
_LENGTH_BYTES = 5  # of a varint below 2**31
_VARINT_BYTES = 10
_SHORT_BYTES = 16  # up to here an index for each byte costs less than a slice for each message


class Unusual(Exception):
    """Messages in a form that no common writer produces, or no messages at all."""


class Fields(NamedTuple):
    """Fields of messages: the index of the message, the tag, and where the content is."""

    parent: Positions
    tag: NDArray[np.uint8]
    starts: Positions
    ends: Positions


def field_at(
    data: bytes, at: Positions, limit: Positions
) -> tuple[NDArray[np.uint8], Positions, Positions]:
    """The fields that begin at `at` and end before `limit`: tags, and where the contents are."""
    buffer = np.frombuffer(data, np.uint8)
    tag = buffer.take(at, mode="clip")
    low = buffer.take(at + 1, mode="clip")
    start, length = at + 2, low.astype(np.int64)
    long = np.flatnonzero(low & 0x80)
    if len(long):
        length[long] &= 0x7F
        for k in range(1, _LENGTH_BYTES):
            byte = buffer.take(at[long] + 1 + k, mode="clip").astype(np.int64)
            length[long] |= (byte & 0x7F) << 7 * k
            start[long] += 1
            long = long[byte >= 0x80]
    end = start + length
    if len(long) or np.any((tag & 0x87) != 2) or np.any(end > limit):
        raise Unusual
    return tag, start, end


def fields(data: bytes, starts: Positions, ends: Positions) -> Fields:
    """All fields of the messages, by message and in order."""
    parts = []
    active, at = np.flatnonzero(starts < ends), starts
    at = at[active]
    while len(active):
        limit = ends[active]
        tag, start, end = field_at(data, at, limit)
        parts.append((active, tag, start, end))
        more = end < limit
        active, at = active[more], end[more]
    if not parts:
        nothing = np.zeros(0, np.int64)
        return Fields(nothing, np.zeros(0, np.uint8), nothing, nothing)
    if len(parts) == 1:
        return Fields(*parts[0])
    parent = np.concatenate([part[0] for part in parts])
    counts = np.bincount(parent, minlength=len(starts))
    first = np.cumsum(counts) - counts
    slots = np.concatenate([first[part[0]] + k for k, part in enumerate(parts)])
    order = np.empty(len(parent), np.int64)
    order[slots] = np.arange(len(parent))
    tag, begin, stop = (np.concatenate([part[k] for part in parts]).take(order) for k in (1, 2, 3))
    return Fields(parent.take(order), tag, begin, stop)


def gather(data: bytes, starts: Positions, ends: Positions) -> NDArray[np.uint8]:
    """The bytes of all messages, one after another."""
    sizes = ends - starts
    if not len(sizes):
        return np.zeros(0, np.uint8)
    size = int(sizes[0])
    if np.all(sizes == size):
        if not size:
            return np.zeros(0, np.uint8)
        windows = np.ndarray((len(data) - size + 1,), f"V{size}", data, strides=(1,))
        return windows[starts].view(np.uint8)
    longest = int(sizes.max())
    if longest <= _SHORT_BYTES:
        column = np.arange(longest)
        positions = starts[:, None] + column
        return np.frombuffer(data, np.uint8).take(positions, mode="clip")[column < sizes[:, None]]
    view = memoryview(data)
    pieces = [view[i:j] for i, j in zip(starts.tolist(), ends.tolist(), strict=True)]
    return np.frombuffer(b"".join(pieces), np.uint8)


def decode_varints(
    content: NDArray[np.uint8], sizes: Positions
) -> tuple[NDArray[np.int64], Positions]:
    """The integers in `content`, and how many each of its parts of `sizes` bytes holds."""
    if not len(content):
        return np.zeros(0, np.int64), np.zeros(len(sizes), np.int64)
    last = content < 0x80
    stops = np.cumsum(sizes)
    until = np.concatenate(([0], np.cumsum(last)))  # values that end before each byte
    counts = np.diff(until[stops], prepend=0)
    if not np.all(last[stops[sizes > 0] - 1]):
        raise Unusual
    ends = np.flatnonzero(last)
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts + 1
    longest = int(lengths.max())
    if longest > _VARINT_BYTES:
        raise Unusual
    values = (content[starts] & 0x7F).astype(np.uint64)
    for k in range(1, longest):
        some = np.flatnonzero(lengths > k)
        part = (content[starts[some] + k] & 0x7F).astype(np.uint64)
        values[some] |= part << np.uint64(7 * k)
    return values.view(np.int64), counts


def encode_varints(values: NDArray[np.int64]) -> tuple[NDArray[np.uint8], Positions]:
    """The integers as varints, one after another, and the number of bytes of each."""
    numbers = values.view(np.uint64)
    lengths = np.ones(len(numbers), np.int64)
    for k in range(1, _VARINT_BYTES):
        lengths += numbers >= np.uint64(1 << 7 * k)
    longest = int(lengths.max(initial=1))
    shifts = np.arange(longest, dtype=np.uint64) * np.uint64(7)
    matrix = (numbers[:, None] >> shifts & np.uint64(0x7F)).astype(np.uint8)
    column = np.arange(longest)
    matrix[column < lengths[:, None] - 1] |= 0x80
    return matrix[column < lengths[:, None]], lengths


def varint(value: int) -> bytes:
    """One integer from 0 as a varint."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
