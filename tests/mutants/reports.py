"""Mutants of the reports to a quorum."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from deploy.simulation.invariants import Promise
from deploy.simulation_kinds import ClusterConfig
from shards.dense_part import DensePart
from shards.ledger import Ledger
from shards.messages import Push
from shards.reports import ReportTracker
from shards.updates import Updates
from tests.mutants.patching import Mutants, Patch

MUTANTS = Mutants()


@MUTANTS.add(ClusterConfig.SINGLE, Promise.SERIAL, seed=5)
def a_late_report_is_merged(patch: Patch) -> None:
    def is_late(self: ReportTracker, message: Push) -> bool:
        return message.worker in self.by_table[message.parts[0].table].workers

    patch.setattr(ReportTracker, "is_late", is_late)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.SERIAL, seed=5)
def a_report_weighs_twice(patch: Patch) -> None:
    def record(self: ReportTracker, message: Push, now: float) -> None:
        original(self, message, now)
        reports = self.by_table[message.parts[0].table]
        reports.weight += message.tokens**2 / message.window

    original = ReportTracker.record
    patch.setattr(ReportTracker, "record", record)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.SERIAL, seed=5)
def a_merge_keeps_its_reports(patch: Patch) -> None:
    def take_reports(self: DensePart, weight: float, norms: Any) -> Any:
        sums = self._arrays_by_name()["buffer"].copy()
        average = original(self, weight, norms)
        self._arrays_by_name()["buffer"][:] = sums
        return average

    original = DensePart.take_reports
    patch.setattr(DensePart, "take_reports", take_reports)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.PROGRESS, seed=5)
def a_grace_never_ends(patch: Patch) -> None:
    patch.setattr(ReportTracker, "find_ended", lambda *_: [])


@MUTANTS.add(ClusterConfig.SINGLE, Promise.GRACE, seed=1577)
def a_tick_merges_every_quorum(patch: Patch) -> None:
    def find_ended(self: ReportTracker, active: Any, now: float) -> list[str]:
        ends = self._find_ends(active)
        return list(ends) if any(end <= now for end in ends.values()) else []

    patch.setattr(ReportTracker, "find_ended", find_ended)


@MUTANTS.add(ClusterConfig.LOGGED, Promise.PROGRESS, seed=48)
def a_late_worker_is_waited_for(patch: Patch) -> None:
    patch.setattr(ReportTracker, "sit_out", lambda *_: None)


@MUTANTS.add(ClusterConfig.LOGGED, Promise.RECOVERY, seed=264)
def a_recovered_shard_forgets_open_reports(patch: Patch) -> None:
    def restore_reports(self: Updates, saved: Any) -> None:
        original(self, {})

    original = Updates.restore_reports
    patch.setattr(Updates, "restore_reports", restore_reports)


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.NAMED, seed=401)
def a_repeated_acknowledgement_names_no_dropped_push(patch: Patch) -> None:
    def record(self: Ledger, *args: Any, dropped: bool = False) -> int:
        return original(self, *args)

    original = Ledger.record
    patch.setattr(Ledger, "record", record)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.SERIAL, seed=5)
def a_merge_takes_the_momentum_of_another_version(patch: Patch) -> None:
    """The rule's momentum stays as it was before the merge, though the weights move on."""

    def merge_reports(self: Updates, tables: Iterable[str]) -> None:
        tables = [*tables]
        former = {table: momentum_of(self, table).copy() for table in tables}
        original(self, tables)
        for table, momentum in former.items():
            momentum_of(self, table)[:] = momentum

    def momentum_of(updates: Updates, table: str) -> Any:
        part: Any = updates._parameters.parts[table]
        return part._slots[0] if part.spec.rule.slot_names else np.empty(0)

    original = Updates.merge_reports
    patch.setattr(Updates, "merge_reports", merge_reports)
