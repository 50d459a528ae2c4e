"""Mutants of slots, the state of an update rule besides the weights, wherever it is copied."""

from typing import Any

import numpy as np
from msgspec.structs import replace

from deploy.simulation.invariants import Promise
from deploy.simulation_kinds import ClusterConfig
from shards import dense_part, push_checks, shard_state, wal_format
from shards.shard import Shard
from shards.shard_state import WEIGHTS
from shards.worker_requests import WorkerRequests
from tests.mutants.patching import Mutants, Patch

MUTANTS = Mutants()


@MUTANTS.add(ClusterConfig.SINGLE, Promise.SERIAL)
def a_repeated_push_advances_the_slots(patch: Patch) -> None:
    """The weights stay the same, as if its update had been undone."""

    def examine(self: WorkerRequests, sender: bytes, message: Any, frames: Any, *rest: Any) -> Any:
        entry, parameters = self._ledger.entries.get(message.worker), self._parameters
        again = entry is not None and message.seq <= entry.seq and not self._updates.round
        answers = real(self, sender, message, frames, *rest)
        if again and frames and not parameters.empty:
            weights, version = parameters.weights(), parameters.version
            arrived = push_checks.examine(sender, message, frames, parameters, 0)
            parameters.apply([arrived.gradients], dict.fromkeys(parameters.parts, 1.0))
            parameters._become(version, weights)
        return answers

    real = WorkerRequests.examine
    patch.setattr(WorkerRequests, "examine", examine)


@MUTANTS.add(ClusterConfig.LOGGED, Promise.RECOVERY, seed=58)
def a_base_lacks_the_slots(patch: Patch) -> None:
    def state_of(shard: Shard, number: int) -> Any:
        copy = shard.copy()
        arrays = {
            name: array if name.endswith(f"/{WEIGHTS}") else np.zeros_like(array)
            for name, array in copy.arrays.items()
        }
        return real(shard, number)[0], shard_state.encode(replace(copy, arrays=arrays))

    real = wal_format.state_of
    patch.setattr(wal_format, "state_of", state_of)


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.SAME_COPY)
def slots_change_while_a_backup_copies_them(patch: Patch) -> None:
    patch.setattr(dense_part, "are_unshared", lambda _: True)
