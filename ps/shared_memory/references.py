"""Shared memory under the protocol: frames that both sides can see travel as references.

Session and shard know nothing of this. Their messages pass through here on the way to the socket
and from it, and where a worker and a shard have proved that they see each other's segment
(segment.py), an array that lies in one is replaced by a reference, which the other side turns back
into a view of the same memory. A message that cannot go so goes as it always does, so everything
that the protocol does about loss, repetition and death holds unchanged.

What keeps a reader from seeing memory that is written anew:

- *A gradient* lies in the worker's segment, and its session keeps it until every shard has
  acknowledged it. A copy of the push that arrives later is a duplicate by its number, and the
  shard does not look at what it carries. (References of an earlier generation are dropped.)
- *A version* lies in the shard's segment and is lent (loans.py). It is recycled when the worker has
  returned it, or has died, which the lock on its segment proves (shm_files.py). A worker that is
  stopped, or slow, keeps what it has. One that holds too much gets its next pull by the socket.

The proof: each side writes a random number into its own segment and reads the other's. A worker's
Hello offers its segment; the shard's Welcome returns the number found there, and names its own;
from then on the worker shows both numbers with whatever it sends, and only to who has shown them
does the shard lend. Offers are looked at only once the shard has welcomed the worker, so a stranger
without the job's id learns nothing, and makes the shard open nothing.

Here is what both sides do alike; what each does for itself is in worker_side.py and shard_side.py.
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
    """Something borrowed, for as long as anything refers to it; `give_back` is told its number."""

    def __init__(self, give_back: Callable[[int], None], number: int) -> None:
        self._give_back = give_back
        self._number = number

    def __del__(self) -> None:
        self._give_back(self._number)


class _Lent(np.ndarray[Any, np.dtype[np.uint8]]):
    """An array that has a share in what it shows; a finalizer for each would cost much more."""

    share: Share


def has(messages: Together, kind: type[Message]) -> bool:
    """Whether one of them is of this kind."""
    return any(isinstance(message, kind) for message, _ in messages)


def referring(segment: ShmSegment, messages: Together) -> Together | None:
    """The messages, references for frames; None if there are none, or one lies elsewhere."""
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
    """The headers and what the references behind them stand for; each view keeps `share` alive."""
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
    """A view is gone, and with it its share in what it held."""
