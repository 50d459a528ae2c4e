"""A state in pieces: a sender cuts its frames, and a receiver gathers the pieces again.

A message is sent and received as a whole, so a state of gigabytes in one message would fill a link,
and a buffer at each end, until it has arrived. A state larger than a piece therefore travels as
pieces of at most 4 MB, of which a few are on their way at any time. Requests and heartbeats travel
between them. All three transfers use this file:

- *export*: the shard opens the export, which fixes one version, and the operator asks for pieces;
- *install*: the operator sends pieces, and the shard applies the state once it has all of them;
- *sync*: a primary sends its state to its backup (replica.py).

Each piece names the state that it belongs to, and has its number and a digest, which depends on the
number. Pieces may arrive in any order and more than once. A piece of another state, or in the place
of another piece, raises BadMessage and changes nothing. The sizes of the frames come with each
piece, so none must arrive first.

A receiver never sees a part of a state: `frames` exist once every piece is there. Memory is
bounded: a gathered state takes its own size, of which the receiver states the limit, and a shard
keeps at most `MAX_EXPORTS` exports open, each at most `EXPORT_S` seconds after its last request.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from shards import wire_format
from shards.checksums import checksum
from shards.errors import BadMessage, Resynchronise
from shards.messages import PIECE_BYTES, Count, Piece, PieceBytes
from shards.wire_format import Buffer

AHEAD = 4
"""The pieces of one state that are on their way at the same time."""
MAX_EXPORTS = 4
EXPORT_S = 30.0  # longer than a client waits before it repeats a request
_MAX_FRAMES = 64 << 10
_DIGEST = (1 << 62) - 1  # what a Count holds

Bytes = NDArray[np.uint8]
Frames = Sequence[NDArray[Any] | Buffer]


class _Sizes(msgspec.Struct, frozen=True, array_like=True):
    """The size of each frame in bytes, and that of each piece but the last."""

    piece_bytes: PieceBytes
    frames: Annotated[list[Count], Meta(max_length=_MAX_FRAMES)]

    @property
    def total(self) -> int:
        return sum(self.frames)

    @property
    def pieces(self) -> int:
        return max(1, -(-self.total // self.piece_bytes))


class CutState:
    """The frames of a state, to be sent as `count` pieces; they are not copied.

    The frames must not change while this object is in use.
    """

    def __init__(self, frames: Frames, piece_bytes: int = PIECE_BYTES) -> None:
        self._frames = [_as_bytes(frame) for frame in frames]
        self._sizes = _Sizes(piece_bytes, [frame.size for frame in self._frames])
        self._encoded = wire_format.encode_state(self._sizes)
        self.count = self._sizes.pieces

    @property
    def name(self) -> int:
        """A number that names this content: equal states have equal names."""
        digests = [_digest(self._slices(number), number) for number in range(self.count)]
        return _digest([np.array(digests, np.uint64).view(np.uint8)], self.count)

    def piece(self, number: int, of: int) -> tuple[Piece, tuple[NDArray[Any] | bytes, ...]]:
        """Piece `number` of the state named `of`, and its frames; raises BadMessage."""
        if not 0 <= number < self.count:
            raise BadMessage(f"state: expected a piece below {self.count}, got {number}")
        slices = self._slices(number)
        return Piece(of, number, _digest(slices, number)), (self._encoded, *slices)

    def _slices(self, number: int) -> list[Bytes]:
        spans = _spans(self._sizes, number)
        return [self._frames[frame][low:high] for frame, low, high in spans]


class GatheredState:
    """The pieces of the state named `of` that have arrived; it takes at most `max_bytes`."""

    def __init__(self, of: int, max_bytes: int = 1 << 62) -> None:
        self.of = of
        self._max_bytes = max_bytes
        self._sizes: _Sizes | None = None
        self._frames: list[Bytes] = []
        self._arrived: set[int] = set()

    @property
    def missing(self) -> list[int]:
        """The pieces that have yet to arrive, as far as they are known."""
        count = 1 if self._sizes is None else self._sizes.pieces
        return [number for number in range(count) if number not in self._arrived]

    @property
    def complete(self) -> bool:
        return self._sizes is not None and len(self._arrived) == self._sizes.pieces

    @property
    def gapless_count(self) -> int:
        """The number of pieces without a gap that have arrived."""
        return next(
            (n for n in range(len(self._arrived)) if n not in self._arrived), len(self._arrived)
        )

    def take(self, piece: Piece, frames: Sequence[Buffer]) -> None:
        """Add a piece; a repeated one changes nothing. Raises BadMessage, and changes nothing."""
        if not frames:
            raise BadMessage("piece of a state: expected its sizes, got no frame")
        sizes = wire_format.decode_state(frames[0], _Sizes)
        # The sizes come with each piece and must agree, or the pieces of two states would be mixed.
        if piece.of != self.of or sizes != (self._sizes or sizes):
            raise BadMessage(f"piece {piece.number}: it belongs to another state")
        if sizes.total > self._max_bytes or piece.number >= sizes.pieces:
            raise BadMessage(
                f"piece {piece.number}: expected a state of at most {self._max_bytes} bytes in"
                f" {sizes.pieces} pieces, got {sizes.total} bytes"
            )
        slices = [_as_bytes(frame) for frame in frames[1:]]
        spans = list(_spans(sizes, piece.number))
        expected, actual = [high - low for _, low, high in spans], [view.size for view in slices]
        if expected != actual:
            raise BadMessage(f"piece {piece.number}: expected frames of {expected} bytes, {actual}")
        # Last, because it reads every byte. The digest depends on the number, so a piece cannot
        # stand in the place of another one.
        if _digest(slices, piece.number) != piece.digest:
            raise BadMessage(f"piece {piece.number}: its bytes do not match its digest")
        if self._sizes is None:
            # Memory that is not written yet costs nothing, so each piece adds its own size.
            self._sizes, self._frames = sizes, [np.zeros(n, np.uint8) for n in sizes.frames]
        # Written once: another copy may be reading the piece from this memory already.
        if piece.number not in self._arrived:
            for (frame, low, high), part in zip(spans, slices, strict=True):
                self._frames[frame][low:high] = part
            self._arrived.add(piece.number)

    def drop(self, number: int) -> None:
        """Forget a piece."""
        self._arrived.discard(number)

    def frames(self) -> list[Buffer]:
        """The frames of the whole state; call it only once `complete`."""
        assert self.complete, "a state is used only as a whole"
        return [frame.data for frame in self._frames]

    def pieces(self) -> Iterator[tuple[Piece, tuple[NDArray[Any] | bytes, ...]]]:
        """The pieces that have arrived, for another copy; their memory is not written again."""
        if self._sizes is not None:
            cut = CutState(self._frames, self._sizes.piece_bytes)
            for number in sorted(self._arrived):
                yield cut.piece(number, self.of)


class OpenExports:
    """The exports that a shard keeps open, each a state at one version."""

    def __init__(self, shard: int) -> None:
        self._shard = shard
        self._opened = 0
        self._open: dict[int, OpenExport] = {}

    def open(self, export: "OpenExport") -> int:
        """Keep an export and return its number; it replaces the former one of the same sender."""
        for number in [n for n, other in self._open.items() if other.sender == export.sender]:
            del self._open[number]
        while len(self._open) >= MAX_EXPORTS:
            # The least recently used one: an operator that still asks for pieces keeps its export.
            del self._open[min(self._open, key=lambda number: self._open[number].used_at)]
        self._opened += 1
        self._open[self._opened] = export
        return self._opened

    def find_opened(self, sender: bytes, request: int) -> int | None:
        """The export that this request has opened: a repeated request opens no other one."""
        asker = sender, request
        return next(
            (n for n, export in self._open.items() if (export.sender, export.request) == asker),
            None,
        )

    def find(self, number: int, now: float) -> "OpenExport":
        """An open export, which stays open for a while; raises Resynchronise."""
        export = self._open.get(number)
        if export is None:
            raise Resynchronise(f"shard {self._shard} no longer has this export: begin it again")
        export.used_at = now
        return export

    def expire(self, now: float) -> None:
        """Drop the exports that nobody has asked for lately."""
        for number in [n for n, export in self._open.items() if now - export.used_at > EXPORT_S]:
            del self._open[number]


class OpenExport(msgspec.Struct):
    """A state at one `version`, opened by a request and last asked for at `used_at`."""

    sender: bytes
    request: int
    version: int
    cut: CutState
    used_at: float


def _as_bytes(frame: NDArray[Any] | Buffer) -> Bytes:
    """The bytes of a frame, without a copy; an array must be contiguous."""
    if isinstance(frame, np.ndarray):
        return frame.reshape(-1).view(np.uint8)
    return np.frombuffer(frame, np.uint8)


def _digest(slices: Sequence[Bytes], number: int) -> int:
    return checksum((view.data for view in slices), number) & _DIGEST


def _spans(sizes: _Sizes, number: int) -> Iterator[tuple[int, int, int]]:
    """The parts of frames in a piece: each frame's index, and the bounds within that frame."""
    ends = list(accumulate(sizes.frames))
    low = number * sizes.piece_bytes
    high = min(low + sizes.piece_bytes, sizes.total)
    frame = bisect_right(ends, low)
    while low < high:
        start = ends[frame] - sizes.frames[frame]
        stop = min(ends[frame], high)
        if stop > low:
            yield frame, low - start, stop - start
        low, frame = stop, frame + 1
