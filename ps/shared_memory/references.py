"""Shared memory below the protocol: frames that both sides can see are sent as references.

Session and shard know nothing of this. Their messages pass through here on the way to the socket
and from it. If a worker and a shard have proved that they see each other's segment (segment.py), an
array in a segment is replaced by a reference, and the other side turns it back into a view of the
same memory. Any other frame is sent through the socket as usual, so the protocol handles loss,
repetition and death as without shared memory.

The rows of a push are written into the worker's segment when it is encoded. The rows of an answer
are made for one worker, and copied into the shard's segment when they are sent. Small frames, ids
that are asked for, and what finds no room go through the socket, beside the references of others.

Two rules keep a reader from seeing memory that is being overwritten:

- *A gradient* is in the worker's segment, and the worker's session keeps it until every shard has
  acknowledged it; rows for one shard, until that has. A copy of the push that arrives later is a
  duplicate by its number, and the shard does not read its frames. (References of an earlier
  generation are dropped.)
- *A version* is in the shard's segment and is lent. It is recycled when the worker has returned
  it, or has died, as the lock on its segment proves (shm_files.py). A worker that is suspended, or
  slow, keeps what it holds. If it holds too much, its next pull uses the socket.

The lender numbers its loans to one borrower from 1, and keeps a reference to the lent memory so
that it is not recycled meanwhile (shards/buffer_pool.py). With its next message the borrower
reports the highest number that it has seen, and the loans that it still holds. All other loans up
to that number are thereby returned, also those of lost messages, so no message has to arrive
exactly once. If a later message overtakes an earlier one, the earlier loan is returned already.
The borrower must then not read that memory; it repeats the request as for any lost message.

The proof: each side writes a random number into its own segment and reads the other's. A worker's
Hello offers its segment; the shard's Welcome returns the number found there, and names its own.
From then on the worker shows both numbers with every message, and the shard lends only to workers
that have shown them. The shard examines an offer only after it has welcomed the worker, so a
stranger without the job's id learns nothing, and cannot make the shard open a file.

This file holds what both sides share; the rest is in worker_side.py and shard_side.py.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ps.shared_memory.segment import REFERENCE_BYTES, Reference, ShmSegment, Window
from shards import wire_format
from shards.errors import BadMessage
from shards.messages import Message
from shards.wire_format import Buffer, Frames

Parts = list[Buffer]
Together = Sequence[tuple[Message, Frames]]

LEAST_SHARED_BYTES = 8192
"""Smaller frames of rows are copied through the socket in less time than a reference takes."""

_BY_SOCKET = Reference(2**64 - 1, 0, 0, 0)
"""In place of a reference: the next of the frames behind the references."""
_PACKED_BY_SOCKET = _BY_SOCKET.pack()


class Share:
    """A loan that lasts while anything refers to it; then calls `give_back` with its number."""

    def __init__(self, give_back: Callable[[int], None], number: int) -> None:
        self._give_back = give_back
        self._number = number

    def __del__(self) -> None:
        self._give_back(self._number)


class _LentView(np.ndarray[Any, np.dtype[np.uint8]]):
    """An array that holds a share in its memory; a finalizer for each would cost much more."""

    share: Share


def has(messages: Together, kind: type[Message]) -> bool:
    """Return whether one of them is of this kind."""
    return any(isinstance(message, kind) for message, _ in messages)


class Referring(NamedTuple):
    """Messages with packed references for frames, the frames that are not in the segment, and
    copies in the segment that the references need.
    """

    messages: Together
    elsewhere: Sequence[NDArray[Any] | Buffer]
    copies: Sequence[NDArray[np.uint8]]

    def enclose(self) -> Parts:
        """The parts of an envelope: the headers, all references, and the frames elsewhere."""
        headers, *references = wire_format.enclose(self.messages)
        # The references are one part, because each part costs a call of the socket.
        return [headers, b"".join(references), *wire_format.wrap(self.elsewhere)]


def with_references(
    segment: ShmSegment, messages: Together, *, copies: bool = False
) -> Referring | None:
    """The messages with references for frames; None if no frame is in the segment.

    With `copies`, large frames of rows are copied into it where there is room.
    """
    replaced: list[tuple[Message, Frames]] = []
    elsewhere: list[NDArray[Any] | Buffer] = []
    copied: list[NDArray[np.uint8]] = []
    refers = False
    for message, frames in messages:
        references: list[bytes] = []
        for frame in frames:
            reference = segment.refer(frame)
            if reference is None and copies:
                copy = copy_rows(segment, frame)
                if copy is not None:
                    copied.append(copy)
                    reference = segment.refer(copy)
            if reference is None:
                elsewhere.append(frame)
                references.append(_PACKED_BY_SOCKET)
            else:
                references.append(reference.pack())
                refers = True
        replaced.append((message, references))
    return Referring(replaced, elsewhere, copied) if refers else None


def copy_rows(segment: ShmSegment, frame: NDArray[Any] | Buffer) -> NDArray[np.uint8] | None:
    """A copy of a frame in a slot for rows; None if it is small, or there is no room for it."""
    values = np.frombuffer(frame, np.uint8)
    copy = segment.take_rows(values.size) if values.size >= LEAST_SHARED_BYTES else None
    if copy is not None:
        copy[:] = values
    return copy


def count_references(parts: Parts) -> int:
    """The number of references behind the headers of an envelope; raises BadMessage."""
    if len(parts) < 2:
        raise BadMessage("references: expected a part behind the headers, got none")
    count, rest = divmod(memoryview(parts[1]).nbytes, REFERENCE_BYTES)
    if rest:
        raise BadMessage(f"references: expected {REFERENCE_BYTES} bytes each, got {rest} more")
    return count


def resolve(window: Window, parts: Parts, share: Share | None = None) -> Parts | None:
    """The headers, and the frames behind them: views for references, which keep `share` alive.

    Returns None if a reference is of an earlier generation; raises BadMessage.
    """
    count, elsewhere = count_references(parts), iter(parts[2:])
    frames: Parts = [parts[0]]
    packed = memoryview(parts[1])
    for number in range(count):
        reference = Reference.unpack(packed[REFERENCE_BYTES * number :][:REFERENCE_BYTES])
        if reference == _BY_SOCKET:
            frame = next(elsewhere, None)
            if frame is None:
                raise BadMessage(f"references: expected more than {len(parts) - 2} frames")
            frames.append(frame)
            continue
        view = window.view(reference)
        if view is None:
            return None
        if share is not None:
            lent = view.view(_LentView)
            lent.share = share
            view = lent
        frames.append(view.data)
    if next(elsewhere, None) is not None:
        raise BadMessage(f"references: expected fewer than {len(parts) - 2} frames")
    return frames


def let_go(_: object) -> None:
    """Do nothing: as a finalizer, it drops its argument when the view is gone."""


class Loans:
    """The lender's side: what one borrower holds, at most `limit` loans at a time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self._lent: dict[int, object] = {}

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self, thing: object) -> int | None:
        """Keep `thing` until it is returned; returns the loan's number, or None at the limit."""
        if len(self._lent) >= self.limit:
            return None
        self.count += 1
        self._lent[self.count] = thing
        return self.count

    @property
    def open_loans(self) -> list[int]:
        """The numbers of the loans that are not returned."""
        return list(self._lent)

    def withdraw(self, loan: int) -> None:
        """Cancel a loan that was never sent."""
        self._lent.pop(loan, None)

    def settle(self, seen: int, held: Collection[int]) -> None:
        """Return all loans up to `seen` except those in `held`; raises BadMessage if impossible."""
        if seen > self.count:
            raise BadMessage(f"loans: {seen} seen, but only {self.count} were made")
        for loan in [loan for loan in self._lent if loan <= seen and loan not in held]:
            del self._lent[loan]


class Borrowed:
    """The borrower's side: what it holds of one lender."""

    def __init__(self) -> None:
        self.seen = 0
        self._loans: set[int] = set()

    def borrow(self, loan: int) -> bool:
        """Record a loan; returns whether it may be used: not if a later one came first."""
        # The lender takes it for returned already, and may be overwriting it.
        if loan <= self.seen:
            return False
        self.seen = loan
        self._loans.add(loan)
        return True

    def give_back(self, loan: int) -> None:
        """Record that nothing refers to a loan any more; may be called from any thread."""
        # One operation on a set, so it needs no lock: finalizers run in any thread.
        self._loans.discard(loan)

    @property
    def loans(self) -> list[int]:
        # Copied first: a finalizer in another thread may drop a loan meanwhile.
        return sorted(self._loans.copy())
