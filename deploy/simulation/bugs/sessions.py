"""Bugs in a session: the messages of a worker, and their retransmission."""

from typing import Any

import msgspec

from deploy.simulation.config import ClusterConfig
from deploy.simulation.mutants import Bugs, Patch
from ps.session import membership
from ps.session.events import Send
from ps.session.membership import Membership
from ps.session.retransmit import RetransmitTable
from ps.session.session import Session
from shards.messages import Joined, Refusal, Remedy

BUGS = Bugs(ClusterConfig.SINGLE)


@BUGS.add
def a_worker_goes_on_where_the_foremost_shard_is(patch: Patch) -> None:
    def wrong(*values: Any, **options: Any) -> Any:
        return max(*values, **options) if "key" in options else min(*values, **options)

    patch.setattr(membership, "min", wrong)


@BUGS.add
def silence_is_not_noticed(patch: Patch) -> None:
    patch.setattr(Session, "tick", lambda *_: [])


@BUGS.add
def nothing_is_sent_again_after_a_greeting(patch: Patch) -> None:
    def forget(self: RetransmitTable, shard: int, *_: float) -> list[Send]:
        for pending in self.to(shard):
            self.remove(shard, pending.message.request)
        return []

    patch.setattr(RetransmitTable, "readdressed", forget)


@BUGS.add
def a_refused_renewal_is_ignored(patch: Patch) -> None:
    """A worker without pending requests at a rolled-back shard never learns to greet it again."""

    def unasked(self: Session, shard: int, reply: Refusal, now: float) -> list[Send]:
        return [] if reply.remedy is Remedy.RESYNCHRONISE else original(self, shard, reply, now)

    original = Session._unasked
    patch.setattr(Session, "_unasked", unasked)


@BUGS.add
def only_shard_0_names_the_clock_of_a_worker(patch: Patch) -> None:
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


@BUGS.add
def what_is_asked_for_again_after_a_move_counts_as_read(patch: Patch) -> None:
    """Shards raise the worker's clock, and it then makes a step that they believe was made."""
    patch.setattr(Membership, "reads_at", lambda *_: None)


@BUGS.add
def a_new_life_does_not_ask_what_was_acknowledged(patch: Patch) -> None:
    """A shard that lacks pushes which all shards had acknowledged is treated as merely behind."""
    patch.setattr(Membership, "_check_losses", lambda _: None)
