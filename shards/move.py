"""How far one shard is in a move: it stands still, then it has handed over its part.

Neither is among what `Export` gives (part.py), so a copy that is to be as far is told both as a
`Stance`.
"""

import msgspec

from shards.errors import GiveUp
from shards.standstill import Standstill, Told


class Stance(msgspec.Struct, frozen=True):
    """How far a shard is in a move: where it stands still, and who has its part by now."""

    standstill: Told
    moved_to: bytes | None


class Move:
    """The move of one shard: its standstill, and the successors it sends workers to, or None."""

    def __init__(self, shard: int) -> None:
        self.standstill = Standstill()
        self.moved_to: bytes | None = None
        self._shard = shard

    def hand_over(self, successors: bytes, now: float) -> None:
        """From now on `successors` have its part; raises GiveUp where that cannot be."""
        if self.moved_to is None and not self.standstill.holds(now):
            raise GiveUp(f"retire: shard {self._shard} does not stand still")
        if self.moved_to not in (None, successors):
            # Another operator was first: who was sent there must not be called back.
            raise GiveUp(f"retire: shard {self._shard} has handed over its part to others")
        self.moved_to = successors

    def begun(self, now: float) -> bool:
        """Whether it stands still, or has handed over its part."""
        return self.moved_to is not None or self.standstill.holds(now)

    @property
    def stance(self) -> Stance:
        """It as a value."""
        return Stance(self.standstill.told, self.moved_to)

    @stance.setter
    def stance(self, stance: Stance) -> None:
        self.standstill, self.moved_to = Standstill(stance.standstill), stance.moved_to
