"""Mutants of jobs with rows by id, alone or with dense tables in one push."""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
from msgspec import structs

from cupy_kernels.ops import rows
from deploy.simulation.invariants import Promise
from deploy.simulation_kinds import ClusterConfig
from ps.session.payload_encoder import PayloadEncoder
from shards import repartition, row_codecs
from shards.parameters import Gradients, ParameterStore
from shards.row_frames import RowGradient
from shards.shard_state import IDS, META, Arrays
from shards.sparse_part import SparsePart
from shards.tables import KeyRange
from tests.mutants.patching import Mutants, Patch

MUTANTS = Mutants()


@MUTANTS.add(ClusterConfig.SINGLE, Promise.SERIAL)
def a_row_is_born_twice(patch: Patch) -> None:
    """A push gives a row that is stored its first values again."""

    def slots_for(self: SparsePart, ids: Any) -> Any:
        slots = real(self, ids)
        first = self.table.init.make_rows(ids[:1], self.table.dim, self.table.seed)
        self._slab[slots[:1], : self.table.dim] = first
        return slots

    real = SparsePart._slots_for
    patch.setattr(SparsePart, "_slots_for", slots_for)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.SERIAL)
def a_pull_stores_rows(patch: Patch) -> None:
    """A pull of an id that nobody has pushed stores its row."""

    def read(self: SparsePart, weights: Any, version: int, ask: Any, frames: Any, who: Any) -> Any:
        self._slots_for(np.frombuffer(frames[0], np.uint64))
        return real(self, weights, version, ask, frames, who)

    real = SparsePart.read
    patch.setattr(SparsePart, "read", read)


@MUTANTS.add(ClusterConfig.LOGGED, Promise.SERIAL)
def a_row_and_its_slot_are_of_two_versions(patch: Patch) -> None:
    """A state has the rows of the present version, and their meta from before the last push."""

    def apply_rows(self: SparsePart, gradient: RowGradient, rate: float) -> None:
        slots = self._index.find(gradient.ids)
        self.__dict__["_former"] = gradient.ids[slots >= 0], self._meta[slots[slots >= 0]]
        real_apply(self, gradient, rate)

    def export(self: SparsePart, *of: Any) -> Arrays:
        arrays = real_export(self, *of)
        ids, meta = self.__dict__.get("_former", ((), ()))
        for number, row in zip(ids, meta, strict=True):
            arrays[META][arrays[IDS] == number] = row
        return arrays

    real_apply, real_export = SparsePart._apply_rows, SparsePart.export
    patch.setattr(SparsePart, "_apply_rows", apply_rows)
    patch.setattr(SparsePart, "export", export)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.SERIAL)
def a_dense_table_is_applied_without_its_rows(patch: Patch) -> None:
    """Of a push of both kinds of tables the shard applies the dense ones alone."""

    def apply(self: ParameterStore, pushes: Sequence[Gradients], *rest: Any, **how: Any) -> Any:
        halved = [drop_rows(push) for push in pushes]
        return real(self, halved, *rest, **how)

    def drop_rows(push: Gradients) -> Gradients:
        dense = {name: one for name, one in push.items() if not isinstance(one, RowGradient)}
        return dense or push

    real = ParameterStore.apply
    patch.setattr(ParameterStore, "apply", apply)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.SERIAL)
def one_half_of_a_split_push_counts_twice(patch: Patch) -> None:
    """Of a push to several shards, the rows of the first shard are sent twice as large."""

    def encode(self: PayloadEncoder, gradients: Any, rows: Any, *rest: Any, **how: Any) -> Any:
        written = real(self, gradients, rows, *rest, **how)
        parts, frames = written[0]
        is_split = len(written) > 1 and parts and parts[-1].table in self._sparse
        if is_split and frames[-1].dtype == np.float32:  # rounded ones have a form of their own
            written[0] = parts, (*frames[:-1], frames[-1] * np.float32(2))
        return written

    real = PayloadEncoder._encode
    patch.setattr(PayloadEncoder, "_encode", encode)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.SERIAL, seed=88)
def a_move_loses_a_row(patch: Patch) -> None:
    """A reshard leaves out the last row of each range of buckets."""

    def cut(joined: Mapping[str, Arrays], buckets: KeyRange) -> Arrays:
        return {name: array[:-1] for name, array in real(joined, buckets).items()}

    real = repartition._cut_rows
    patch.setattr(repartition, "_cut_rows", cut)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.SERIAL, seed=27)
def a_mean_leaves_out_pushes_without_the_row(patch: Patch) -> None:
    """The mean of a round divides by the pushes with rows, and not by all of them."""

    def mean(self: SparsePart, gradients: Sequence[RowGradient], pushes: int) -> RowGradient:
        return real(self, gradients, len(gradients))

    real = SparsePart.mean
    patch.setattr(SparsePart, "mean", mean)


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.SERIAL)
def first_values_differ_between_copies(patch: Patch) -> None:
    """A copy of a shard draws first values from a seed of its own."""

    def begin(self: SparsePart, *of: Any) -> None:
        real(self, *of)
        self.table = structs.replace(self.table, seed=next(seeds))

    seeds = count(1000)
    real = SparsePart.__init__
    patch.setattr(SparsePart, "__init__", begin)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.SERIAL)
def rows_take_the_scale_of_the_first(patch: Patch) -> None:
    """A shard decodes all int8 rows of a push by the scale of the first."""

    def dequantise_rows(codes: Any, scales: Any, into: Any) -> None:
        real(codes, np.full_like(scales, scales[:1].sum()), into)

    real = rows.dequantise_rows
    patch.setattr(row_codecs, "dequantise_rows", dequantise_rows)
