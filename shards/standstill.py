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
"""

from collections.abc import Mapping

from shards.errors import Retry


class Standstill:
    """How far this shard may go with each worker, and until when that counts."""

    def __init__(self) -> None:
        self._cut: Mapping[str, int] = {}
        self._ends_at: float | None = None

    def begin(self, cut: Mapping[str, int], ends_at: float) -> None:
        """Let nobody beyond `cut`, and who is not in it nowhere, until `ends_at`."""
        self._cut, self._ends_at = cut, ends_at

    def holds(self, now: float) -> bool:
        """Whether it is in force."""
        return self._ends_at is not None and now < self._ends_at

    def lets(self, worker: str, seq: int, now: float) -> bool:
        """Whether push `seq` may be applied."""
        return not self.holds(now) or seq <= self._cut.get(worker, 0)

    def check(self, worker: str, seq: int, now: float) -> None:
        """Raise Retry when push `seq` lies beyond the cut."""
        if not self.lets(worker, seq, now):
            raise Retry(f"worker {worker}: push {seq} waits while the shards stand still")
