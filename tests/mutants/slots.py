"""Mutants of slots, the state of an update rule besides the weights, wherever it is copied."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deploy.simulation.invariants import Promise
from deploy.simulation_kinds import ClusterConfig
from shards import parameters, wal_format
from shards.shard import Shard
from shards.worker_requests import WorkerRequests
from tests.mutants.patching import Mutants, Patch

Slots = dict[str, NDArray[np.float32]]

MUTANTS = Mutants()


@MUTANTS.add(ClusterConfig.SINGLE, Promise.SERIAL)
def a_repeated_push_advances_the_slots(patch: Patch) -> None:
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


@MUTANTS.add(ClusterConfig.LOGGED, Promise.RECOVERY)
def a_base_lacks_the_slots(patch: Patch) -> None:
    def state_of(shard: Shard, number: int) -> Any:
        state, (saved, weights, *slots) = real(shard, number)
        return state, (saved, weights, *map(np.zeros_like, slots))

    real = wal_format.state_of
    patch.setattr(wal_format, "state_of", state_of)


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.SAME_COPY)
def slots_change_while_a_backup_copies_them(patch: Patch) -> None:
    patch.setattr(parameters, "unshared", lambda _: True)
