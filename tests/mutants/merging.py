"""Mutants of buffers, of rounds with backup workers, and of a limit on staleness."""

from typing import Any

from msgspec.structs import replace

from deploy.simulation.invariants import Promise
from deploy.simulation_kinds import ClusterConfig
from shards.aggregation import StaleLimit
from shards.dense_part import DensePart
from shards.parameters import ParameterStore
from shards.push_checks import Arrived
from shards.shard_state import SavedProgress
from shards.updates import Applied, Updates
from tests.mutants.patching import Mutants, Patch

MUTANTS = Mutants()


@MUTANTS.add(ClusterConfig.SINGLE, Promise.SERIAL)
def a_dropped_push_is_applied(patch: Patch) -> None:
    def drop(self: Updates, one: Arrived, now: float) -> Applied:
        applied = original(self, one, now)
        version = self._parameters.version
        self._parameters.apply([one.gradients], dict.fromkeys(self._parameters.parts, 1.0))
        self._parameters.version = version
        return applied

    original = Updates._drop
    patch.setattr(Updates, "_drop", drop)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.SERIAL)
def a_buffer_keeps_what_it_has_applied(patch: Patch) -> None:
    def take_buffer(self: DensePart, size: int) -> Any:
        kept = self._slots[-1].copy()
        gradient = original(self, size)
        self._slots[-1][:] = kept
        return gradient

    original = DensePart.take_buffer
    patch.setattr(DensePart, "take_buffer", take_buffer)


@MUTANTS.add(ClusterConfig.LOGGED, Promise.RECOVERY, seed=58)
def a_restored_buffer_counts_from_zero(patch: Patch) -> None:
    def restore(self: ParameterStore, saved: SavedProgress, arrays: Any) -> None:
        original(self, replace(saved, buffered=0), arrays)

    original = ParameterStore.restore
    patch.setattr(ParameterStore, "restore", restore)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.PROGRESS, seed=50)
def the_last_worker_leaves_a_buffer_behind(patch: Patch) -> None:
    patch.setattr(Updates, "flush", lambda _: None)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.SERIAL, seed=67)
def a_stale_push_counts_in_full(patch: Patch) -> None:
    patch.setattr(StaleLimit, "factor", lambda *_: 1.0)


@MUTANTS.add(ClusterConfig.LOGGED, Promise.SERIAL, seed=31)
def a_push_at_the_limit_is_dropped(patch: Patch) -> None:
    def drops(self: StaleLimit, staleness: int) -> bool:
        return self.drop and staleness >= self.after

    patch.setattr(StaleLimit, "drops", drops)


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.DURABLE, seed=56)
def a_dropped_push_is_not_recorded(patch: Patch) -> None:
    def drop(self: Updates, one: Arrived, now: float) -> Applied:
        before = self._parameters.version
        return Applied(one, before, before - one.message.read_version, 0.0, True)

    patch.setattr(Updates, "_drop", drop)
