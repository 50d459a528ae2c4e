"""Bugs of rolled-back shards: the information that they and their workers exchange."""

from collections.abc import Callable
from typing import Any

import msgspec

from deploy.simulation.config import ClusterConfig
from deploy.simulation.mutants import Bugs, Patch
from ps.session.membership import AppliedAtShard, Membership
from shards.envelopes import Outgoing
from shards.ledger import Ledger
from shards.messages import Join, Push, Welcome
from shards.worker_requests import WorkerRequests

BUGS = Bugs(ClusterConfig.SINGLE)


def _joining(patch: Patch, changed: Callable[[Membership, int, Join], Join]) -> None:
    """Change the Join messages of workers."""

    def join(self: Membership, shard: int, *told: Any) -> Any:
        send = original(self, shard, *told)
        pending = self._outstanding.to(shard)[-1]
        assert isinstance(pending.message, Join)
        pending.message = changed(self, shard, pending.message)
        return msgspec.structs.replace(send, message=pending.message)

    original = Membership._join
    patch.setattr(Membership, "_join", join)


@BUGS.add
def a_roll_back_is_kept_secret(patch: Patch) -> None:
    def hello(self: WorkerRequests, *told: Any) -> Any:
        welcome, *others = original(self, *told)
        assert isinstance(welcome.message, Welcome)
        plain = msgspec.structs.replace(welcome.message, rolled_back=False)
        return [msgspec.structs.replace(welcome, message=plain), *others]

    original = WorkerRequests.hello
    patch.setattr(WorkerRequests, "hello", hello)


@BUGS.add
def what_was_lost_in_a_roll_back_is_waited_for(patch: Patch) -> None:
    patch.setattr(Ledger, "restore_seq", lambda *_: None)


@BUGS.add
def what_a_worker_repeats_counts_as_lost(patch: Patch) -> None:
    """The worker reports the last push that it has sent, acknowledged or not."""

    def changed(own: Membership, shard: int, join: Join) -> Join:
        owed = [pending.message for pending in own._outstanding.to(shard)]
        pushes = [message.seq for message in owed if isinstance(message, Push)]
        return msgspec.structs.replace(join, seq=max([join.seq, *pushes]))

    _joining(patch, changed)


@BUGS.add
def steps_are_forgotten_with_the_pushes(patch: Patch) -> None:
    def restore_seq(self: Ledger, worker: str, seq: int, _: int) -> None:
        entry = self.entries[worker]
        entry.seq = max(entry.seq, seq)

    patch.setattr(Ledger, "restore_seq", restore_seq)


@BUGS.add
def a_worker_comes_back_with_the_clock_of_its_first_day(patch: Patch) -> None:
    """All workers wait at a rolled-back shard for pushes that were made long ago."""

    def applied(self: Membership, shard: int) -> AppliedAtShard:
        return original(self, shard)._replace(clock=0)

    original = Membership._applied
    patch.setattr(Membership, "_applied", applied)


@BUGS.add
def a_push_says_how_far_others_have_come(patch: Patch) -> None:
    """A push at clock c is assumed to follow a read at c - 1, when others were not far behind."""

    def follow_up(self: WorkerRequests, clock: int) -> None:
        if self._part.rolled_back and self._spec.bound is not None:
            least = clock - 1 - self._spec.bound
            self._ledger.floor = max(self._ledger.floor, least)
            for worker in self._ledger.active:
                self._ledger.advance(worker, least)

    def check(self: WorkerRequests, message: Push, now: float) -> Push:
        checked = check_push(self, message, now)
        follow_up(self, message.clock)
        return checked

    def joined(self: WorkerRequests, sender: bytes, message: Join) -> Outgoing:
        answer = admit(self, sender, message)
        follow_up(self, message.clock)
        return answer

    check_push, admit = WorkerRequests._check_push, WorkerRequests._admit
    patch.setattr(WorkerRequests, "_check_push", check)
    patch.setattr(WorkerRequests, "_admit", joined)


@BUGS.add
def who_was_let_in_waits_for_the_warm_up_again(patch: Patch) -> None:
    _joining(patch, lambda _, __, join: msgspec.structs.replace(join, again=False))


@BUGS.add
def a_version_that_was_lost_was_never_there(patch: Patch) -> None:
    def check(self: WorkerRequests, message: Push, now: float) -> Push:
        original(self, message, now)
        return message

    original = WorkerRequests._check_push
    patch.setattr(WorkerRequests, "_check_push", check)
