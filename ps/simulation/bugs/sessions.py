"""Bugs in a session: what a worker says, and when it says it again."""

from typing import Any

from ps.protocol import registration
from ps.protocol.events import Send
from ps.protocol.outstanding import Outstanding
from ps.protocol.session import Session
from ps.simulation.planting import Bugs, Patch
from ps.simulation.setting import Cluster

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
