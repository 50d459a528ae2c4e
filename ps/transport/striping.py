"""Several connections in place of one: cuts messages into parts and reassembles them. No I/O.

Theory. A TCP connection carries at most one window per round trip, and systems default to windows
of some megabytes, less than a long link holds. Several connections carry several windows. Every
message then has one part on each connection, with the same number: an equal share of its bytes if
it is large; otherwise all bytes on the first connection, and none on the others.

Because each connection has a part of each message, the rest is simple. A connection keeps its
order. So when all parts of a message have arrived, a missing part of an earlier message will never
arrive: the earlier message is lost, as any message may be, and its session repeats it. Hence
messages come out in order, nothing waits for a lost part, and no clock is needed.

A part is a small frame and its share of the bytes:

    mark(2) token(16) number(8) part(1) parts(1)    and, in the first part, the frames' lengths(8)

The token is a random number that identifies the sender on all of its connections; the answer goes
out over the same connections. Neither envelopes (shards/wire_format.py) nor notes (handshake.py)
begin with the mark, so it distinguishes a part from a message sent whole.

Nothing is copied for sending, and reassembly copies only frames that were cut. Parts are held as
they came, and no memory is allocated because of what a header merely claims. A receiver that anyone
can reach holds next to nothing for a sender that it does not know yet, enough for the small message
with which a sender makes itself known, and answers more with Resynchronise: a worker whose shard
has restarted then greets it, and repeats what was dropped.
"""

import math
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import count

import msgspec
import numpy as np

from shards import wire_format
from shards.errors import BadMessage, Resynchronise
from shards.wire_format import Buffer

Parts = list[Buffer]

TOKEN_BYTES = 16
MIN_BYTES = 256 << 10  # smaller messages are not cut
MAX_STRIPES = 16
_FAR_S = 0.02  # up to this round trip one connection is enough
_WINDOW_S = 0.0125  # at 1 Gbit/s 1.6 MB, which a buffer of 4 MB surely keeps in flight
_HEADER = struct.Struct(f"<2s{TOKEN_BYTES}sQBB")
_LENGTH = struct.Struct("<Q")
MARK = b"\xff\xfe"
_PART_BYTES = 1024  # the overhead of holding a part
_SENDERS = 1024
_STRANGER_BYTES = 32 << 10  # more than a greeting takes, over as many connections as allowed
_STRANGERS_BYTES = 2 << 20
assert int.from_bytes(MARK, "little") > wire_format.MAX_HEADER_BYTES


def stripes_for(rtt_s: float, message_bytes: int) -> int:
    """The number of connections that fill 1 Gbit/s with windows of 4 MB, at most MAX_STRIPES.

    `rtt_s` is the round trip in seconds. One connection where that is short, or where messages are
    too small to be cut.
    """
    if rtt_s <= _FAR_S or message_bytes < MIN_BYTES:
        return 1
    return math.ceil(min(MAX_STRIPES, rtt_s / _WINDOW_S))


class Cutter:
    """Cuts one sender's messages. Numbers rise across all its receivers; gaps do no harm."""

    def __init__(self, token: bytes) -> None:
        assert len(token) == TOKEN_BYTES, "a token is a random number of that length"
        self._token = token
        self._numbers = count(1)

    def cut(self, parts: Parts, stripes: int) -> list[Parts]:
        """The parts to send over each of `stripes` connections; over one, the message itself."""
        if stripes == 1:
            return [parts]
        frames = [_flat(part) for part in parts]
        number = next(self._numbers)
        headers = [
            _HEADER.pack(MARK, self._token, number, index, stripes) for index in range(stripes)
        ]
        headers[0] += b"".join(_LENGTH.pack(len(frame)) for frame in frames)
        shares = _share_out(frames, stripes)
        return [[header, *share] for header, share in zip(headers, shares, strict=True)]


class _Part(msgspec.Struct, frozen=True):
    token: bytes
    number: int
    index: int
    stripes: int
    lengths: tuple[int, ...]
    pieces: list[memoryview]

    @property
    def cost(self) -> int:
        return _PART_BYTES + 8 * len(self.lengths) + sum(map(len, self.pieces))


class _Stream:
    """The unfinished messages of one sender, and the addresses that its parts come from."""

    def __init__(self, stripes: int) -> None:
        self.stripes = stripes
        self.addresses: dict[int, bytes] = {}
        self.done = 0
        self.begun: dict[int, dict[int, _Part]] = {}
        self.buffer_bytes = 0
        self.stirred = True

    def take(self, part: _Part, address: bytes) -> list[_Part] | None:
        """All parts, in order, of the message that `part` completes; late parts are dropped."""
        self.stirred = True
        if part.number <= self.done:
            return None  # its connection may be gone, so its address is not recorded
        self.addresses[part.index] = address
        parts = self.begun.setdefault(part.number, {})
        if part.index in parts:
            return None
        parts[part.index] = part
        self.buffer_bytes += part.cost
        if len(parts) < self.stripes:
            return None
        self.done = part.number
        for number in [number for number in self.begun if number <= self.done]:
            self.drop(number)
        return [parts[index] for index in range(self.stripes)]

    def drop(self, number: int) -> None:
        self.buffer_bytes -= sum(part.cost for part in self.begun.pop(number).values())

    def drop_all(self) -> None:
        self.begun.clear()
        self.buffer_bytes = 0


class Gatherer:
    """Reassembles the messages of one receiver, from any number of senders."""

    def __init__(
        self, max_bytes: int, max_senders: int = _SENDERS, *, guarded: bool = False
    ) -> None:
        """Hold up to `max_bytes` of a sender's unfinished messages, four times that in all.

        If `guarded`, this holds for senders that the receiver has said to `trust`; the others are
        strangers.
        """
        self._max_bytes = max_bytes
        self._max_senders = max_senders
        self._guarded = guarded
        # The most recent sender is last in each.
        self._streams: dict[bytes, _Stream] = {}
        self._strangers: dict[bytes, _Stream] = {}

    def allow(self, max_bytes: int) -> None:
        """Raise the limit for each sender to at least `max_bytes`."""
        self._max_bytes = max(self._max_bytes, max_bytes)

    @property
    def buffer_bytes(self) -> int:
        """The memory that unfinished messages take."""
        return _sum_held(self._streams) + _sum_held(self._strangers)

    def trust(self, sender: bytes) -> None:
        """The sender that `take` named knows the job, so its messages may be large."""
        stream = self._strangers.pop(token := sender.removeprefix(MARK), None)
        if stream is not None:
            _put(self._streams, token, stream, self._max_senders)

    def take(self, address: bytes, parts: Parts) -> tuple[bytes, Parts] | None:
        """The message that is complete with what came from `address`, and where to send the answer.

        The sender is `address` for a message that came whole, otherwise the mark and the sender's
        token; addresses never begin with the mark. Raises BadMessage, and Resynchronise for a
        large part from a stranger.
        """
        if not parts or bytes(parts[0][: len(MARK)]) != MARK:
            return address, parts
        part = _parse(parts)
        stream, known = self._stream(part)
        if not known and stream.buffer_bytes + part.cost > _STRANGER_BYTES:
            raise Resynchronise("a part of a large message, from a sender yet to name the job")
        whole = stream.take(part, address)
        if known:
            self._keep_within(stream)
        elif _sum_held(self._strangers) > _STRANGERS_BYTES:
            _oldest_with_parts(self._strangers).drop_all()
        return None if whole is None else (MARK + part.token, _join(whole))

    def addresses(self, to: bytes) -> list[bytes]:
        """Where to send the parts of an answer to a sender that `take` named.

        Empty if other senders have evicted it since: a client that still waits will ask again, and
        its connections are then known again.
        """
        if not to.startswith(MARK):
            return [to]
        token = to.removeprefix(MARK)
        stream = self._streams.get(token) or self._strangers.get(token)
        if stream is None or len(stream.addresses) < stream.stripes:
            return []
        return [stream.addresses[index] for index in range(stream.stripes)]

    def tick(self) -> None:
        """Drop messages without a new part since the last call, and all parts of strangers.

        Call it every few seconds.
        """
        for stranger in self._strangers.values():
            stranger.drop_all()
        for stream in self._streams.values():
            if not stream.stirred:
                stream.drop_all()
            stream.stirred = False

    def _stream(self, part: _Part) -> tuple[_Stream, bool]:
        """The sender's stream, now the most recent, and whether the sender is known.

        A new one evicts the sender of its kind that was silent longest.
        """
        known = not self._guarded or part.token in self._streams
        streams = self._streams if known else self._strangers
        stream = streams.get(part.token) or _Stream(part.stripes)
        if stream.stripes != part.stripes:
            raise BadMessage(f"part: expected one of {stream.stripes}, got one of {part.stripes}")
        _put(streams, part.token, stream, self._max_senders)
        return stream, known

    def _keep_within(self, stream: _Stream) -> None:
        while stream.buffer_bytes > self._max_bytes:
            stream.drop(min(stream.begun))
        if stream.buffer_bytes and _sum_held(self._streams) > 4 * self._max_bytes:
            _oldest_with_parts(self._streams).drop_all()


def _sum_held(streams: dict[bytes, _Stream]) -> int:
    return sum(stream.buffer_bytes for stream in streams.values())


def _oldest_with_parts(streams: dict[bytes, _Stream]) -> _Stream:
    return next(stream for stream in streams.values() if stream.buffer_bytes)


def _put(streams: dict[bytes, _Stream], token: bytes, stream: _Stream, most: int) -> None:
    """Make `stream` the most recent of at most this number."""
    streams.pop(token, None)
    if len(streams) == most:
        del streams[next(iter(streams))]
    streams[token] = stream


def _flat(part: Buffer) -> memoryview:
    view = memoryview(part)
    return view.cast("B") if view.nbytes else memoryview(b"")


def _share_out(frames: Sequence[memoryview], stripes: int) -> list[list[memoryview]]:
    """Views of the frames' bytes, in order: equal shares if large, else all in the first."""
    total = sum(map(len, frames))
    share = math.ceil(total / stripes) if total >= MIN_BYTES else total
    shares: list[list[memoryview]] = [[] for _ in range(stripes)]
    position = 0
    for frame in frames:
        start = 0
        while start < len(frame):
            index, used = divmod(position, share)
            stop = min(len(frame), start + share - used)
            shares[index].append(frame[start:stop])
            position, start = position + stop - start, stop
    return shares


def _parse(parts: Parts) -> _Part:
    header = parts[0]
    rest = len(header) - _HEADER.size
    if rest < 0 or rest % _LENGTH.size:
        raise BadMessage(
            f"part: expected a header of {_HEADER.size} bytes and lengths of {_LENGTH.size} each,"
            f" got {len(header)} bytes"
        )
    _, token, number, index, stripes = _HEADER.unpack_from(header)
    if not (1 < stripes <= MAX_STRIPES and index < stripes and number > 0):
        raise BadMessage(
            f"part: expected a number and one of 2 to {MAX_STRIPES} parts,"
            f" got number {number}, part {index} of {stripes}"
        )
    if (index == 0) != (rest > 0):
        raise BadMessage(f"part {index}: expected lengths in the first one, got {rest} bytes")
    lengths = tuple(size for (size,) in _LENGTH.iter_unpack(header[_HEADER.size :]))
    pieces = [memoryview(piece) for piece in parts[1:]]
    return _Part(token, number, index, stripes, lengths, pieces)


def _join(parts: Iterable[_Part]) -> Parts:
    """The message's frames; only those that were cut are copied, into one piece each."""
    lengths: list[int] = []
    pieces: deque[memoryview] = deque()
    for part in parts:
        lengths += part.lengths
        pieces += (piece for piece in part.pieces if len(piece))
    expected, got = sum(lengths), sum(map(len, pieces))
    if expected != got:
        raise BadMessage(f"parts: expected {expected} bytes by their lengths, got {got}")
    return [_frame(length, pieces) for length in lengths]


def _frame(length: int, pieces: deque[memoryview]) -> Buffer:
    """The first `length` bytes of `pieces`, which are removed from them."""
    if pieces and len(pieces[0]) == length:
        return pieces.popleft()
    frame = np.empty(length, np.uint8)
    filled = 0
    while filled < length:
        piece = pieces.popleft()
        head, rest = piece[: length - filled], piece[length - filled :]
        frame[filled : filled + len(head)] = np.frombuffer(head, np.uint8)
        filled += len(head)
        if len(rest):
            pieces.appendleft(rest)
    return frame.data
