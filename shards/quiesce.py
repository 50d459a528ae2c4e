"""Quiescing: bringing all shards of a job to the same pushes, while workers keep running.

Theory. Each shard decides alone, so at any moment one may hold a push that another has yet to see.
Saving or resharding the job as a whole needs a *consistent cut* (Chandy and Lamport 1985): a number
for each worker, such that every shard has applied exactly its pushes up to that number. Two steps
produce it. First each shard quiesces where it is and reports its last applied push of each worker.
The largest of those numbers are the cut, and each shard then quiesces at the cut. Every shard will
reach it: a push that one shard has applied was sent to all, and a live worker repeats it until all
have it. A dead worker is not waited for; its last push was never acknowledged.

Pushes beyond the cut are refused and will be repeated; pulls continue. A worker's leave is refused
as well. Otherwise the new shards, which have the worker from an earlier export, would count it
until its lease runs out, and meanwhile wait to apply a buffer that no worker fills any more.

A quiesce is a lock with a lease (Gray and Cheriton 1989). It belongs to the operator that began it,
which is identified by a number that it has drawn. Until the quiesce ends, no other operator can
move the cut, end the quiesce, or hand the shard over: a cut that one operator relies on does not
change because another one fails. Nor does it change because an earlier request of its operator
arrives late, for example a repeated one that was on its way through an old connection: an operator
numbers its requests in rising order. The quiesce ends by itself, so that an operator that dies
blocks no worker, and no other operator, for long.

A successor of the shard, recovered from its WAL or promoted from a backup, must not go beyond the
cut either: it would apply pushes that the operator leaves to the new shards. The recorded end of
the quiesce is a time of another clock, so the successor starts the full duration again, unless the
predecessor has seen the quiesce end.
"""

from collections.abc import Mapping

import msgspec

from shards.errors import Retry
from shards.messages import Count, Name


class QuiesceState(msgspec.Struct, frozen=True):
    """A quiesce as a value: its cut, its duration, its end by the shard's clock, if active, its
    owner, and the number of the owner's request that set it.
    """

    cut: dict[Name, Count] = {}
    seconds: float = 0.0
    ends_at: float | None = None
    owner: Count = 0
    request: Count = 0


class QuiesceTracker:
    """The last push that this shard may apply of each worker, and until when that limit holds.

    `ends_at` is that time by the shard's clock; None without a limit, and once `check` has
    cleared it.
    """

    def __init__(self, state: QuiesceState | None = None) -> None:
        """Start without a limit, or with the `state` of another tracker."""
        state = state or QuiesceState()
        self._cut: Mapping[str, int] = state.cut
        self._seconds, self.ends_at = state.seconds, state.ends_at
        self._owner, self._request = state.owner, state.request

    @property
    def state(self) -> QuiesceState:
        """This tracker's state as a value."""
        owned = self._owner, self._request
        return QuiesceState(dict(self._cut), self._seconds, self.ends_at, *owned)

    def begin(
        self, owner: int, request: int, cut: Mapping[str, int], seconds: float, now: float
    ) -> None:
        """For `seconds`, allow no push beyond `cut`, and none of workers not in it; 0 resumes.

        Call it only while no other operator is the owner (`busy_s`), and for no late request
        (`is_late`).
        """
        self._owner, self._request, self._cut, self._seconds = owner, request, cut, seconds
        self.ends_at = now + seconds if seconds > 0 else None

    def busy_s(self, owner: int, now: float) -> float:
        """The seconds for which an operator other than `owner` quiesces the shard; 0 if none."""
        return 0.0 if self._owner == owner else self.remaining_s(now)

    def is_late(self, owner: int, request: int) -> bool:
        """Return whether this shard has obeyed a later request of the owner."""
        # Not `<=`: a repeated request is obeyed again, as its first answer may have been lost.
        return owner == self._owner and request < self._request

    def remaining_s(self, now: float) -> float:
        """The seconds for which the limit is still in force; 0 if it is not."""
        return 0.0 if self.ends_at is None else max(0.0, self.ends_at - now)

    def is_owned(self, owner: int, now: float) -> bool:
        """Return whether the limit is in force, and `owner` began it."""
        return self.is_active(now) and self._owner == owner

    def reset(self, now: float) -> None:
        """Start the full duration again, by the clock that `now` is read from."""
        if self.ends_at is not None:
            self.ends_at = now + self._seconds

    def is_active(self, now: float) -> bool:
        """Return whether the limit is in force."""
        return self.ends_at is not None and now < self.ends_at

    def allows(self, worker: str, seq: int, now: float) -> bool:
        """Return whether push `seq` may be applied."""
        # A worker that the cut does not name had pushed nothing, so all its pushes are beyond it.
        return not self.is_active(now) or seq <= self._cut.get(worker, 0)

    def check(self, worker: str, seq: int, now: float) -> None:
        """Raise Retry if push `seq` is beyond the cut.

        The first push checked after the end clears the quiesce. In a WAL too, that push is the
        only sign that the quiesce is over.
        """
        if self.ends_at is None:
            return
        if not self.is_active(now):
            self.ends_at = None
        if not self.allows(worker, seq, now):
            raise Retry(f"worker {worker}: push {seq} waits while the shards are quiesced")

    def check_leave(self, worker: str, now: float) -> None:
        """Raise Retry while the limit is in force: an exported state counts the worker."""
        if self.is_active(now):
            raise Retry(f"worker {worker}: its leave waits while the shards are quiesced")
