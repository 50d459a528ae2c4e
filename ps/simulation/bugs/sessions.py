"""Bugs in a session: what a worker says, and when it says it again."""

from typing import Any

from ps import session
from ps.events import Send
from ps.session import Session
from ps.simulation.planting import Bugs, Patch
from ps.simulation.setting import Cluster

BUGS = Bugs(Cluster.SINGLE)


@BUGS.add
def a_worker_goes_on_where_the_foremost_shard_is(patch: Patch) -> None:
    def wrong(*values: Any, **options: Any) -> Any:
        return max(*values, **options) if "key" in options else min(*values, **options)

    patch.setattr(session, "min", wrong)


@BUGS.add
def silence_is_not_noticed(patch: Patch) -> None:
    patch.setattr(Session, "tick", lambda *_: [])


@BUGS.add
def nothing_is_sent_again_after_a_greeting(patch: Patch) -> None:
    def resend(self: Session, shard: int, _: float) -> list[Send]:
        for key in [key for key in self._pending if key[0] == shard]:
            del self._pending[key]
        return []

    patch.setattr(Session, "_resend_all", resend)
