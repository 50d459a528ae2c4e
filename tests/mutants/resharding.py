"""Mutants of resharding: the quiesce, the repartitioned state, and how workers follow."""

from collections.abc import Iterable
from typing import Any

import msgspec

from deploy.simulation.invariants import Promise
from deploy.simulation_kinds import ClusterConfig
from ps.session import admin_plans
from ps.session.admin_plans import Plan, Side
from ps.session.events import Send
from ps.session.session import Session
from shards import repartition, wire_format
from shards.admin_requests import AdminRequests, Answer
from shards.ledger import Ledger, LedgerEntry
from shards.messages import HandOver, Push
from shards.quiesce import QuiesceTracker
from shards.replica import Effects, ShardReplica
from shards.reshard_state import ReshardState
from shards.shard import Shard
from shards.shard_part import ShardPart
from shards.updates import Updates
from shards.worker_requests import WorkerRequests
from tests.mutants.patching import Mutants, Patch

MUTANTS = Mutants()


@MUTANTS.add(ClusterConfig.SINGLE, Promise.ONE_CUT, seed=140)
def a_cut_ignores_pushes_that_other_shards_have(patch: Patch) -> None:
    patch.setattr(Ledger, "short_of", lambda *_: False)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.DURABLE)
def a_ledger_is_not_handed_over(patch: Patch) -> None:
    patch.setattr(repartition, "_copy_ledger", lambda _: Ledger())


@MUTANTS.add(ClusterConfig.SINGLE, Promise.EXACTLY_ONCE)
def a_hand_over_skips_the_last_check(patch: Patch) -> None:
    """A worker with an expired lease returns, with a push that the successors do not have."""

    def hand_over(side: Side, successors: bytes, cuts: Any, _: Any) -> Plan[None]:
        for shard in side.shards:
            yield admin_plans.hold(side, admin_plans.HAND_OVER_S, cuts[shard], (shard,))
        for shard in side.shards:
            yield admin_plans.hand_over_request(side, shard, successors)

    patch.setattr(admin_plans, "hand_over", hand_over)


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.SERIAL)
def uneven_buffers_are_handed_over(patch: Patch) -> None:
    """New shards count the pushes of a buffer that one old shard has, and others have applied."""
    patch.setattr(admin_plans, "evenly_buffered", lambda _: True)


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.BOUNDED)
def a_worker_leaves_a_quiesced_shard(patch: Patch) -> None:
    """The new shards count it still, so nobody has their buffer applied."""
    patch.setattr(QuiesceTracker, "check_leave", lambda *_: None)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.ONE_CUT)
def an_operator_ends_the_quiesce_of_another(patch: Patch) -> None:
    """Shards resume, although the operator that quiesced them relies on their cut."""
    patch.setattr(QuiesceTracker, "busy_s", lambda *_: 0.0)


@MUTANTS.add(ClusterConfig.LOGGED, Promise.ONE_CUT)
def a_late_request_changes_a_quiesce(patch: Patch) -> None:
    """A repeated resume, sent before the quiesce that is in force, ends it."""
    patch.setattr(QuiesceTracker, "is_late", lambda *_: False)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.EXACTLY_ONCE)
def a_retired_shard_is_handed_over_again(patch: Patch) -> None:
    """The bug that the simulation found when two operators resharded a job at the same time.

    A quiesce had no owner then, so a shard was quiesced for both.
    """
    an_operator_ends_the_quiesce_of_another(patch)
    patch.setattr(QuiesceTracker, "is_owned", lambda self, _, now: self.is_active(now))

    def hand_over(self: ReshardState, successors: bytes, owner: int, now: float) -> None:
        if self.moved_to is not None:
            self.moved_to = successors
        original(self, successors, owner, now)

    original = ReshardState.hand_over
    patch.setattr(ReshardState, "hand_over", hand_over)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.NO_SURPRISE)
def a_shard_redirects_to_a_truncated_address(patch: Patch) -> None:
    def hand_over(self: AdminRequests, order: Any, frames: Any, now: float) -> Answer:
        order = msgspec.structs.replace(order, size=len(bytes(frames[0])))
        return original(self, order, frames, now)

    original = AdminRequests._hand_over
    patch.setattr(AdminRequests, "_hand_over", hand_over)


@MUTANTS.add(ClusterConfig.LOGGED, Promise.EXACTLY_ONCE)
def a_retired_shard_closes_its_round(patch: Patch) -> None:
    """The bug that the simulation found when leases expired at shards that were handed over."""

    def redirect_waiting(self: WorkerRequests) -> None:
        waiting = dict(self._updates.round)
        original(self)
        self._updates.round = waiting

    def close(self: Updates, now: float, _: QuiesceTracker) -> Any:
        return closed(self, now, QuiesceTracker())

    original, closed = WorkerRequests.redirect_waiting, Updates.close_rounds
    patch.setattr(WorkerRequests, "redirect_waiting", redirect_waiting)
    patch.setattr(Updates, "close_rounds", close)


def _forget_the_quiesce(patch: Patch) -> None:
    def take_over(self: Shard, now: float) -> None:
        original(self, now)
        self.reshard.quiesce = QuiesceTracker()

    original = Shard.take_over
    patch.setattr(Shard, "take_over", take_over)


@MUTANTS.add(ClusterConfig.LOGGED, Promise.NO_SURPRISE)
def a_recovered_shard_forgets_its_quiesce(patch: Patch) -> None:
    """Pushes that it applies after the operator's last check are left behind."""
    _forget_the_quiesce(patch)


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.NO_SURPRISE)
def a_promoted_copy_forgets_its_quiesce(patch: Patch) -> None:
    _forget_the_quiesce(patch)


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.NO_SURPRISE)
def a_promoted_copy_refuses_a_repeated_install(patch: Patch) -> None:
    """The operator repeats an unanswered request, and the copy refuses it as already in use."""
    patch.setattr(ShardPart, "is_at", lambda *_: False)


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.DURABLE)
def the_newest_incarnation_hides_the_furthest_push(patch: Patch) -> None:
    """A push that another shard has from the earlier incarnation is applied there twice."""

    def furthest(entries: Iterable[LedgerEntry]) -> LedgerEntry:
        return max(entries, key=lambda entry: (entry.incarnation, entry.seq))

    patch.setattr(repartition, "_furthest", furthest)


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.FINAL)
def a_hand_over_is_answered_before_the_backup_has_it(patch: Patch) -> None:
    """The operator believes that it is durable, but a promoted copy continues to serve."""

    def handle(self: ShardReplica, sender: bytes, message: Any, frames: Any, now: float) -> Effects:
        if not self.serving or not isinstance(message, HandOver):
            return original(self, sender, message, frames, now)
        answers = self.shard.handle(sender, message, frames, now)
        posts = self._log(now, (wire_format.encode(message), *frames), []).posts
        return Effects(answers, posts)

    original = ShardReplica.handle
    patch.setattr(ShardReplica, "handle", handle)


@MUTANTS.add(ClusterConfig.REPLICATED, Promise.BOUND)
def a_redirected_worker_forgets_its_clock(patch: Patch) -> None:
    """It continues from the clock of its last applied push, not from that of its last push."""

    def follow(self: Session, former: Session, now: float) -> list[Send]:
        pending = {m.seq for _, m, _ in former.outstanding() if isinstance(m, Push)}
        former._registration.reached -= len(pending)
        return original(self, former, now)

    original = Session.follow
    patch.setattr(Session, "follow", follow)
