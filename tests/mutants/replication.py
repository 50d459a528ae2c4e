"""Mutants of replicated shards: the copies, and the coordinator that assigns their roles."""

from typing import Any

import msgspec

from deploy.simulation.invariants import Promise
from deploy.simulation_kinds import ClusterConfig
from ps.replication.coordinator import Coordinator, ShardGroup
from shards.parameters import ParameterStore
from shards.replica import Effects, ShardReplica
from shards.replication_messages import Assignment, Beat
from shards.shard import Shard
from tests.mutants.patching import Mutants, Patch

MUTANTS = Mutants()


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.DURABLE)
def an_answer_does_not_wait_for_the_backup(patch: Patch) -> None:
    patch.setattr(ShardReplica, "commit_position", property(lambda self: self.position))


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.DURABLE)
def a_backup_is_promoted_before_it_is_in_sync(patch: Patch) -> None:
    def promotable(self: ShardGroup) -> tuple[int, ...]:
        if self.settled is None:
            return ()
        return tuple(b for b in (self.settled.primary, self.settled.backup) if b is not None)

    patch.setattr(ShardGroup, "promotable", property(promotable))


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.DURABLE)
def in_sync_is_reported_too_early(patch: Patch) -> None:
    """The backup lacks entries that the primary committed alone in the meantime."""

    def in_sync(self: ShardReplica) -> bool:
        return self._reported is not None and self._accepted == self._active

    patch.setattr(ShardReplica, "in_sync", property(in_sync))


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.DURABLE)
def a_primary_serves_before_it_is_confirmed(patch: Patch) -> None:
    def assign(self: ShardReplica, assignment: Assignment, now: float) -> Effects:
        return real(self, msgspec.structs.replace(assignment, confirmed=True), now)

    real = ShardReplica.assign
    patch.setattr(ShardReplica, "assign", assign)


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.DURABLE)
def the_record_calls_every_backup_in_sync(patch: Patch) -> None:
    def unsaved(self: Coordinator) -> dict[int, ShardGroup] | None:
        found = real(self)
        if found is None:
            return None
        return {
            shard: msgspec.structs.replace(group, in_sync=True) for shard, group in found.items()
        }

    real = Coordinator._take_unsaved
    patch.setattr(Coordinator, "_take_unsaved", unsaved)


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.DURABLE)
def a_late_heartbeat_counts_for_a_newer_epoch(patch: Patch) -> None:
    def confirm(self: Coordinator, beat: Beat) -> None:
        newest = self.groups[beat.shard].newest
        if newest is not None and beat.boot == newest.primary:
            beat = msgspec.structs.replace(beat, epoch=newest.epoch)
        real(self, beat)

    real = Coordinator._confirm
    patch.setattr(Coordinator, "_confirm", confirm)


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.SAME_COPY)
def an_entry_is_skipped(patch: Patch) -> None:
    def copied(self: ShardReplica, origin: int, message: Any, frames: Any) -> Effects:
        position = getattr(message, "position", None)
        if self._holds is not None and position is not None and position > self._holds + 1:
            self._holds = position - 1
        return real(self, origin, message, frames)

    real = ShardReplica._handle_copy
    patch.setattr(ShardReplica, "_handle_copy", copied)


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.SAME_COPY)
def a_new_backup_judges_an_open_round_again(patch: Patch) -> None:
    """The bug that the simulation found when workers died while a new backup came in sync."""

    def park_request(self: Shard, message: Any, frames: Any, now: float) -> None:
        self.handle(b"", msgspec.structs.replace(message, boot=self.boot), frames, now)

    patch.setattr(Shard, "park_request", park_request)


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.PROGRESS)
def a_used_copy_counts_as_a_spare(patch: Patch) -> None:
    def receive_beat(self: Coordinator, beat: Beat, now: float) -> Any:
        decision = real(self, beat, now)
        self._accepted = dict.fromkeys(self._accepted, 0)
        return decision

    real = Coordinator.receive_beat
    patch.setattr(Coordinator, "receive_beat", receive_beat)


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.NO_SURPRISE)
def an_empty_primary_sends_its_state(patch: Patch) -> None:
    """The bug that the simulation found when groups could start at any time."""
    patch.setattr(ParameterStore, "empty", False)


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.ONE_PRIMARY)
def a_new_primary_keeps_the_epoch_of_the_former(patch: Patch) -> None:
    def propose(self: Coordinator, shard: int, primary: int, backup: int | None) -> None:
        newest = self.groups[shard].newest
        original(self, shard, primary, backup)
        proposed = self.groups[shard]
        if newest is not None and proposed.pending is not None and newest.primary != primary:
            pending = msgspec.structs.replace(proposed.pending, epoch=newest.epoch)
            self.groups[shard] = msgspec.structs.replace(proposed, pending=pending)

    original = Coordinator._propose
    patch.setattr(Coordinator, "_propose", propose)
