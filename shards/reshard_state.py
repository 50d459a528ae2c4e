"""How far one shard is in a move: it stands still, then it has handed over its part.

Neither is among what `Export` gives (shard_part.py), so a copy that is to be as far is told both as
a `ReshardProgress`.
"""

import msgspec

from shards.errors import GiveUp
from shards.quiesce import QuiesceState, QuiesceTracker


class ReshardProgress(msgspec.Struct, frozen=True):
    """How far a shard is in a move: where it stands still, and who has its part by now."""

    standstill: QuiesceState
    moved_to: bytes | None


class ReshardState:
    """The move of one shard: its standstill, and the successors it sends workers to, or None."""

    def __init__(self, shard: int) -> None:
        self.standstill = QuiesceTracker()
        self.moved_to: bytes | None = None
        self._shard = shard

    def hand_over(self, successors: bytes, now: float) -> None:
        """From now on `successors` have its part; raises GiveUp where that cannot be."""
        if self.moved_to is None and not self.standstill.is_active(now):
            raise GiveUp(f"retire: shard {self._shard} does not stand still")
        if self.moved_to not in (None, successors):
            # Another operator was first: who was sent there must not be called back.
            raise GiveUp(f"retire: shard {self._shard} has handed over its part to others")
        self.moved_to = successors

    def begun(self, now: float) -> bool:
        """Whether it stands still, or has handed over its part."""
        return self.moved_to is not None or self.standstill.is_active(now)

    @property
    def progress(self) -> ReshardProgress:
        """It as a value."""
        return ReshardProgress(self.standstill.state, self.moved_to)

    @progress.setter
    def progress(self, stance: ReshardProgress) -> None:
        self.standstill, self.moved_to = QuiesceTracker(stance.standstill), stance.moved_to
