"""Mutants of jobs with several tables, of which a push may leave some out."""

from collections.abc import Sequence
from typing import Any

import msgspec

from deploy.simulation.invariants import Promise
from deploy.simulation_kinds import ClusterConfig
from ps.session import admin_plans
from shards import repartition
from shards.dense_part import DensePart
from shards.parameters import Gradients, ParameterStore
from shards.shard_state import ShardState
from tests.mutants.patching import Mutants, Patch

MUTANTS = Mutants()


@MUTANTS.add(ClusterConfig.SINGLE, Promise.SERIAL)
def a_table_that_is_left_out_keeps_an_older_version(patch: Patch) -> None:
    """The buffer of the next version has what an earlier version left there."""
    patch.setattr(DensePart, "keep", lambda *_: None)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.SERIAL)
def a_push_counts_for_every_table(patch: Patch) -> None:
    """Adam corrects too little in a table that the push has left out."""

    def apply(self: ParameterStore, pushes: Sequence[Gradients], *rest: Any, **how: Any) -> Any:
        squares = real(self, pushes, *rest, **how)
        if squares is not None:
            for push in pushes:
                for name in self.parts.keys() - push.keys():
                    self.parts[name].count += 1
        return squares

    real = ParameterStore.apply
    patch.setattr(ParameterStore, "apply", apply)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.SERIAL, seed=110)
def a_move_forgets_how_often_each_table_was_updated(patch: Patch) -> None:
    def recut(states: Sequence[ShardState], *maps: Any) -> list[ShardState]:
        return [
            msgspec.structs.replace(one, saved=msgspec.structs.replace(one.saved, updates={}))
            for one in real(states, *maps)
        ]

    real = repartition.repartition
    patch.setattr(admin_plans, "repartition", recut)


@MUTANTS.add(ClusterConfig.LOGGED, Promise.SERIAL)
def one_table_of_a_push_is_applied_alone(patch: Patch) -> None:
    def apply(self: ParameterStore, pushes: Sequence[Gradients], *rest: Any, **how: Any) -> Any:
        halved = [dict([next(iter(push.items()))]) if push else push for push in pushes]
        return real(self, halved, *rest, **how)

    real = ParameterStore.apply
    patch.setattr(ParameterStore, "apply", apply)
