"""Bugs of slots, the state of an update rule besides the weights, wherever it is copied."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from deploy.simulation.config import ClusterConfig
from deploy.simulation.mutants import Bugs, Patch
from ps.session import admin_plans
from shards import parameters, repartition, wal_format
from shards.parameters import ParameterStore, ShardState
from shards.shard import Shard
from shards.tables import SHARD_ALIGNMENT
from shards.worker_requests import WorkerRequests

SINGLE = Bugs(ClusterConfig.SINGLE)
LOGGED = Bugs(ClusterConfig.LOGGED)
REPLICATED = Bugs(ClusterConfig.REPLICATED)

Slots = dict[str, NDArray[np.float32]]


def _zeros(slots: Slots) -> Slots:
    return {name: np.zeros_like(slot) for name, slot in slots.items()}


def _restart_count(patch: Patch) -> None:
    """Make the first update of a restored state count as update 1."""

    def restore(self: ParameterStore, version: int, *arrays: Any) -> None:
        restored(self, version, *arrays)
        vars(self)["given"] = version

    def apply(self: ParameterStore, *update: Any) -> None:
        version, self.version = self.version, self.version - vars(self)["given"]
        applied(self, *update)
        self.version = version + 1

    restored, applied = ParameterStore.restore, ParameterStore.apply
    patch.setattr(ParameterStore, "restore", restore)
    patch.setattr(ParameterStore, "apply", apply)


def _moved_with(patch: Patch, changed: Any) -> None:
    """Change the slots of a job's state when it is repartitioned."""

    def recut(states: Sequence[ShardState], *maps: Any) -> list[ShardState]:
        return [
            msgspec.structs.replace(one, slots=changed(one.slots)) for one in real(states, *maps)
        ]

    real = repartition.repartition
    patch.setattr(admin_plans, "repartition", recut)


@SINGLE.add
def a_move_leaves_slots_behind(patch: Patch) -> None:
    _moved_with(patch, _zeros)


@SINGLE.add
def a_move_gives_each_shard_the_slots_of_its_neighbour(patch: Patch) -> None:
    def shifted(slots: Slots) -> Slots:
        return {name: np.roll(slot, SHARD_ALIGNMENT) for name, slot in slots.items()}

    _moved_with(patch, shifted)


@SINGLE.add
def a_snapshot_has_each_slot_under_the_name_of_another(patch: Patch) -> None:
    def copy(self: ParameterStore) -> tuple[NDArray[np.float32], Slots]:
        weights, slots = real(self)
        return weights, dict(zip(slots, reversed(slots.values()), strict=True))

    real = ParameterStore.copy
    patch.setattr(ParameterStore, "copy", copy)


@SINGLE.add
def a_duplicate_advances_the_slots(patch: Patch) -> None:
    """The weights stay the same, as if its update had been undone."""

    def examine(self: WorkerRequests, sender: bytes, message: Any, frames: Any, *rest: Any) -> Any:
        entry, held = self._ledger.entries.get(message.worker), self._held
        again = entry is not None and message.seq <= entry.seq and not self._updates.round
        answers = real(self, sender, message, frames, *rest)
        if again and frames and not held.empty:
            weights, version = held.weights(), held.version
            held.apply(np.frombuffer(frames[0], np.float32), 1.0)
            held._become(version, weights)
        return answers

    real = WorkerRequests.examine
    patch.setattr(WorkerRequests, "examine", examine)


@SINGLE.add
def a_state_that_is_put_back_counts_its_updates_anew(patch: Patch) -> None:
    """Adam corrects again for a start at zero, which was long ago."""
    _restart_count(patch)


@LOGGED.add
def a_replayed_log_counts_its_updates_anew(patch: Patch) -> None:
    _restart_count(patch)


@LOGGED.add
def a_base_holds_no_slots(patch: Patch) -> None:
    def state_of(shard: Shard, number: int) -> Any:
        state, (saved, weights, *slots) = real(shard, number)
        return state, (saved, weights, *map(np.zeros_like, slots))

    real = wal_format.state_of
    patch.setattr(wal_format, "state_of", state_of)


@LOGGED.add
def slots_change_while_a_base_is_written(patch: Patch) -> None:
    patch.setattr(parameters, "unshared", lambda _: True)


@REPLICATED.add
def slots_change_on_their_way_to_a_new_backup(patch: Patch) -> None:
    patch.setattr(parameters, "unshared", lambda _: True)


@REPLICATED.add
def a_new_backup_begins_without_slots(patch: Patch) -> None:
    def restore(self: Shard, saved: Any, weights: Any, slots: Slots) -> None:
        real(self, saved, weights, _zeros(slots) if saved.version else slots)

    real = Shard.restore
    patch.setattr(Shard, "restore", restore)


@REPLICATED.add
def slots_that_are_read_go_on_where_they_were_read_before(patch: Patch) -> None:
    """Updates continue in the second set of arrays, as its last reader left it."""

    def move(self: ParameterStore) -> None:
        self._spare = self._spare or [np.zeros_like(slot) for slot in self._slots]
        self._slots, self._spare = self._spare, self._slots

    patch.setattr(ParameterStore, "_move_slots", move)


def all_bugs() -> Sequence[Bugs]:
    """The bugs of each kind of cluster."""
    return SINGLE, LOGGED, REPLICATED
