"""Mutants of the settings that operators change while a job trains."""

from collections.abc import Sequence
from typing import Any

import msgspec

from deploy.simulation.invariants import Promise
from deploy.simulation_kinds import ClusterConfig
from shards import repartition, replica
from shards.admin_requests import AdminRequests, Answer
from shards.messages import CHANGING, ChangeSettings, SettingsInForce
from shards.shard import Shard
from shards.shard_state import SavedProgress
from shards.transition_io import Outgoing
from tests.mutants.patching import Mutants, Patch

MUTANTS = Mutants()


@MUTANTS.add(ClusterConfig.SINGLE, Promise.PROGRESS, seed=93)
def a_raised_bound_opens_nothing(patch: Patch) -> None:
    def dispatch(self: Shard, sender: bytes, message: Any, *rest: Any) -> list[Outgoing]:
        if isinstance(message, ChangeSettings):
            return [Outgoing(sender, *self._admin.answer(sender, message, *rest))]
        return original(self, sender, message, *rest)

    original = Shard._dispatch
    patch.setattr(Shard, "_dispatch", dispatch)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.BOUND)
def a_change_is_answered_before_earlier_pulls(patch: Patch) -> None:
    def handle_together(self: Shard, *arguments: Any) -> list[Outgoing]:
        answers = original(self, *arguments)
        return sorted(answers, key=lambda one: not isinstance(one.message, SettingsInForce))

    original = Shard.handle_together
    patch.setattr(Shard, "handle_together", handle_together)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.SETTINGS, seed=23)
def a_late_change_undoes_a_newer_one(patch: Patch) -> None:
    def change(self: AdminRequests, message: ChangeSettings, now: float) -> Answer:
        answer = original(self, message, now)
        self._part.follow(message.settings)
        return answer

    original = AdminRequests._change_settings
    patch.setattr(AdminRequests, "_change_settings", change)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.SETTINGS)
def a_resharding_forgets_changed_settings(patch: Patch) -> None:
    def merged(states: Sequence[SavedProgress]) -> SavedProgress:
        return msgspec.structs.replace(original(states), settings=None)

    original = repartition._merge
    patch.setattr(repartition, "_merge", merged)


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.SAME_COPY)
def a_change_is_not_replicated(patch: Patch) -> None:
    others = tuple(kind for kind in CHANGING if kind is not ChangeSettings)
    patch.setattr(replica, "CHANGING", others)
