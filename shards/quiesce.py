"""The standstill: how all shards of a job come to hold the same pushes, while workers go on.

Theory. Each shard decides alone, so at any moment one may hold a push that another has yet to see.
To save or to move the job as a whole there must be a *consistent cut* (Chandy and Lamport 1985): a
number for each worker, such that every shard has applied exactly its pushes up to that. It comes
about in two steps. First each shard is told to stand still where it is, and answers how far it has
come with each worker. The largest of those numbers are the cut, and each shard is told to go that
far. It will: a push that one shard has applied was sent to all, and a live worker repeats it until
all have it. One that is dead is not waited for; its last push was never acknowledged.

Pushes beyond the cut are refused and will be repeated; pulls go on. A standstill ends by itself, so
that an operator that dies holds nobody up.

Who takes a shard's place, from its log or as another copy of it, must not go beyond the cut either:
it would apply what the operator believes is left to others. When the standstill ends was told by
another clock, so it lasts as long again from there, unless it has been seen to be over.
"""

from collections.abc import Mapping

import msgspec

from shards.errors import Retry
from shards.messages import Count, Name


class QuiesceState(msgspec.Struct, frozen=True):
    """A standstill as a value: the cut, how long it was to last, and when the shard sees it end."""

    cut: dict[Name, Count] = {}
    seconds: float = 0.0
    ends_at: float | None = None


class QuiesceTracker:
    """How far this shard may go with each worker, and until when that counts."""

    def __init__(self, told: QuiesceState | None = None) -> None:
        """None in force, or the same as another's."""
        told = told or QuiesceState()
        self._cut: Mapping[str, int] = told.cut
        self._seconds, self._ends_at = told.seconds, told.ends_at

    @property
    def state(self) -> QuiesceState:
        """It as a value."""
        return QuiesceState(dict(self._cut), self._seconds, self._ends_at)

    def begin(self, cut: Mapping[str, int], seconds: float, now: float) -> None:
        """Let nobody beyond `cut`, and who is not in it nowhere, for so long; 0 ends it."""
        self._cut, self._seconds = cut, seconds
        self._ends_at = now + seconds if seconds > 0 else None

    def reset(self, now: float) -> None:
        """Last as long again by another clock."""
        if self._ends_at is not None:
            self._ends_at = now + self._seconds

    def is_active(self, now: float) -> bool:
        """Whether it is in force."""
        return self._ends_at is not None and now < self._ends_at

    def allows(self, worker: str, seq: int, now: float) -> bool:
        """Whether push `seq` may be applied."""
        return not self.is_active(now) or seq <= self._cut.get(worker, 0)

    def check(self, worker: str, seq: int, now: float) -> None:
        """Raise Retry when push `seq` lies beyond the cut.

        What is let through by the end of the time is the sign, in a log too, that it is over.
        """
        if self._ends_at is None:
            return
        if not self.is_active(now):
            self._ends_at = None
        if not self.allows(worker, seq, now):
            raise Retry(f"worker {worker}: push {seq} waits while the shards stand still")
