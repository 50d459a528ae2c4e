"""The coordinator's seat: the real coordinator, its record, and the life between two deaths."""

from typing import TYPE_CHECKING

from deploy.simulation.clock import Party
from ps.replication.coordinator import Coordinator, Decision, ShardGroup
from shards.replication_messages import Assignment, Beat

if TYPE_CHECKING:
    from deploy.simulation.replicated_shards import Copies
    from deploy.simulation.simulation import Simulation

SILENCE_S = 1.2
NOTICE_S = 0.02


class CoordinatorSeat(Party):
    """Whoever is coordinator. The record outlives it; nothing else does."""

    def __init__(self, world: "Simulation", groups: "list[Copies]") -> None:
        super().__init__(world.clock, "coordinator")
        self.record: dict[int, ShardGroup] = {shard: ShardGroup() for shard in range(len(groups))}
        self._world, self._groups = world, groups
        for group in groups:
            group.seat = self
        self._coordinator: Coordinator | None = self._anew()

    def begin(self) -> None:
        """Look around from now on."""
        self.every(SILENCE_S / 3, self._look_around)

    def _anew(self) -> Coordinator:
        shards = len(self._groups)
        return Coordinator(shards, silence_s=SILENCE_S, record=dict(self.record))

    def crash(self, back_s: float) -> None:
        """Die; a successor reads the record."""
        self._coordinator = None
        self._world.note("the coordinator dies")

        def back() -> None:
            self._coordinator = self._anew()

        self._clock.after(back_s, back)

    def hear(self, beat: Beat) -> None:
        """A copy says how it is."""
        if self._coordinator is not None:
            self._decide(self._coordinator.receive_beat(beat, self.now))

    def broken(self, boot: int) -> None:
        """The connection to a copy breaks, as when it dies; the coordinator notices."""

        def notice() -> None:
            if self._coordinator is not None:
                self._decide(self._coordinator.report_death(boot, self.now))

        self.after(NOTICE_S, notice)

    def _look_around(self) -> None:
        if self._coordinator is not None:
            self._decide(self._coordinator.tick(self.now))

    def _decide(self, decision: Decision) -> None:
        if decision.record is not None:
            before, self.record = self.record, decision.record
            for shard, group in self.record.items():
                if group != before[shard]:
                    self._groups[shard].decided(before[shard], group)
        for boot, word in decision.assignments:
            self._tell(boot, word)

    def _tell(self, boot: int, word: Assignment) -> None:
        copy = self._groups[word.configuration.shard].copies[boot]
        self._world.network.post(self.name, copy.name, copy.at, copy.assign, word)
