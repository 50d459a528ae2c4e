"""Mutants of a shard in memory: its ledger, gate, versions and rounds."""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from deploy.simulation.invariants import Promise
from deploy.simulation_kinds import ClusterConfig
from shards.buffer_pool import Buffers
from shards.gate import Gate
from shards.ledger import Ledger, Verdict
from shards.pull_replies import PullReplies
from shards.updates import Applied, Updates
from tests.mutants.patching import Mutants, Patch

Array = NDArray[np.float32]

MUTANTS = Mutants()


@MUTANTS.add(ClusterConfig.SINGLE, Promise.EXACTLY_ONCE)
def a_repeated_push_is_applied(patch: Patch) -> None:
    def judge(self: Ledger, worker: str, seq: int) -> Verdict:
        real = original(self, worker, seq)
        return Verdict.APPLY if real is Verdict.DUPLICATE else real

    def record(self: Ledger, worker: str, seq: int, *rest: Any, **how: Any) -> int:
        entry = self.entries[worker]
        last, entry.seq = entry.seq, seq - 1
        gap = recorded(self, worker, seq, *rest, **how)
        entry.seq = max(last, seq)
        return gap

    original, recorded = Ledger.judge, Ledger.record
    patch.setattr(Ledger, "judge", judge)
    patch.setattr(Ledger, "record", record)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.BOUND)
def the_gate_opens_a_step_early(patch: Patch) -> None:
    def passes(self: Gate, clock: int, min_clock: int | None) -> bool:
        return original(self, clock - 1, min_clock)

    original = Gate.passes
    patch.setattr(Gate, "passes", passes)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.VERSIONS)
def a_pull_reports_an_older_version(patch: Patch) -> None:
    def pull(self: PullReplies, *arguments: Any) -> Any:
        weights, frames = original(self, *arguments)
        lower = weights.version - (weights.version % 3 == 2) * 2
        return msgspec.structs.replace(weights, version=max(0, lower)), frames

    original = PullReplies.pull
    patch.setattr(PullReplies, "pull", pull)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.UNTORN)
def a_version_is_overwritten_while_it_is_sent(patch: Patch) -> None:
    def take(self: Buffers) -> Array:
        while len(self) < 2:
            self._all.append(np.zeros(self.size, np.float32))
        self._all.reverse()
        return self._all[0]

    patch.setattr(Buffers, "take", take)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.PROGRESS)
def a_round_waits_for_every_registered_worker(patch: Patch) -> None:
    """The first bug that the simulation found: see the tests of rounds in test_shard.py."""

    def close(self: Updates, *rest: Any) -> list[Applied]:
        present = all(worker in self.round for worker in self._ledger.active)
        return original(self, *rest) if present else []

    original = Updates.close_rounds
    patch.setattr(Updates, "close_rounds", close)
