"""Mutants of shards with logs: what is written, when it is flushed, and how it is read."""

from collections import Counter
from typing import Any

from deploy.simulation.invariants import Promise
from deploy.simulation_kinds import ClusterConfig
from ps.wal import recovery
from ps.wal.writer import WriteAheadLog
from shards import wal_format
from shards.shard import Shard
from shards.wal_format import LoggedState
from tests.mutants.patching import Mutants, Patch

MUTANTS = Mutants()


@MUTANTS.add(ClusterConfig.LOGGED, Promise.RECOVERY)
def a_turn_is_not_flushed(patch: Patch) -> None:
    def append(self: WriteAheadLog, *record: Any) -> None:
        synced, self._synced = self._synced, False
        original(self, *record)
        self._synced = synced

    original = WriteAheadLog.append
    patch.setattr(WriteAheadLog, "append", append)


@MUTANTS.add(ClusterConfig.LOGGED, Promise.RECOVERY, seed=410)
def records_have_no_checksum(patch: Patch) -> None:
    patch.setattr(wal_format, "_check", lambda *_: 0)


@MUTANTS.add(ClusterConfig.LOGGED, Promise.RECOVERY)
def a_replayed_tail_is_not_flushed(patch: Patch) -> None:
    """The bug that the simulation found when a process died between a write and its flush."""

    def cut(self: WriteAheadLog, name: str, size: int) -> None:
        if size < self._disk.size(name):
            original(self, name, size)

    original = WriteAheadLog._cut
    patch.setattr(WriteAheadLog, "_cut", cut)


@MUTANTS.add(ClusterConfig.LOGGED, Promise.RECOVERY)
def a_duplicate_hides_the_push_of_its_turn(patch: Patch) -> None:
    """The log relied on servers that pass on one copy of each request."""

    class Once(Counter[Any]):
        def __getitem__(self, _: Any) -> int:
            return 1

    patch.setattr(wal_format, "Counter", Once)


@MUTANTS.add(ClusterConfig.LOGGED, Promise.NO_SURPRISE)
def a_base_is_newer_than_the_start_of_its_log(patch: Patch) -> None:
    """The base describes the state when it is written, not when its log was started."""

    def shorten(self: WriteAheadLog, shard: Shard, now: float) -> None:
        vars(self)["shard"] = shard
        original(self, shard, now)

    def save(self: WriteAheadLog, state: LoggedState, _: Any) -> None:
        later, frames = wal_format.state_of(vars(self)["shard"], state.number)
        real(self, later, frames)

    original, real = WriteAheadLog.shorten, WriteAheadLog._save
    patch.setattr(WriteAheadLog, "shorten", shorten)
    patch.setattr(WriteAheadLog, "_save", save)


@MUTANTS.add(ClusterConfig.LOGGED, Promise.RECOVERY)
def a_truncated_log_is_accepted(patch: Patch) -> None:
    """A truncated log is taken for one that ends there."""
    patch.setattr(recovery, "mark_in", lambda _: None)
