"""Bugs of replicated shards: the replicas, and the coordinator that assigns their roles."""

from typing import Any

import msgspec

from deploy.simulation.config import ClusterConfig
from deploy.simulation.mutants import Bugs, Patch
from ps.replication.coordinator import Coordinator, ShardGroup
from shards import wire_format
from shards.envelopes import Outgoing
from shards.messages import Hello, Join, Push, Refusal
from shards.parameters import ParameterStore
from shards.replica import Effects, Post, ShardReplica
from shards.replication_messages import Assignment, Beat, Replicated
from shards.shard import Shard

BUGS = Bugs(ClusterConfig.REPLICATED)


@BUGS.add
def an_answer_does_not_wait_for_the_backup(patch: Patch) -> None:
    patch.setattr(ShardReplica, "committed", property(lambda self: self.position))


@BUGS.add
def a_backup_is_promoted_before_it_is_in_sync(patch: Patch) -> None:
    def promotable(self: ShardGroup) -> tuple[int, ...]:
        if self.settled is None:
            return ()
        return tuple(b for b in (self.settled.primary, self.settled.backup) if b is not None)

    patch.setattr(ShardGroup, "promotable", property(promotable))


@BUGS.add
def in_sync_is_said_at_the_first_report(patch: Patch) -> None:
    """The backup lacks entries that the primary committed alone in the meantime."""

    def in_sync(self: ShardReplica) -> bool:
        return self._reported is not None and self._accepted == self._active

    patch.setattr(ShardReplica, "in_sync", property(in_sync))


@BUGS.add
def a_backup_follows_a_primary_of_the_past(patch: Patch) -> None:
    def copied(self: ShardReplica, origin: int, message: Any, frames: Any) -> Effects:
        if self._accepted is not None and message.epoch < self._accepted.epoch:
            return Effects(posts=[Post(origin, Replicated(message.epoch, message.position))])
        return real(self, origin, message, frames)

    real = ShardReplica._copied
    patch.setattr(ShardReplica, "_copied", copied)


@BUGS.add
def an_entry_is_skipped(patch: Patch) -> None:
    def copied(self: ShardReplica, origin: int, message: Any, frames: Any) -> Effects:
        position = getattr(message, "position", None)
        if self._holds is not None and position is not None and position > self._holds + 1:
            self._holds = position - 1
        return real(self, origin, message, frames)

    real = ShardReplica._copied
    patch.setattr(ShardReplica, "_copied", copied)


@BUGS.add
def a_late_state_overwrites_a_newer_one(patch: Patch) -> None:
    def take(self: ShardReplica, message: Any, frames: Any) -> None:
        self._holds = None
        real(self, message, frames)

    real = ShardReplica._take_state
    patch.setattr(ShardReplica, "_take_state", take)


@BUGS.add
def a_refused_request_is_replicated(patch: Patch) -> None:
    def handle(self: ShardReplica, sender: bytes, message: Any, frames: Any, now: float) -> Effects:
        effects = real(self, sender, message, frames, now)
        refused = any(isinstance(answer.message, Refusal) for answer in effects.answers)
        if not (refused and self.serving and isinstance(message, Hello | Join | Push)):
            return effects
        logged = self._log(now, (wire_format.encode(message), *frames), (), [])
        return Effects(effects.answers, effects.posts + logged.posts)

    real = ShardReplica.handle
    patch.setattr(ShardReplica, "handle", handle)


@BUGS.add
def a_new_backup_lacks_the_open_rounds(patch: Patch) -> None:
    patch.setattr(Shard, "waiting", lambda _: [])


@BUGS.add
def a_lease_that_ran_out_is_not_replicated(patch: Patch) -> None:
    def tick(self: ShardReplica, now: float) -> Effects:
        if not self.serving:
            return Effects()
        posts = self._repeat(now)
        return Effects(self._answer(self.shard.tick(now)).answers, posts)

    patch.setattr(ShardReplica, "tick", tick)


@BUGS.add
def a_successor_serves_before_it_is_confirmed(patch: Patch) -> None:
    def assign(self: ShardReplica, assignment: Assignment, now: float) -> Effects:
        return real(self, msgspec.structs.replace(assignment, confirmed=True), now)

    real = ShardReplica.assign
    patch.setattr(ShardReplica, "assign", assign)


@BUGS.add
def a_coordinator_forgets_what_it_had_settled(patch: Patch) -> None:
    def unsaved(self: Coordinator) -> dict[int, ShardGroup] | None:
        found = real(self)
        if found is None:
            return None
        return {
            shard: msgspec.structs.replace(group, in_sync=True) for shard, group in found.items()
        }

    real = Coordinator._unsaved
    patch.setattr(Coordinator, "_unsaved", unsaved)


@BUGS.add
def a_late_beat_counts_for_a_newer_epoch(patch: Patch) -> None:
    def confirm(self: Coordinator, beat: Beat) -> None:
        newest = self.groups[beat.shard].newest
        if newest is not None and beat.boot == newest.primary:
            beat = msgspec.structs.replace(beat, epoch=newest.epoch)
        real(self, beat)

    real = Coordinator._confirm
    patch.setattr(Coordinator, "_confirm", confirm)


@BUGS.add
def a_used_copy_is_taken_for_a_spare(patch: Patch) -> None:
    def receive_beat(self: Coordinator, beat: Beat, now: float) -> Any:
        decision = real(self, beat, now)
        self._accepted = dict.fromkeys(self._accepted, 0)
        return decision

    real = Coordinator.receive_beat
    patch.setattr(Coordinator, "receive_beat", receive_beat)


@BUGS.add
def a_successor_forgets_who_has_pushed_what(patch: Patch) -> None:
    def take_over(self: Shard, now: float) -> None:
        real(self, now)
        for entry in self.ledger.entries.values():
            entry.seq = max(0, entry.seq - 1)

    real = Shard.take_over
    patch.setattr(Shard, "take_over", take_over)


@BUGS.add
def held_answers_are_forgotten(patch: Patch) -> None:
    def released(self: ShardReplica) -> list[Outgoing]:
        found = real(self)
        self._held.clear()
        return found

    real = ShardReplica._released
    patch.setattr(ShardReplica, "_released", released)


@BUGS.add
def a_silent_backup_is_never_repeated_to(patch: Patch) -> None:
    patch.setattr(ShardReplica, "_repeat", lambda _self, _now: [])


@BUGS.add
def nobody_is_ever_suspected(patch: Patch) -> None:
    patch.setattr(Coordinator, "_alive", lambda _self, _boot, _now: True)


@BUGS.add
def an_empty_primary_sends_its_state(patch: Patch) -> None:
    """The bug that the simulation found when groups could start at any time."""
    patch.setattr(ParameterStore, "empty", False)


@BUGS.add
def a_copy_answers_before_it_is_primary(patch: Patch) -> None:
    def serving(self: ShardReplica) -> bool:
        return not self.retired and self._accepted is not None and not self.shard.held.empty

    patch.setattr(ShardReplica, "serving", property(serving))


@BUGS.add
def a_new_backup_judges_an_open_round_again(patch: Patch) -> None:
    """The bug that the simulation found when workers died while a new backup came in sync."""

    def park_request(self: Shard, message: Any, frames: Any, now: float) -> None:
        self.handle(b"", msgspec.structs.replace(message, boot=self.boot), frames, now)

    patch.setattr(Shard, "park_request", park_request)


@BUGS.add
def a_state_makes_the_one_before_it_worthless(patch: Patch) -> None:
    """A bug from before messages had sizes: a state that is sent again raises the goal."""

    def send(self: ShardReplica, now: float) -> list[Post]:
        vars(self)["sync_at"] = self.position
        self._unreported.clear()
        self._patience_s = self.retry_s
        return send_state(self, now)

    def hear(self: ShardReplica, origin: int, message: Replicated, now: float) -> Effects:
        if message.position is not None and message.position < vars(self).get("sync_at", 0):
            return Effects()
        return heard(self, origin, message, now)

    send_state, heard = ShardReplica._send_state, ShardReplica._heard
    patch.setattr(ShardReplica, "_send_state", send)
    patch.setattr(ShardReplica, "_heard", hear)
