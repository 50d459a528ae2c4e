"""The simulated process of the coordinator: the real coordinator and its persistent record."""

from typing import TYPE_CHECKING

from deploy.simulation.process import SimulatedProcess
from ps.replication.coordinator import Coordinator, Decision, ShardGroup
from shards.replication_messages import Assignment, Beat

if TYPE_CHECKING:
    from deploy.simulation.replicated_shards import ReplicatedShardHost
    from deploy.simulation.simulation import Simulation

SILENCE_S = 1.2
NOTICE_S = 0.02


class SimulatedCoordinator(SimulatedProcess):
    """The coordinator's process. When it dies, only the record survives."""

    def __init__(self, world: "Simulation", groups: "list[ReplicatedShardHost]") -> None:
        super().__init__(world.clock, "coordinator")
        self.record: dict[int, ShardGroup] = {shard: ShardGroup() for shard in range(len(groups))}
        self._world, self._groups = world, groups
        for group in groups:
            group.coordinator = self
        self._coordinator: Coordinator | None = self._new_coordinator()

    def begin(self) -> None:
        """Start the timer of its ticks."""
        self.every(SILENCE_S / 3, self._tick)

    def _new_coordinator(self) -> Coordinator:
        """A new coordinator that starts from the record."""
        shards = len(self._groups)
        return Coordinator(shards, silence_s=SILENCE_S, record=dict(self.record))

    def crash(self, back_s: float) -> None:
        """Die; a successor starts from the record `back_s` seconds later."""
        self._coordinator = None
        self._world.note("the coordinator dies")

        def back() -> None:
            self._coordinator = self._new_coordinator()

        self._clock.after(back_s, back)

    def hear(self, beat: Beat) -> None:
        """Process the heartbeat of a copy."""
        if self._coordinator is not None:
            self._decide(self._coordinator.receive_beat(beat, self.now))

    def report_break(self, boot: int) -> None:
        """The connection to a copy breaks; the coordinator takes that for the copy's death."""

        def notice() -> None:
            if self._coordinator is not None:
                self._decide(self._coordinator.report_death(boot, self.now))

        self.after(NOTICE_S, notice)

    def _tick(self) -> None:
        if self._coordinator is not None:
            self._decide(self._coordinator.tick(self.now))

    def _decide(self, decision: Decision) -> None:
        if decision.record is not None:
            before, self.record = self.record, decision.record
            for shard, group in self.record.items():
                if group != before[shard]:
                    self._groups[shard].check_decision(before[shard], group)
        for boot, assignment in decision.assignments:
            self._send(boot, assignment)

    def _send(self, boot: int, assignment: Assignment) -> None:
        group = self._groups[assignment.configuration.shard]
        copy = group.copies[boot]
        self._world.network.post(self.name, copy.name, copy.at, group.assign, copy, assignment)
