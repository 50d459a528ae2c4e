"""Bugs of resharding: the quiesce, the repartitioned state, and how workers follow."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from deploy.simulation.config import ClusterConfig
from deploy.simulation.mutants import Bugs, Patch
from ps.session import admin_plans, reshard_client
from ps.session.admin_plans import Plan, Side
from ps.session.events import Send
from ps.session.membership import Membership
from ps.session.session import Session
from shards import repartition, replica, wire_format
from shards.admin_requests import AdminRequests, Answer
from shards.ledger import Ledger, LedgerEntry
from shards.messages import CHANGING, HandOver, Push, Quiesce
from shards.quiesce import QuiesceTracker
from shards.replica import Effects, ShardReplica
from shards.reshard_state import ReshardProgress, ReshardState
from shards.shard import Shard
from shards.shard_part import ShardPart
from shards.updates import Updates
from shards.worker_requests import WorkerRequests

BUGS = Bugs(ClusterConfig.SINGLE)
LOGGED = Bugs(ClusterConfig.LOGGED)
COMPRESSED = Bugs(ClusterConfig.COMPRESSED)
REPLICATED = Bugs(ClusterConfig.REPLICATED)


@BUGS.add
def a_retired_shard_is_retired_elsewhere(patch: Patch) -> None:
    """The bug that the simulation found when two operators resharded a job at the same time."""

    def hand_over(self: ReshardState, successors: bytes, now: float) -> None:
        if self.moved_to is not None:
            self.moved_to = successors
        original(self, successors, now)

    original = ReshardState.hand_over
    patch.setattr(ReshardState, "hand_over", hand_over)


@BUGS.add
def a_shard_sends_workers_to_half_an_address(patch: Patch) -> None:
    def hand_over(self: AdminRequests, order: Any, frames: Any, now: float) -> Answer:
        order = msgspec.structs.replace(order, size=len(bytes(frames[0])))
        return original(self, order, frames, now)

    original = AdminRequests._hand_over
    patch.setattr(AdminRequests, "_hand_over", hand_over)


@BUGS.add
def a_move_waits_for_no_push(patch: Patch) -> None:
    patch.setattr(Ledger, "short_of", lambda *_: False)


@BUGS.add
def a_ledger_is_not_moved(patch: Patch) -> None:
    patch.setattr(repartition, "_copied", lambda _: Ledger())


@BUGS.add
def a_ledger_is_moved_without_its_last_push(patch: Patch) -> None:
    def copied(ledger: Ledger) -> Ledger:
        found = original(ledger)
        for entry in found.entries.values():
            entry.seq = max(0, entry.seq - 1)
        return found

    original = repartition._copied
    patch.setattr(repartition, "_copied", copied)


@BUGS.add
def a_worker_repeats_nothing_after_a_move(patch: Patch) -> None:
    patch.setattr(reshard_client, "carried", lambda *_: [])


@BUGS.add
def a_worker_repeats_its_last_push_after_a_move(patch: Patch) -> None:
    """The push is sent again although the former shards held it."""

    def resume_at(former: Session, session: Session, now: float) -> Any:
        assert session.ready is not None
        session.seq = max(0, session.seq - 1)
        return original(former, session, now)

    original = reshard_client.resume_at
    patch.setattr(reshard_client, "resume_at", resume_at)


@BUGS.add
def a_push_of_a_former_life_is_made_again_after_a_move(patch: Patch) -> None:
    """The bug that the simulation found when a worker had died during a push."""

    def follow(self: Session, former: Session, now: float) -> list[Send]:
        seq = self.seq
        sends = original(self, former, now)
        self.seq = seq
        return sends

    original = Session.follow
    patch.setattr(Session, "follow", follow)


@BUGS.add
def a_clock_is_as_old_as_its_push_after_a_move(patch: Patch) -> None:
    """A push repeated for an earlier incarnation does not count at the clock which that reached."""
    patch.setattr(Membership, "_counted_to", lambda *_: 0)


@BUGS.add
def a_move_does_not_look_again(patch: Patch) -> None:
    """A worker with an expired lease returns, with a push that the successors do not have."""

    def hand_over(side: Side, successors: bytes, cuts: Any) -> Plan[None]:
        for shard in side.shards:
            yield admin_plans.hold(side, admin_plans.TELLING_S, cuts[shard], (shard,))
        for shard in side.shards:
            yield admin_plans.sending_on(side, shard, successors)

    patch.setattr(admin_plans, "hand_over", hand_over)


@LOGGED.add
def a_round_closes_where_nobody_is_any_more(patch: Patch) -> None:
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
        self.move.standstill = QuiesceTracker()

    original = Shard.take_over
    patch.setattr(Shard, "take_over", take_over)


@LOGGED.add
def a_shard_that_comes_back_forgets_that_it_stands_still(patch: Patch) -> None:
    """Pushes that it applies after the operator's last check are left behind."""
    _forget_the_quiesce(patch)


@REPLICATED.add
def a_life_that_greeted_one_shard_has_pushed_what_that_one_has(patch: Patch) -> None:
    """A push that another shard has from the earlier incarnation is applied there twice."""

    def furthest(entries: Iterable[LedgerEntry]) -> LedgerEntry:
        return max(entries, key=lambda entry: (entry.incarnation, entry.seq))

    patch.setattr(repartition, "_furthest", furthest)


@COMPRESSED.add
def a_residual_stays_behind(patch: Patch) -> None:
    def follow(self: Session, former: Session, now: float) -> list[Send]:
        own = self.cargo.feedback
        sends = original(self, former, now)
        self.cargo.feedback = own
        return sends

    original = Session.follow
    patch.setattr(Session, "follow", follow)


@REPLICATED.add
def a_promoted_copy_does_not_know_what_it_was_given(patch: Patch) -> None:
    """The operator repeats an unanswered request, and the copy refuses it as already in use."""
    patch.setattr(ShardPart, "is_at", lambda *_: False)


@REPLICATED.add
def a_backup_is_not_told_that_its_shard_stands_still(patch: Patch) -> None:
    """After its promotion it applies pushes that the operator leaves to the successors."""
    patch.setattr(replica, "CHANGING", tuple(kind for kind in CHANGING if kind is not Quiesce))


@REPLICATED.add
def a_backup_is_not_told_where_its_shard_has_moved(patch: Patch) -> None:
    patch.setattr(replica, "CHANGING", tuple(kind for kind in CHANGING if kind is not HandOver))


@REPLICATED.add
def a_new_copy_is_not_told_that_its_shard_stands_still(patch: Patch) -> None:
    def take(self: Shard, progress: ReshardProgress) -> None:
        self.move.moved_to = progress.moved_to

    patch.setattr(Shard, "progress", vars(Shard)["progress"].setter(take))


@REPLICATED.add
def a_new_copy_is_not_told_where_its_shard_has_moved(patch: Patch) -> None:
    def take(self: Shard, progress: ReshardProgress) -> None:
        self.move.standstill = QuiesceTracker(progress.standstill)

    patch.setattr(Shard, "progress", vars(Shard)["progress"].setter(take))


@REPLICATED.add
def a_promoted_copy_forgets_that_it_stands_still(patch: Patch) -> None:
    _forget_the_quiesce(patch)


@REPLICATED.add
def a_retirement_is_told_before_the_backup_has_it(patch: Patch) -> None:
    """The operator believes that it is durable, but a promoted copy continues to serve."""

    def handle(self: ShardReplica, sender: bytes, message: Any, frames: Any, now: float) -> Effects:
        if not self.serving or not isinstance(message, HandOver):
            return original(self, sender, message, frames, now)
        answers = self.shard.handle(sender, message, frames, now)
        posts = self._log(now, (wire_format.encode(message), *frames), (), []).posts
        return Effects(answers, posts)

    original = ShardReplica.handle
    patch.setattr(ShardReplica, "handle", handle)


def all_bugs() -> Sequence[Bugs]:
    """The bugs of each kind of cluster."""
    return BUGS, LOGGED, COMPRESSED, REPLICATED


@REPLICATED.add
def a_worker_that_follows_forgets_what_it_has_told(patch: Patch) -> None:
    """It continues from the clock of its last applied push, not from that of its last push."""

    def follow(self: Session, former: Session, now: float) -> list[Send]:
        pending = {m.seq for _, m, _ in former.outstanding() if isinstance(m, Push)}
        former._registration.reached -= len(pending)
        return original(self, former, now)

    original = Session.follow
    patch.setattr(Session, "follow", follow)
