"""The format of a shard's WAL (write-ahead log), and its replay.

Theory. A shard is a deterministic state machine (shards/replica.py): the same requests, in the same
order and with the same times, make the same state, bit for bit. So a shard survives the death of
its process by one rule about answers: a change is in the WAL before any answer that shows it
leaves. A change that a crash destroys was never acknowledged; its sender repeats it.

The WAL holds:

- A *turn*: the requests that a server handled together, with their time. Only kinds that can change
  the state are kept, and only if one of them did. Pushes of one turn may be applied in one pass
  (dense_part.py), and its sum rounds differently from one push after another, so a turn is
  replayed as a whole. A request that is not kept may have ended such a pass; the next kept one is
  then marked `apart`. Pulls end no pass.
- *Ticks*: the workers with leases that ran out, and the tables with a grace that ended. The WAL has
  no clock of its own to decide them.
- The *opening* of each file: its number, the shard's spec, the incarnation that writes it, and the
  length of the file before it. Replaying the opening of a new incarnation drops parked requests,
  because that incarnation did not have them; their workers ask again.
- The *state* at an opening, in a separate file: the base from which later files are replayed.

A repeated or refused push is kept without its frames, which were never read. A push that the guard
refused for its gradient keeps them, because the refusal is counted, and because it makes the pass
apply the other pushes one at a time.

A record is a head, a description of its contents, and frames:

    magic 8 | description bytes 4 | frame bytes 8 | frames' check 8 | head's check 8
    description, MessagePack | padding to 64 | frames, consecutively | padding to 64

The head's check covers the description, so that no length is trusted before it is verified. The
check is seeded with the number of the file: a file may reuse the space of an earlier one
(ps/wal/writer.py), and old bytes after the last record must not pass as records of this file. The
frames' check covers every byte (checksums.py), whichever pages a disk has kept.

A truncated record is ambiguous: its writer may have died while writing it, or the end of the file
was removed later. So the *mark*, a small separate file, records up to where the newest WAL file is
known to be whole. It is rewritten after each record and before the answers leave, and never claims
more than the WAL holds:

    magic 8 | number of the newest file 8 | bytes of it 8 | check 8

This file leaves to others (ps/wal/writer.py): opening files, and knowing when a write is durable.
"""

import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from shards import shard_state, wire_format
from shards.checksums import checksum
from shards.errors import UNDECODABLE, BadInput
from shards.messages import (
    CHANGING,
    Ack,
    Count,
    Message,
    Name,
    Parked,
    Pull,
    Refusal,
    Registered,
    Remedy,
)
from shards.metrics import Counts
from shards.refusals import leaves_state_unchanged
from shards.shard import Shard
from shards.spec import ShardSpec
from shards.transition_io import Arrival, Outgoing
from shards.wire_format import Buffer

FORMAT = 7
MAGIC = b"\x93DPSWAL\n"
_EARLIER = b"\x93DPSLOG\n"  # the magic of formats 1 to 4, with shorter checks
_HEAD = struct.Struct("<8sIQQQ")
_MARK = struct.Struct("<8sQQQ")
_MARKED = b"\x93DPMARK\n"
_ALIGNED = 64  # a record and the frames in it begin at multiples of this

Frames = Sequence[NDArray[Any] | Buffer]


class Call(msgspec.Struct, frozen=True):
    """A request as it arrived: its header, and the number of its frames in the record."""

    header: bytes
    frames: int
    apart: bool = False


class Turn(msgspec.Struct, frozen=True, tag="turn"):
    """Requests that were handled together; `at` is the shard's clock in seconds."""

    at: float
    calls: list[Call]


class Expired(msgspec.Struct, frozen=True, tag="expired"):
    """The leases of `workers` ran out, and the grace for reports on the tables `merges` ended."""

    at: float
    workers: list[Name]
    merges: list[Name] = []


class Opening(msgspec.Struct, frozen=True, tag="opening"):
    """File `number` of the WAL, written by incarnation `boot`, which begins with it if `begins`.

    `spec` is the MessagePack of the shard's spec; `after` is how many bytes the file before it has.
    """

    format: int
    number: Count
    spec: bytes
    boot: Count
    begins: bool
    at: float
    after: Count = 0


class LogPayload(msgspec.Struct, frozen=True, tag="carried"):
    """A request that waited when the file was opened, and that the state lacks.

    It is replayed only after that state was loaded: a replay of the earlier files includes it.
    """

    at: float
    header: bytes


class LoggedState(msgspec.Struct, frozen=True, tag="state"):
    """A shard's state when file `number` was opened; its frames are those of shard_state.py."""

    number: Count
    counts: Counts


Entry = Turn | Expired | Opening | LogPayload | LoggedState


class _Description(msgspec.Struct, frozen=True):
    entry: Entry
    sizes: list[Count]


_DESCRIPTIONS = msgspec.msgpack.Decoder(_Description)


class Damage(BadInput):
    """Bytes from `offset` on that are not a valid record of the WAL."""

    def __init__(self, text: str, offset: int) -> None:
        super().__init__(text)
        self.offset = offset


class Mark(NamedTuple):
    """The extent to which a WAL is known to be whole: byte `end` of the newest file, `number`."""

    number: int
    end: int


class LogRecord(msgspec.Struct, frozen=True):
    """A record: its entry, its frames (views of the source), and the offset of its end."""

    entry: Entry
    frames: list[memoryview]
    end: int


# --- records as bytes -----------------------------------------------------------------------------


def encode(entry: Entry, frames: Frames = (), *, number: int) -> list[Buffer]:
    """A record of file `number` as the buffers to write in order; frames are not copied."""
    plain = [memoryview(frame) for frame in wire_format.wrap(frames)]
    # NumPy's empty arrays cannot be cast to bytes, and have none.
    whole = [frame.cast("B") for frame in plain if frame.nbytes]
    sizes = [frame.nbytes for frame in plain]
    described = msgspec.msgpack.encode(_Description(entry, sizes))
    front = _head(described, sum(sizes), _check(whole), number) + described
    # One small buffer for the head; the arrays are written from where they are.
    return [front + _padding(len(front)), *whole, _padding(sum(sizes))]


def read(content: memoryview, offset: int, source: str, *, number: int) -> LogRecord:
    """The record of file `number` at `offset`; `source` names the file in errors.

    Raises Damage if there is no valid record, and BadInput for a file of an earlier format.
    """
    if offset == 0 and content[: len(_EARLIER)] == _EARLIER:
        raise BadInput(source, expected=f"format {FORMAT}", got="an earlier one")
    front = _front(content, offset, number)
    if front is None:
        raise Damage(f"{source}: expected a record at byte {offset}, got other bytes", offset)
    described, frame_bytes, check, start = front
    try:
        description = _DESCRIPTIONS.decode(described)
    except UNDECODABLE as error:
        raise Damage(f"{source}: the record at byte {offset}: {error}", offset) from None
    end = start + frame_bytes + len(_padding(frame_bytes))
    if end > len(content):
        raise Damage(f"{source}: the record at byte {offset} is cut off", offset)
    frames, at = [], start
    for size in description.sizes:
        frames.append(content[at : at + size])
        at += size
    if at != start + frame_bytes or _check(frames) != check:
        raise Damage(f"{source}: the record at byte {offset} does not match its checksum", offset)
    return LogRecord(description.entry, frames, end)


def next_record(content: memoryview, offset: int, *, number: int) -> int | None:
    """The offset of the next valid head of file `number` after `offset`; None if there is none.

    It distinguishes a damaged record from one that its writer died writing: after the latter there
    is nothing, or only data from a former use of the file.
    """
    start = offset - offset % _ALIGNED + _ALIGNED
    words = np.frombuffer(content[start : len(content) - len(content) % _ALIGNED], "<u8")
    firsts = words[:: _ALIGNED // 8] == int.from_bytes(MAGIC, "little")
    offsets = (start + _ALIGNED * int(index) for index in np.flatnonzero(firsts))
    return next((at for at in offsets if _front(content, at, number) is not None), None)


def encode_mark(mark: Mark) -> bytes:
    """The bytes of a mark."""
    content = _MARKED + struct.pack("<QQ", *mark)
    return content + checksum([content]).to_bytes(8, "little")


def decode_mark(content: bytes | memoryview) -> Mark | None:
    """The mark in these bytes; None if they are invalid, as a power failure may leave them."""
    if len(content) != _MARK.size:
        return None
    _, number, end, _ = _MARK.unpack(content)
    mark = Mark(number, end)
    # Encoded again and compared: this checks the magic, both numbers and the checksum at once.
    return mark if encode_mark(mark) == content else None


def _check(frames: Sequence[memoryview]) -> int:
    return checksum(frames)


def _head(described: bytes, frame_bytes: int, check: int, number: int) -> bytes:
    fields = MAGIC, len(described), frame_bytes, check
    # The number as the seed: the head of another file's record is not valid here.
    return _HEAD.pack(*fields, checksum([described, _HEAD.pack(*fields, 0)], number))


def _front(
    content: memoryview, offset: int, number: int
) -> tuple[memoryview, int, int, int] | None:
    """A verified description, its frames' size, check and offset; None if the head is invalid."""
    if len(content) - offset < _HEAD.size:
        return None
    magic, size, frame_bytes, check, _ = _HEAD.unpack_from(content, offset)
    start = offset + _HEAD.size
    # The length is not verified yet and may be anything, so nothing is read up to it before this.
    if magic != MAGIC or len(content) - start < size:
        return None
    described = content[start : start + size]
    if _head(bytes(described), frame_bytes, check, number) != content[offset:start]:
        return None
    return described, frame_bytes, check, start + size + len(_padding(_HEAD.size + size))


def _padding(size: int) -> bytes:
    return bytes(-size % _ALIGNED)


# --- turns ----------------------------------------------------------------------------------------


def turn_of(
    arrivals: Sequence[Arrival], answers: Sequence[Outgoing], now: float
) -> tuple[Turn, list[Buffer]] | None:
    """The entry and the frames to write for a turn; None if it changed nothing."""
    # An answer is attributed to its request only if the turn has no copy of that request: of two
    # copies of a push the first is applied and the second is acknowledged as a duplicate, and both
    # answers have the same key.
    copies = Counter(_key(arrival.sender, arrival.message) for arrival in arrivals)
    judged = [(_key(a.to, a.message), a.message) for a in answers]
    judged = [(key, message) for key, message in judged if copies[key] == 1]
    refused = {key for key, message in judged if leaves_state_unchanged(message)}
    unread = {key for key, message in judged if _leaves_frames_unread(message)}
    calls: list[Call] = []
    frames: list[Buffer] = []
    apart = changed = False
    for arrival in arrivals:
        if not isinstance(arrival.message, CHANGING):
            apart = apart or not isinstance(arrival.message, Pull)
            continue
        key = _key(arrival.sender, arrival.message)
        payload = () if key in unread else tuple(arrival.frames)
        calls.append(Call(wire_format.encode(arrival.message), len(payload), apart))
        frames += payload
        # A request without an answer, such as a parked one, has changed the state as well.
        changed, apart = changed or key not in refused, False
    return (Turn(now, calls), frames) if changed else None


def _key(sender: bytes, message: Message) -> tuple[bytes, int]:
    return sender, message.request


def _leaves_frames_unread(answer: Message) -> bool:
    """Return whether this answer shows that the frames of its request were not read."""
    match answer:
        case Refusal(remedy=remedy):
            return remedy is not Remedy.BAD_INPUT
        case Ack(duplicate=duplicate):
            return duplicate
    return isinstance(answer, Parked)


# --- replay ---------------------------------------------------------------------------------------


class Replay:
    """Applies a WAL's entries, in order, to an empty shard, which becomes equal to their writer."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._boot = 0
        self._from_base = False

    def take(self, entry: Entry, frames: Sequence[Buffer]) -> None:
        """Apply an entry, and drop the answers, which were its writer's to give."""
        match entry:
            case LoggedState():
                self._restore(entry, frames)
            case Opening():
                self._open(entry)
            case LogPayload():
                if self._from_base:
                    self.shard.park_request(
                        wire_format.decode_request(entry.header), frames, entry.at
                    )
            case Turn():
                self._from_base = False
                self._turn(entry, frames)
            case Expired():
                self._from_base = False
                self.shard.expire(entry.workers, entry.at, entry.merges)

    def _restore(self, entry: LoggedState, frames: Sequence[Buffer]) -> None:
        self.shard.restore(shard_state.decode(frames)[0])
        self.shard.metrics.resume(entry.counts)
        self._from_base = True

    def _open(self, entry: Opening) -> None:
        self._boot = entry.boot
        if entry.begins:
            self.shard.take_over(entry.at)

    def _turn(self, turn: Turn, frames: Sequence[Buffer]) -> None:
        together: list[tuple[bytes, Sequence[Buffer]]] = []
        base = 0
        for call in turn.calls:
            if call.apart:
                self._call(together, turn.at)
                together = []
            together.append((call.header, frames[base : base + call.frames]))
            base += call.frames
        self._call(together, turn.at)

    def _call(self, calls: Sequence[tuple[bytes, Sequence[Buffer]]], at: float) -> None:
        arrivals = [Arrival(b"", self._request(header), payload) for header, payload in calls]
        # Together, as its writer did: a sum of gradients is rounded differently from one after
        # another.
        self.shard.handle_together(arrivals, at)

    def _request(self, header: bytes) -> Any:
        """Decode a request and readdress it from the incarnation that wrote the WAL to this one."""
        request = wire_format.decode_request(header)
        # A request for an earlier incarnation was refused when it came; readdressed, it would be
        # applied now.
        if isinstance(request, Registered) and request.boot == self._boot:
            return msgspec.structs.replace(request, boot=self.shard.boot)
        return request


def opening(shard: Shard, number: int, *, begins: bool, now: float, after: int = 0) -> Opening:
    """The first entry of file `number` of this shard's WAL, after a file of `after` bytes."""
    return Opening(FORMAT, number, encode_spec(shard.spec), shard.boot, begins, now, after)


def state_of(shard: Shard, number: int) -> tuple[LoggedState, Frames]:
    """A shard's state when file `number` is opened; it may be written at any later time."""
    # The ledger is encoded now, because the next request changes it; the arrays never change.
    return LoggedState(number, shard.metrics.counts()), shard_state.encode(shard.copy())


def waiting_payloads(shard: Shard, now: float) -> list[tuple[LogPayload, tuple[Buffer, ...]]]:
    """The waiting requests of a shard and their frames; its state does not contain them."""
    return [
        (LogPayload(now, wire_format.encode(message)), payload)
        for message, payload in shard.waiting()
    ]


def encode_spec(spec: ShardSpec) -> bytes:
    return msgspec.msgpack.encode(spec)


def decode_spec(packed: bytes, source: str) -> ShardSpec:
    """The spec in an opening; `source` names the file. Raises BadInput."""
    try:
        return msgspec.msgpack.decode(packed, type=ShardSpec)
    except UNDECODABLE as error:
        raise BadInput(f"{source}: {error}") from None
