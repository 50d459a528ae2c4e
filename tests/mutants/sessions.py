"""Mutants of a worker's session: its messages, their retransmission and its clock."""

from typing import Any

import msgspec

from deploy.simulation.invariants import Promise
from deploy.simulation_kinds import ClusterConfig
from ps.session.events import Send
from ps.session.membership import AppliedAtShard, Membership
from ps.session.retransmit import RetransmitTable
from ps.session.session import Session
from shards.ledger import Ledger
from shards.messages import Joined, Pull, Refusal, Remedy
from tests.mutants.patching import Mutants, Patch

MUTANTS = Mutants()


@MUTANTS.add(ClusterConfig.SINGLE, Promise.PROGRESS)
def lost_messages_are_not_sent_again(patch: Patch) -> None:
    patch.setattr(Session, "tick", lambda *_: [])


@MUTANTS.add(ClusterConfig.SINGLE, Promise.PROGRESS)
def a_refused_renewal_is_ignored(patch: Patch) -> None:
    """A worker without pending requests at a rolled-back shard never learns to greet it again."""

    def unasked(self: Session, shard: int, reply: Refusal, now: float) -> list[Send]:
        return [] if reply.remedy is Remedy.RESYNCHRONISE else original(self, shard, reply, now)

    original = Session._on_unasked_refusal
    patch.setattr(Session, "_on_unasked_refusal", unasked)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.BOUND)
def a_worker_ignores_the_clocks_of_other_shards(patch: Patch) -> None:
    """Another shard may admit it at a later clock, and serves reads as if it had reached that."""

    def on_joined(self: Membership, shard: int, reply: Joined, now: float) -> Any:
        known = reply.clock if shard == 0 else self._admission
        return first(self, shard, msgspec.structs.replace(reply, clock=known), now)

    def on_rejoined(self: Membership, shard: int, reply: Joined, now: float) -> Any:
        known = reply.clock if shard == 0 else self.reached
        return again(self, shard, msgspec.structs.replace(reply, clock=known), now)

    first, again = Membership.on_joined, Membership.on_rejoined
    patch.setattr(Membership, "on_joined", on_joined)
    patch.setattr(Membership, "on_rejoined", on_rejoined)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.BOUND)
def a_pull_repeated_after_resharding_counts_as_read(patch: Patch) -> None:
    """Shards raise the worker's clock, and it then makes a step that they believe was made."""
    patch.setattr(Membership, "reads_at", lambda *_: None)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.EXACTLY_ONCE)
def a_new_incarnation_does_not_look_for_lost_pushes(patch: Patch) -> None:
    """A shard that lacks pushes which all shards had acknowledged is treated as merely behind."""
    patch.setattr(Membership, "_check_losses", lambda _: None)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.ONE_PUSH)
def a_new_incarnation_begins_after_the_smallest_push(patch: Patch) -> None:
    """Shards that have more take its first pushes for repetitions of its predecessor's."""

    def record(self: Membership, shard: int, reported: AppliedAtShard) -> None:
        original(self, shard, reported)
        welcomes = self._welcomes.values()
        self._begin = min(AppliedAtShard(one.seq, one.step, 0) for one in welcomes)

    original = Membership._record_report
    patch.setattr(Membership, "_record_report", record)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.PROGRESS, seed=15)
def a_shard_waits_for_the_pushes_of_a_dead_incarnation(patch: Patch) -> None:
    """The next incarnation begins after them, and the shard refuses its pushes for the gap."""
    patch.setattr(Ledger, "skip_to", lambda *_: 0)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.BOUNDED)
def answered_pulls_are_kept(patch: Patch) -> None:
    def remove(self: RetransmitTable, shard: int, request: int) -> None:
        if not isinstance(self._pending[shard][request].message, Pull):
            original(self, shard, request)

    original = RetransmitTable.remove
    patch.setattr(RetransmitTable, "remove", remove)
