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
- *A version* is in the shard's segment and is lent (loans.py). It is recycled when the worker has
  returned it, or has died, as the lock on its segment proves (shm_files.py). A worker that is
  suspended, or slow, keeps what it holds. If it holds too much, its next pull uses the socket.

The proof: each side writes a random number into its own segment and reads the other's. A worker's
Hello offers its segment; the shard's Welcome returns the number found there, and names its own.
From then on the worker shows both numbers with every message, and the shard lends only to workers
that have shown them. The shard examines an offer only after it has welcomed the worker, so a
stranger without the job's id learns nothing, and cannot make the shard open a file.

This file holds what both sides share; the rest is in worker_side.py and shard_side.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ps.shared_memory.segment import Reference, ShmSegment, Window
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


class _Lent(np.ndarray[Any, np.dtype[np.uint8]]):
    """An array that holds a share in its memory; a finalizer for each would cost much more."""

    share: Share


def has(messages: Together, kind: type[Message]) -> bool:
    """Whether one of them is of this kind."""
    return any(isinstance(message, kind) for message, _ in messages)


def referring(segment: ShmSegment, messages: Together) -> Together | None:
    """The messages with references for frames; None if there are no frames, or one is elsewhere."""
    replaced: list[tuple[Message, Frames]] = []
    found = False
    for message, frames in messages:
        references = segment.refer(frames) if frames else []
        if references is None:
            return None
        found = found or bool(references)
        replaced.append((message, [reference.pack() for reference in references]))
    return replaced if found else None


def looked_up(window: Window, parts: Parts, share: Share | None = None) -> Parts | None:
    """The headers, and views for the references behind them; each view keeps `share` alive.

    Returns None if a reference is of an earlier generation.
    """
    found: Parts = [parts[0]]
    for frame in parts[1:]:
        view = window.view(Reference.unpack(frame))
        if view is None:
            return None
        if share is not None:
            lent = view.view(_Lent)
            lent.share = share
            view = lent
        found.append(view.data)
    return found


def let_go(_: object) -> None:
    """Do nothing: as a finalizer, it drops its argument when the view is gone."""
