"""Mutants of states in pieces: exports, installs, and what a backup receives."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from deploy.simulation.invariants import Promise
from deploy.simulation_kinds import ClusterConfig
from shards import shard_state
from shards.admin_requests import AdminRequests, Answer
from shards.messages import Piece
from shards.replica import Post, ShardReplica
from shards.shard import Shard
from shards.state_pieces import CutState, GatheredState
from shards.wire_format import Buffer
from tests.mutants.patching import Mutants, Patch

MUTANTS = Mutants()


def _count_arrivals(patch: Patch) -> None:
    def take(self: GatheredState, piece: Piece, frames: Sequence[Buffer]) -> None:
        repeated = piece.number in self._arrived
        real(self, piece, frames)
        if repeated and self.missing:
            self._arrived.add(self.missing[0])

    real = GatheredState.take
    patch.setattr(GatheredState, "take", take)


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.SAME_COPY)
def a_repeated_piece_counts_as_another(patch: Patch) -> None:
    _count_arrivals(patch)


@MUTANTS.add(ClusterConfig.LOGGED, Promise.SERIAL, seed=87)
def a_repeated_piece_counts_as_another_in_an_install(patch: Patch) -> None:
    _count_arrivals(patch)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.EXACTLY_ONCE)
def the_last_piece_is_not_awaited(patch: Patch) -> None:
    def complete(self: GatheredState) -> bool:
        return self._sizes is not None and len(self._arrived) >= max(1, self._sizes.pieces - 1)

    patch.setattr(GatheredState, "complete", property(complete))


@MUTANTS.add(ClusterConfig.SINGLE, Promise.NO_SURPRISE, seed=16)
def an_export_has_pieces_of_two_versions(patch: Patch) -> None:
    """The sizes of the frames differ, since the ledger of the later version is larger."""

    def piece(self: AdminRequests, request: int, of: int, number: int, now: float) -> Answer:
        export = self.exports.find(of, now)
        frames = shard_state.encode(self._part.copy())
        export.cut = CutState(frames, export.cut._sizes.piece_bytes)
        return real(self, request, of, number, now)

    real = AdminRequests._piece
    patch.setattr(AdminRequests, "_piece", piece)


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.SAME_COPY)
def a_backup_receives_pieces_of_two_versions(patch: Patch) -> None:
    """Pushes that come while a state travels are part of its later pieces, and entries too."""

    def send_pieces(self: ShardReplica, sending: Any, now: float) -> list[Post]:
        if sending.arrived and not self.shard.parameters.empty:
            arrays = shard_state.encode(self.shard.copy())[1:]
            for place, array in enumerate(arrays, 2):
                sending.cut._frames[place] = np.asarray(array).view(np.uint8)
        return real(self, sending, now)

    real = ShardReplica._send_pieces
    patch.setattr(ShardReplica, "_send_pieces", send_pieces)


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.SAME_COPY)
def a_new_backup_lacks_the_pieces_of_an_install(patch: Patch) -> None:
    """The bug that the simulation found when a backup came while a state was installed."""
    patch.setattr(Shard, "waiting", lambda self: self.workers.waiting())
