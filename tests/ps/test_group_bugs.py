"""The simulated groups catch the bugs that they are there to catch, planted in the real code."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from ps.coordinator import Coordinator, Group
from shards import codec
from shards.group import Assignment, Beat, Replicated
from shards.messages import Hello, Join, Push, Refusal
from shards.replica import Effects, Post, Replica
from shards.shard import Outgoing, Shard
from tests.ps.group_network import Faults, GroupNetwork
from tests.ps.network import swarm

RUNS = 60
QUIET_S = 20.0
Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]

PLANTS: dict[str, Plant] = {}


def planted(plant: Plant) -> Plant:
    PLANTS[plant.__name__] = plant
    return plant


@planted
def an_answer_does_not_wait_for_the_backup(patch: Patch) -> None:
    patch.setattr(Replica, "committed", property(lambda self: self.position))


@planted
def a_backup_is_promoted_before_it_is_in_sync(patch: Patch) -> None:
    def promotable(self: Group) -> tuple[int, ...]:
        if self.settled is None:
            return ()
        return tuple(b for b in (self.settled.primary, self.settled.backup) if b is not None)

    patch.setattr(Group, "promotable", property(promotable))


@planted
def in_sync_is_said_at_the_first_report(patch: Patch) -> None:
    """Without what was committed alone in the meantime."""

    def in_sync(self: Replica) -> bool:
        return self._reported is not None and self._accepted == self._active

    patch.setattr(Replica, "in_sync", property(in_sync))


@planted
def a_backup_follows_a_primary_of_the_past(patch: Patch) -> None:
    def copied(self: Replica, origin: int, message: Any, frames: Any) -> Effects:
        if self._accepted is not None and message.epoch < self._accepted.epoch:
            return Effects(posts=[Post(origin, Replicated(message.epoch, message.position))])
        return real(self, origin, message, frames)

    real = Replica._copied
    patch.setattr(Replica, "_copied", copied)


@planted
def an_entry_is_skipped(patch: Patch) -> None:
    def copied(self: Replica, origin: int, message: Any, frames: Any) -> Effects:
        position = getattr(message, "position", None)
        if self._holds is not None and position is not None and position > self._holds + 1:
            self._holds = position - 1
        return real(self, origin, message, frames)

    real = Replica._copied
    patch.setattr(Replica, "_copied", copied)


@planted
def a_late_state_overwrites_a_newer_one(patch: Patch) -> None:
    def take(self: Replica, message: Any, frames: Any) -> None:
        self._holds = None
        real(self, message, frames)

    real = Replica._take_state
    patch.setattr(Replica, "_take_state", take)


@planted
def a_refused_request_is_replicated(patch: Patch) -> None:
    def handle(self: Replica, sender: bytes, message: Any, frames: Any, now: float) -> Effects:
        effects = real(self, sender, message, frames, now)
        refused = any(isinstance(answer.message, Refusal) for answer in effects.answers)
        if not (refused and self.serving and isinstance(message, Hello | Join | Push)):
            return effects
        logged = self._log(now, (codec.encode(message), *frames), (), [])
        return Effects(effects.answers, effects.posts + logged.posts)

    real = Replica.handle
    patch.setattr(Replica, "handle", handle)


@planted
def a_new_backup_lacks_the_open_rounds(patch: Patch) -> None:
    patch.setattr(Shard, "waiting", lambda _: [])


@planted
def a_lease_that_ran_out_is_not_replicated(patch: Patch) -> None:
    def tick(self: Replica, now: float) -> Effects:
        if not self.serving:
            return Effects()
        posts = self._repeat(now)
        return Effects(self._answer(self.shard.tick(now)).answers, posts)

    patch.setattr(Replica, "tick", tick)


@planted
def a_successor_serves_before_it_is_confirmed(patch: Patch) -> None:
    def assign(self: Replica, told: Assignment, now: float) -> Effects:
        return real(self, msgspec.structs.replace(told, confirmed=True), now)

    real = Replica.assign
    patch.setattr(Replica, "assign", assign)


@planted
def a_coordinator_forgets_what_it_had_settled(patch: Patch) -> None:
    def unsaved(self: Coordinator) -> dict[int, Group] | None:
        found = real(self)
        if found is None:
            return None
        return {
            shard: msgspec.structs.replace(group, in_sync=True) for shard, group in found.items()
        }

    real = Coordinator._unsaved
    patch.setattr(Coordinator, "_unsaved", unsaved)


@planted
def a_late_beat_counts_for_a_newer_epoch(patch: Patch) -> None:
    def settle(self: Coordinator, beat: Beat) -> None:
        newest = self.groups[beat.shard].newest
        if newest is not None and beat.boot == newest.primary:
            beat = msgspec.structs.replace(beat, epoch=newest.epoch)
        real(self, beat)

    real = Coordinator._settle
    patch.setattr(Coordinator, "_settle", settle)


@planted
def a_used_copy_is_taken_for_a_spare(patch: Patch) -> None:
    def hear(self: Coordinator, beat: Beat, now: float) -> Any:
        decision = real(self, beat, now)
        self._accepted = dict.fromkeys(self._accepted, 0)
        return decision

    real = Coordinator.hear
    patch.setattr(Coordinator, "hear", hear)


@planted
def a_successor_forgets_who_has_pushed_what(patch: Patch) -> None:
    def take_over(self: Shard, now: float) -> None:
        real(self, now)
        for entry in self.ledger.entries.values():
            entry.seq = max(0, entry.seq - 1)

    real = Shard.take_over
    patch.setattr(Shard, "take_over", take_over)


@planted
def held_answers_are_forgotten(patch: Patch) -> None:
    def released(self: Replica) -> list[Outgoing]:
        found = real(self)
        self._held.clear()
        return found

    real = Replica._released
    patch.setattr(Replica, "_released", released)


@planted
def a_silent_backup_is_never_repeated_to(patch: Patch) -> None:
    patch.setattr(Replica, "_repeat", lambda _self, _now: [])


@planted
def nobody_is_ever_suspected(patch: Patch) -> None:
    patch.setattr(Coordinator, "_alive", lambda _self, _boot, _now: True)


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some run fails within a few seeds."""
    PLANTS[name](monkeypatch)
    for seed in range(RUNS):
        setting = msgspec.structs.replace(swarm(seed), quiet_s=QUIET_S, restarts=0)
        try:
            GroupNetwork(setting, Faults(), seed).run()
        except Exception:  # noqa: BLE001  # whatever a run trips over, it has tripped
            return
    pytest.fail(f"{name}: not caught in {RUNS} runs")
