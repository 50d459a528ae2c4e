"""Bugs of slots, the state of an update rule besides the weights, wherever it is copied."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from deploy.simulation.config import ClusterConfig
from deploy.simulation.mutants import Bugs, Patch
from ps.session import admin_plans
from shards import dense_part, pushes, repartition, shard_state, wal_format
from shards.dense_part import DensePart
from shards.shard import Shard
from shards.shard_state import WEIGHTS, Arrays, ShardState
from shards.tables import SHARD_ALIGNMENT
from shards.worker_requests import WorkerRequests

SINGLE = Bugs(ClusterConfig.SINGLE)
LOGGED = Bugs(ClusterConfig.LOGGED)
REPLICATED = Bugs(ClusterConfig.REPLICATED)


def _is_slot(name: str) -> bool:
    return not name.endswith(f"/{WEIGHTS}")


def _zeros(arrays: Arrays) -> Arrays:
    """The same arrays with zeros in the slots."""
    return {n: np.zeros_like(one) if _is_slot(n) else one for n, one in arrays.items()}


def _restart_count(patch: Patch) -> None:
    """Make the first update of a restored state count as update 1."""

    def restore(self: DensePart, arrays: Arrays, _: int, out: Any) -> None:
        restored(self, arrays, 0, out)

    restored = DensePart.restore
    patch.setattr(DensePart, "restore", restore)


def _moved_with(patch: Patch, changed: Any) -> None:
    """Change the slots of a job's state when it is repartitioned."""

    def recut(states: Sequence[ShardState], *maps: Any) -> list[ShardState]:
        return [
            msgspec.structs.replace(one, arrays=changed(one.arrays)) for one in real(states, *maps)
        ]

    real = repartition.repartition
    patch.setattr(admin_plans, "repartition", recut)


@SINGLE.add
def a_move_leaves_slots_behind(patch: Patch) -> None:
    _moved_with(patch, _zeros)


@SINGLE.add
def a_move_gives_each_shard_the_slots_of_its_neighbour(patch: Patch) -> None:
    def shifted(arrays: Arrays) -> Arrays:
        return {
            name: np.roll(array, SHARD_ALIGNMENT) if _is_slot(name) else array
            for name, array in arrays.items()
        }

    _moved_with(patch, shifted)


@SINGLE.add
def a_snapshot_has_each_slot_under_the_name_of_another(patch: Patch) -> None:
    def export(self: DensePart, weights: Any) -> Arrays:
        own, *slots = real(self, weights).items()
        names, arrays = [name for name, _ in slots], [array for _, array in slots]
        return dict([own, *zip(names, reversed(arrays), strict=True)])

    real = DensePart.export
    patch.setattr(DensePart, "export", export)


@SINGLE.add
def a_duplicate_advances_the_slots(patch: Patch) -> None:
    """The weights stay the same, as if its update had been undone."""

    def examine(self: WorkerRequests, sender: bytes, message: Any, frames: Any, *rest: Any) -> Any:
        entry, held = self._ledger.entries.get(message.worker), self._held
        again = entry is not None and message.seq <= entry.seq and not self._updates.round
        answers = real(self, sender, message, frames, *rest)
        if again and frames and not held.empty:
            weights, version = held.weights(), held.version
            arrived = pushes.examine(sender, message, frames, held, 0)
            held.apply([arrived.gradients], dict.fromkeys(held.parts, 1.0))
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
        state, _ = real(shard, number)
        copy = shard.copy()
        return state, shard_state.encode(msgspec.structs.replace(copy, arrays=_zeros(copy.arrays)))

    real = wal_format.state_of
    patch.setattr(wal_format, "state_of", state_of)


@LOGGED.add
def slots_change_while_a_base_is_written(patch: Patch) -> None:
    patch.setattr(dense_part, "unshared", lambda _: True)


@REPLICATED.add
def slots_change_on_their_way_to_a_new_backup(patch: Patch) -> None:
    patch.setattr(dense_part, "unshared", lambda _: True)


@REPLICATED.add
def a_new_backup_begins_without_slots(patch: Patch) -> None:
    def restore(self: Shard, state: ShardState) -> None:
        arrays = _zeros(state.arrays) if state.saved.version else state.arrays
        real(self, msgspec.structs.replace(state, arrays=arrays))

    real = Shard.restore
    patch.setattr(Shard, "restore", restore)


@REPLICATED.add
def slots_that_are_read_go_on_where_they_were_read_before(patch: Patch) -> None:
    """Updates continue in the second set of arrays, as its last reader left it."""

    def move(self: DensePart) -> None:
        self._spare = self._spare or [np.zeros_like(slot) for slot in self._slots]
        self._slots, self._spare = self._spare, self._slots

    patch.setattr(DensePart, "_move_slots", move)


def all_bugs() -> Sequence[Bugs]:
    """The bugs of each kind of cluster."""
    return SINGLE, LOGGED, REPLICATED
