"""Mutants of buffers, and of rounds with backup workers."""

from typing import Any

from deploy.simulation.invariants import Promise
from deploy.simulation_kinds import ClusterConfig
from shards.parameters import ParameterStore
from shards.pushes import Arrived
from shards.updates import Applied, Updates
from tests.mutants.patching import Mutants, Patch

MUTANTS = Mutants()


@MUTANTS.add(ClusterConfig.SINGLE, Promise.SERIAL)
def a_dropped_push_is_applied(patch: Patch) -> None:
    def drop(self: Updates, one: Arrived, now: float) -> Applied:
        applied = original(self, one, now)
        version = self._held.version
        self._held.apply(one.gradient, 1.0)
        self._held.version = version
        return applied

    original = Updates._drop
    patch.setattr(Updates, "_drop", drop)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.SERIAL)
def a_buffer_keeps_what_it_has_applied(patch: Patch) -> None:
    def apply_buffer(self: ParameterStore, size: int, rate: float) -> None:
        kept = self._slots[-1].copy()
        original(self, size, rate)
        self._slots[-1][:] = kept

    original = ParameterStore.apply_buffer
    patch.setattr(ParameterStore, "apply_buffer", apply_buffer)


@MUTANTS.add(ClusterConfig.LOGGED, Promise.RECOVERY)
def a_restored_buffer_counts_from_zero(patch: Patch) -> None:
    def restore(self: ParameterStore, version: int, weights: Any, slots: Any, *_: Any) -> None:
        original(self, version, weights, slots)

    original = ParameterStore.restore
    patch.setattr(ParameterStore, "restore", restore)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.BOUNDED)
def the_last_worker_leaves_a_buffer_behind(patch: Patch) -> None:
    patch.setattr(Updates, "flush", lambda _: None)
