"""A shard's log: what is written down before answers leave, and how a shard is made from it again.

Theory. A shard is a deterministic state machine (shards/replica.py): who has its requests, in their
order and with their times, has its state, bit for bit. So a shard survives the death of its process
by one rule about answers: what changed the state is in the log before any answer that shows the
change leaves. What a crash takes with it was never acknowledged; its senders repeat it.

What is written:

- A *turn*: the requests that a server took up at one moment, with that moment. Only kinds that can
  change something are kept, and a turn in which none of them did is not. Within a turn
  pushes may be applied in one pass (fused_apply.py), whose sum is rounded otherwise than one after
  another, so a turn is replayed whole. A request that is not kept may have ended such a pass: the
  one behind it is marked `apart`. Pulls end none.
- *Leases that ran out*, by name: the clock that decided it is not the log's.
- The *opening* of each file: its number, the shard's spec, which life writes it, and the length of
  the file before it. With a new life parked requests are forgotten, as they were when it began;
  its workers ask again.
- The *state* at an opening, in a file beside it: the base from which later files are replayed.

A push that was repeated or refused is kept without its frames: nobody looked at them. One whose
gradient the guard refused keeps them, for that is counted, and in one pass it makes the others go
one by one.

A record is a head, its contents' description, and frames:

    magic 8 | description bytes 4 | frame bytes 8 | frames' check 4 | head's check 4
    description, MessagePack | padding to 64 | frames, one behind another | padding to 64

The head's check covers the description, so that a length is believed only once it is proved. It is
begun at the number of the file: a file may lie where another was written before
(ps/wal/writer.py), and what is left of that behind the last record is no record of this one.
The frames' check covers every byte (checksums.py), whichever pages a disk has kept.

A record that is cut short proves nothing: its writer may have died in the midst of it, or somebody
has taken the end of the file away. So the *mark*, a small file of its own, says how far the newest
log is known to be whole. It is rewritten after each record and before the answers leave, and never
says more than the log holds:

    magic 8 | number of the newest log 8 | bytes of it 8 | check 4

It leaves to others (ps/wal/writer.py): files, and when what is written is safe.
"""

import struct
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from cupy_kernels.checksum_sums import table_sums
from shards import checksums, wire_format
from shards.envelopes import Arrival, Outgoing
from shards.error_codes import changed_nothing
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
from shards.parameters import SavedProgress
from shards.shard import Shard
from shards.spec import ShardSpec
from shards.wire_format import Buffer

FORMAT = 4
MAGIC = b"\x93DPSLOG\n"
_HEAD = struct.Struct("<8sIQII")
_MARK = struct.Struct("<8sQQI")
_MARKED = b"\x93DPMARK\n"
_ALIGNED = 64  # a record and the frames in it begin at multiples of this

Frames = Sequence[NDArray[Any] | Buffer]


class Call(msgspec.Struct, frozen=True):
    """A request as it came: its header, and how many frames of the record are its own."""

    header: bytes
    frames: int
    apart: bool = False


class Turn(msgspec.Struct, frozen=True, tag="turn"):
    """Requests that were taken up together, `at` the shard's clock."""

    at: float
    calls: list[Call]


class Expired(msgspec.Struct, frozen=True, tag="expired"):
    """The leases of `workers` ran out."""

    at: float
    workers: list[Name]


class Opening(msgspec.Struct, frozen=True, tag="opening"):
    """File `number` of the log, written by life `boot`, which begins with it if `begins`.

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
    """A request that waited while the file was opened: the state before it does not hold it.

    Who replays the file before this one as well has it already.
    """

    at: float
    header: bytes


class LoggedState(msgspec.Struct, frozen=True, tag="state"):
    """All that a shard held when file `number` was opened. Frames: a Saved, weights, each slot."""

    number: Count
    slots: list[Name]
    counts: Counts


Entry = Turn | Expired | Opening | LogPayload | LoggedState


class _Description(msgspec.Struct, frozen=True):
    entry: Entry
    sizes: list[Count]


_DESCRIPTIONS = msgspec.msgpack.Decoder(_Description)


class Damage(BadInput):
    """Bytes of a log that are no record, from `offset` on."""

    def __init__(self, text: str, offset: int) -> None:
        super().__init__(text)
        self.offset = offset


class Mark(NamedTuple):
    """How far a log is known to be whole: up to byte `end` of file `number`, the newest one."""

    number: int
    end: int


class LogRecord(msgspec.Struct, frozen=True):
    """What was read: an entry, its frames (views of what it was read from), where it ends."""

    entry: Entry
    frames: list[memoryview]
    end: int


# --- records as bytes -----------------------------------------------------------------------------


def encode(entry: Entry, frames: Frames = (), *, number: int) -> list[Buffer]:
    """A record of file `number` as it is written, piece behind piece; frames are not copied."""
    plain = [memoryview(frame) for frame in wire_format.wrap(frames)]
    whole = [frame.cast("B") for frame in plain if frame.nbytes]
    sizes = [frame.nbytes for frame in plain]
    described = msgspec.msgpack.encode(_Description(entry, sizes))
    front = _head(described, sum(sizes), _check(whole), number) + described
    return [front + _padding(len(front)), *whole, _padding(sum(sizes))]


def read(content: memoryview, offset: int, what: str, *, number: int) -> LogRecord:
    """The record of file `number` at `offset`; `what` names the source.

    Raises Damage where there is none.
    """
    found = _front(content, offset, number)
    if found is None:
        raise Damage(f"{what}: expected a record at byte {offset}, got other bytes", offset)
    described, frame_bytes, check, start = found
    try:
        description = _DESCRIPTIONS.decode(described)
    except UNDECODABLE as error:
        raise Damage(f"{what}: the record at byte {offset}: {error}", offset) from None
    end = start + frame_bytes + len(_padding(frame_bytes))
    if end > len(content):
        raise Damage(f"{what}: the record at byte {offset} is cut off", offset)
    frames, at = [], start
    for size in description.sizes:
        frames.append(content[at : at + size])
        at += size
    if at != start + frame_bytes or _check(frames) != check:
        raise Damage(f"{what}: the record at byte {offset} does not match its checksum", offset)
    return LogRecord(description.entry, frames, end)


def next_record(content: memoryview, offset: int, *, number: int) -> int | None:
    """Where, behind `offset`, the head of a record of file `number` proves itself; None if nowhere.

    It tells a damaged record from one that was being written when the writer died: behind the
    latter there is nothing, or what the file held in a former use.
    """
    start = offset - offset % _ALIGNED + _ALIGNED
    words = np.frombuffer(content[start : len(content) - len(content) % _ALIGNED], "<u8")
    firsts = words[:: _ALIGNED // 8] == int.from_bytes(MAGIC, "little")
    places = (start + _ALIGNED * int(index) for index in np.flatnonzero(firsts))
    return next((at for at in places if _front(content, at, number) is not None), None)


def encode_mark(mark: Mark) -> bytes:
    """A mark as it is written."""
    told = _MARKED + struct.pack("<QQ", *mark)
    return told + zlib.crc32(told).to_bytes(4, "little")


def decode_mark(content: bytes | memoryview) -> Mark | None:
    """What `encode_mark` gave; None for other bytes, which a failing power may leave of it."""
    if len(content) != _MARK.size:
        return None
    _, number, end, _ = _MARK.unpack(content)
    mark = Mark(number, end)
    return mark if encode_mark(mark) == content else None


def _check(frames: Sequence[memoryview]) -> int:
    return checksums.checksum(frames, table_sums)


def _head(described: bytes, frame_bytes: int, check: int, number: int) -> bytes:
    told = MAGIC, len(described), frame_bytes, check
    # Begun at another number, crc32 never comes to the same.
    return _HEAD.pack(*told, zlib.crc32(described + _HEAD.pack(*told, 0), number))


def _front(
    content: memoryview, offset: int, number: int
) -> tuple[memoryview, int, int, int] | None:
    """A description, its frames' bytes and check, and where they begin; None if unproved."""
    if len(content) - offset < _HEAD.size:
        return None
    magic, size, frame_bytes, check, _ = _HEAD.unpack_from(content, offset)
    start = offset + _HEAD.size
    if magic != MAGIC or len(content) - start < size:
        return None
    described = content[start : start + size]
    if _head(bytes(described), frame_bytes, check, number) != content[offset:start]:
        return None
    return described, frame_bytes, check, start + size + len(_padding(_HEAD.size + size))


def _padding(size: int) -> bytes:
    return bytes(-size % _ALIGNED)


# --- what is written of a turn --------------------------------------------------------------------


def turn_of(
    arrivals: Sequence[Arrival], answers: Sequence[Outgoing], now: float
) -> tuple[Turn, list[Buffer]] | None:
    """What is to be written of a turn and its frames; None if it changed nothing."""
    # An answer tells of its request only where there is no copy of that in the same turn: of two
    # copies of a push the second is told that it is a duplicate, and the first was applied.
    asked = Counter(_key(one.sender, one.message) for one in arrivals)
    judged = [(_key(a.to, a.message), a.message) for a in answers]
    judged = [(key, message) for key, message in judged if asked[key] == 1]
    refused = {key for key, message in judged if changed_nothing(message)}
    unread = {key for key, message in judged if _left_unread(message)}
    calls: list[Call] = []
    frames: list[Buffer] = []
    apart = changed = False
    for one in arrivals:
        if not isinstance(one.message, CHANGING):
            apart = apart or not isinstance(one.message, Pull)
            continue
        key = _key(one.sender, one.message)
        own = () if key in unread else tuple(one.frames)
        calls.append(Call(wire_format.encode(one.message), len(own), apart))
        frames += own
        changed, apart = changed or key not in refused, False
    return (Turn(now, calls), frames) if changed else None


def _key(sender: bytes, message: Message) -> tuple[bytes, int]:
    return sender, message.request


def _left_unread(answer: Message) -> bool:
    """Whether whoever is answered like this has had the frames of its request left alone."""
    match answer:
        case Refusal(remedy=remedy):
            return remedy is not Remedy.BAD_INPUT
        case Ack(duplicate=duplicate):
            return duplicate
    return isinstance(answer, Parked)


# --- replay ---------------------------------------------------------------------------------------


class Replay:
    """Takes a log's entries, in order, and makes of an empty shard what their writer was."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._boot = 0
        self._from_base = False

    def take(self, entry: Entry, frames: Sequence[Buffer]) -> None:
        """Do what the entry says was done; the answers were their writer's to give."""
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
                self.shard.expire(entry.workers, entry.at)

    def _restore(self, entry: LoggedState, frames: Sequence[Buffer]) -> None:
        saved = wire_format.decode_state(frames[0], SavedProgress)
        weights, *slots = (np.frombuffer(frame, np.float32) for frame in frames[1:])
        self.shard.restore(saved, weights, dict(zip(entry.slots, slots, strict=True)))
        self.shard.journal.resume(entry.counts)
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
        arrivals = [Arrival(b"", self._request(header), own) for header, own in calls]
        self.shard.handle_together(arrivals, at)

    def _request(self, header: bytes) -> Any:
        """What was said to the life that wrote the log is said to this one."""
        request = wire_format.decode_request(header)
        if isinstance(request, Registered) and request.boot == self._boot:
            return msgspec.structs.replace(request, boot=self.shard.boot)
        return request


def opening(shard: Shard, number: int, *, begins: bool, now: float, after: int = 0) -> Opening:
    """What file `number` of this shard's log begins with, behind a file of `after` bytes."""
    return Opening(FORMAT, number, encode_spec(shard.spec), shard.boot, begins, now, after)


def state_of(shard: Shard, number: int) -> tuple[LoggedState, Frames]:
    """A shard's state when file `number` is opened, to be written at any later time."""
    saved, weights, slots = shard.copy()
    # The ledger changes with the next request; weights and slots are this version's for good.
    frames: Frames = (wire_format.encode_state(saved), weights, *slots.values())
    return LoggedState(number, list(slots), shard.journal.counts()), frames


def carried(shard: Shard, now: float) -> list[tuple[LogPayload, tuple[Buffer, ...]]]:
    """What waits in a shard, which its state does not hold."""
    return [(LogPayload(now, wire_format.encode(message)), own) for message, own in shard.waiting()]


def encode_spec(spec: ShardSpec) -> bytes:
    return msgspec.msgpack.encode(spec)


def decode_spec(packed: bytes, what: str) -> ShardSpec:
    """The spec in an opening; `what` names the file. Raises BadInput."""
    try:
        return msgspec.msgpack.decode(packed, type=ShardSpec)
    except UNDECODABLE as error:
        raise BadInput(f"{what}: {error}") from None
