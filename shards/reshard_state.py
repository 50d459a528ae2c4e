"""One shard's progress in a reshard: first it is quiesced, then it has handed over its part.

`Export` returns neither (shard_part.py), so both travel to another copy as a `ReshardProgress`.
"""

import msgspec

from shards.errors import GiveUp
from shards.quiesce import QuiesceState, QuiesceTracker


class ReshardProgress(msgspec.Struct, frozen=True, rename={"quiesce": "standstill"}):
    """Progress in a reshard: the quiesce, and the new shards (JSON of a ps.Cluster), if any."""

    quiesce: QuiesceState
    moved_to: bytes | None


class ReshardState:
    """A shard's reshard: its quiesce, and the shards that it redirects workers to, or None."""

    def __init__(self, shard: int) -> None:
        self.quiesce = QuiesceTracker()
        self.moved_to: bytes | None = None
        self._shard = shard

    def hand_over(self, successors: bytes, owner: int, now: float) -> None:
        """Record that `successors` hold the part from now on.

        Raises GiveUp if the operator `owner` does not quiesce the shard, or if it was handed over
        to other shards.
        """
        # A repeated handover is no fault, even where the quiesce has ended since.
        if self.moved_to is None and not self.quiesce.is_owned(owner, now):
            raise GiveUp(f"hand over: shard {self._shard} is not quiesced by this operator")
        if self.moved_to not in (None, successors):
            # Another operator was first; workers that were sent there must not be called back.
            raise GiveUp(f"hand over: shard {self._shard} has handed over its part to others")
        self.moved_to = successors

    def has_begun(self, now: float) -> bool:
        """Return whether the shard is quiesced or has handed over its part."""
        return self.moved_to is not None or self.quiesce.is_active(now)

    @property
    def progress(self) -> ReshardProgress:
        """Both facts as a value."""
        return ReshardProgress(self.quiesce.state, self.moved_to)

    @progress.setter
    def progress(self, progress: ReshardProgress) -> None:
        self.quiesce, self.moved_to = QuiesceTracker(progress.quiesce), progress.moved_to
