"""Shared memory below the protocol: frames that both sides can see are sent as references.

Session and shard know nothing of this. Their messages pass through here on the way to the socket
and from it. If a worker and a shard have proved that they see each other's segment (segment.py), an
array in a segment is replaced by a reference, and the other side turns it back into a view of the
same memory. Any other message is sent through the socket as usual, so the protocol handles loss,
repetition and death as without shared memory.

Two rules keep a reader from seeing memory that is being overwritten:

- *A gradient* is in the worker's segment, and the worker's session keeps it until every shard has
  acknowledged it. A copy of the push that arrives later is a duplicate by its number, and the
  shard does not read its frames. (References of an earlier generation are dropped.)
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
from typing import Any

import numpy as np

from ps.shared_memory.segment import REFERENCE_BYTES, Reference, ShmSegment, Window
from shards import wire_format
from shards.errors import BadMessage
from shards.messages import Message
from shards.wire_format import Buffer, Frames

Parts = list[Buffer]
Together = Sequence[tuple[Message, Frames]]


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


def with_references(segment: ShmSegment, messages: Together) -> Together | None:
    """The messages with references for frames; None if there are no frames, or one is elsewhere."""
    replaced: list[tuple[Message, Frames]] = []
    refers = False
    for message, frames in messages:
        references = segment.refer(frames) if frames else []
        if references is None:
            return None
        refers = refers or bool(references)
        replaced.append((message, [reference.pack() for reference in references]))
    return replaced if refers else None


def enclose(messages: Together) -> Parts:
    """The parts of an envelope with references for frames: the headers, and all references."""
    headers, *references = wire_format.enclose(messages)
    return [headers, b"".join(references)]  # one part, because each costs a call of the socket


def separate(parts: Parts) -> Parts:
    """The headers, and each reference: the inverse of `enclose`; raises BadMessage."""
    if len(parts) != 2:
        raise BadMessage(f"references: expected one part behind the headers, got {len(parts) - 1}")
    packed = memoryview(parts[1])
    starts = range(0, packed.nbytes, REFERENCE_BYTES)
    return [parts[0], *[packed[start : start + REFERENCE_BYTES] for start in starts]]


def resolve(window: Window, parts: Parts, share: Share | None = None) -> Parts | None:
    """The headers, and views for the references behind them; each view keeps `share` alive.

    Returns None if a reference is of an earlier generation; raises BadMessage.
    """
    views: Parts = [parts[0]]
    for frame in separate(parts)[1:]:
        view = window.view(Reference.unpack(frame))
        if view is None:
            return None
        if share is not None:
            lent = view.view(_LentView)
            lent.share = share
            view = lent
        views.append(view.data)
    return views


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
