"""Bugs of shards that were rolled back: what they tell, and what they are told."""

from collections.abc import Callable
from typing import Any

import msgspec

from ps.protocol.registration import Had, Registration
from ps.simulation.planting import Bugs, Patch
from ps.simulation.setting import Cluster
from shards.ledger import Ledger
from shards.messages import Join, Push, Welcome
from shards.transitions import Outgoing
from shards.workers import Workers

BUGS = Bugs(Cluster.SINGLE)


def _joining(patch: Patch, changed: Callable[[Registration, int, Join], Join]) -> None:
    """Have workers say something else when they join."""

    def join(self: Registration, shard: int, *told: Any) -> Any:
        send = original(self, shard, *told)
        pending = self._outstanding.to(shard)[-1]
        assert isinstance(pending.message, Join)
        pending.message = changed(self, shard, pending.message)
        return msgspec.structs.replace(send, message=pending.message)

    original = Registration._join
    patch.setattr(Registration, "_join", join)


@BUGS.add
def a_roll_back_is_kept_secret(patch: Patch) -> None:
    def hello(self: Workers, *told: Any) -> Any:
        welcome, *others = original(self, *told)
        assert isinstance(welcome.message, Welcome)
        plain = msgspec.structs.replace(welcome.message, rolled_back=False)
        return [msgspec.structs.replace(welcome, message=plain), *others]

    original = Workers.hello
    patch.setattr(Workers, "hello", hello)


@BUGS.add
def what_was_lost_in_a_roll_back_is_waited_for(patch: Patch) -> None:
    patch.setattr(Ledger, "regain", lambda *_: None)


@BUGS.add
def what_a_worker_repeats_counts_as_lost(patch: Patch) -> None:
    """It tells of the last push that it has sent, acknowledged or not."""

    def changed(own: Registration, shard: int, join: Join) -> Join:
        owed = [pending.message for pending in own._outstanding.to(shard)]
        pushes = [message.seq for message in owed if isinstance(message, Push)]
        return msgspec.structs.replace(join, seq=max([join.seq, *pushes]))

    _joining(patch, changed)


@BUGS.add
def steps_are_forgotten_with_the_pushes(patch: Patch) -> None:
    def regain(self: Ledger, worker: str, seq: int, _: int) -> None:
        entry = self.entries[worker]
        entry.seq = max(entry.seq, seq)

    patch.setattr(Ledger, "regain", regain)


@BUGS.add
def a_worker_comes_back_with_the_clock_of_its_first_day(patch: Patch) -> None:
    """All wait at a rolled back shard for pushes that were made long ago."""

    def had(self: Registration, shard: int) -> Had:
        return original(self, shard)._replace(clock=0)

    original = Registration._had
    patch.setattr(Registration, "_had", had)


@BUGS.add
def a_push_says_how_far_others_have_come(patch: Patch) -> None:
    """A push at clock c is taken to follow a read at c - 1, which others were not far behind."""

    def follow_up(self: Workers, clock: int) -> None:
        if self._part.rolled_back and self._spec.bound is not None:
            least = clock - 1 - self._spec.bound
            self._ledger.floor = max(self._ledger.floor, least)
            for worker in self._ledger.active:
                self._ledger.advance(worker, least)

    def check(self: Workers, message: Push, now: float) -> Push:
        checked = check_push(self, message, now)
        follow_up(self, message.clock)
        return checked

    def joined(self: Workers, sender: bytes, message: Join) -> Outgoing:
        answer = admit(self, sender, message)
        follow_up(self, message.clock)
        return answer

    check_push, admit = Workers._check_push, Workers._admit
    patch.setattr(Workers, "_check_push", check)
    patch.setattr(Workers, "_admit", joined)


@BUGS.add
def who_was_let_in_waits_for_the_warm_up_again(patch: Patch) -> None:
    _joining(patch, lambda _, __, join: msgspec.structs.replace(join, again=False))


@BUGS.add
def a_version_that_was_lost_was_never_there(patch: Patch) -> None:
    def check(self: Workers, message: Push, now: float) -> Push:
        original(self, message, now)
        return message

    original = Workers._check_push
    patch.setattr(Workers, "_check_push", check)
