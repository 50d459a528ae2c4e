"""Bugs in a session: what a worker says, and when it says it again."""

from typing import Any

import msgspec

from ps.protocol import registration
from ps.protocol.events import Send
from ps.protocol.outstanding import Outstanding
from ps.protocol.registration import Registration
from ps.protocol.session import Session
from ps.simulation.planting import Bugs, Patch
from ps.simulation.setting import Cluster
from shards.messages import Joined, Refusal, Remedy

BUGS = Bugs(Cluster.SINGLE)


@BUGS.add
def a_worker_goes_on_where_the_foremost_shard_is(patch: Patch) -> None:
    def wrong(*values: Any, **options: Any) -> Any:
        return max(*values, **options) if "key" in options else min(*values, **options)

    patch.setattr(registration, "min", wrong)


@BUGS.add
def silence_is_not_noticed(patch: Patch) -> None:
    patch.setattr(Session, "tick", lambda *_: [])


@BUGS.add
def nothing_is_sent_again_after_a_greeting(patch: Patch) -> None:
    def forget(self: Outstanding, shard: int, *_: float) -> list[Send]:
        for pending in self.to(shard):
            self.settle(shard, pending.message.request)
        return []

    patch.setattr(Outstanding, "readdressed", forget)


@BUGS.add
def a_refused_renewal_is_ignored(patch: Patch) -> None:
    """A worker that owes a rolled back shard nothing never learns that it has to greet it."""

    def unasked(self: Session, shard: int, reply: Refusal, now: float) -> list[Send]:
        return [] if reply.remedy is Remedy.RESYNCHRONISE else original(self, shard, reply, now)

    original = Session._unasked
    patch.setattr(Session, "_unasked", unasked)


@BUGS.add
def only_shard_0_names_the_clock_of_a_worker(patch: Patch) -> None:
    """Another shard may admit it at a later clock, and lets others read as if it had come there."""

    def admitted(self: Registration, shard: int, reply: Joined, now: float) -> Any:
        known = reply.clock if shard == 0 else self._admission
        return first(self, shard, msgspec.structs.replace(reply, clock=known), now)

    def readmitted(self: Registration, shard: int, reply: Joined, now: float) -> Any:
        known = reply.clock if shard == 0 else self.reached
        return again(self, shard, msgspec.structs.replace(reply, clock=known), now)

    first, again = Registration.admitted, Registration.readmitted
    patch.setattr(Registration, "admitted", admitted)
    patch.setattr(Registration, "readmitted", readmitted)


@BUGS.add
def what_is_asked_for_again_after_a_move_counts_as_read(patch: Patch) -> None:
    """A worker that its shards count further then makes a step that they believe was made."""
    patch.setattr(Registration, "reads_at", lambda *_: None)


@BUGS.add
def a_new_life_does_not_ask_what_was_acknowledged(patch: Patch) -> None:
    """A shard without pushes that all shards had acknowledged is taken for one that is behind."""
    patch.setattr(Registration, "_check_losses", lambda _: None)
