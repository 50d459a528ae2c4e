"""Copies of one shard without a network: each message arrives at once, or is cut off."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from shards.aggregation import EACH, Merge
from shards.messages import (
    FromShard,
    Install,
    Request,
)
from shards.replica import Effects, ShardReplica
from shards.replication_messages import Assignment, Configuration
from shards.shard import Shard
from shards.transition_io import Outgoing
from shards.wire_format import Buffer
from tests.support.shard_dsl import SIZE, fresh, hello, join, push, spec

GRADIENT = [np.ones(SIZE, np.float32).tobytes()]


class Copies:
    """Copies of one shard by boot number; posts arrive at once, unless a copy is cut off."""

    def __init__(
        self, merge: Merge = EACH, given: tuple[Install, Sequence[Buffer]] | None = None
    ) -> None:
        """Copy 1 is the primary and has two workers, copy 2 its backup.

        With a `given` Install there are no workers.
        """
        self._spec = spec(merge=merge, bound=None if merge == EACH else 0)
        self._epoch = 0
        self.copies: dict[int, ShardReplica] = {}
        self.cut_off: set[int] = set()
        self.configure(1)
        self.say(1, *(given or (Install(1, "job"), fresh())))
        for worker in "" if given else "ab":
            self.say(1, hello(worker))
            self.say(1, join(worker))
        self.configure(1, 2)

    def configure(self, primary: int, backup: int | None = None, now: float = 0.0) -> None:
        """Send the copies a new configuration, first unconfirmed, then confirmed."""
        self._epoch += 1
        decided = Configuration(0, self._epoch, primary, backup)
        for boot in sorted(decided.members):
            self.copies.setdefault(boot, ShardReplica(0, boot, partial(Shard, self._spec, boot)))
        for confirmed in (False, True):
            for boot in sorted(decided.members, reverse=True):
                effects = self.copies[boot].assign(Assignment(decided, confirmed), now)
                self._carry(boot, effects, now)

    def say(
        self, boot: int, message: Request, frames: Sequence[Buffer] = (), now: float = 0.0
    ) -> list[FromShard]:
        """The answers that this copy releases after a request."""
        effects = self.copies[boot].handle(b"sender", message, frames, now)
        return [answer.message for answer in self._carry(boot, effects, now)]

    def pushed(self, boot: int, worker: str, seq: int, now: float = 0.0) -> FromShard:
        """The answer to the push of a worker that knows this copy's boot number."""
        (answer,) = self.say(boot, push(worker, seq, boot=boot), GRADIENT, now)
        return answer

    def _carry(self, origin: int, effects: Effects, now: float) -> list[Outgoing]:
        out = list(effects.answers)
        for post in effects.posts:
            if not self.cut_off & {origin, post.to}:
                frames = [f.tobytes() if isinstance(f, np.ndarray) else f for f in post.frames]
                back = self.copies[post.to].receive(origin, post.message, frames, now)
                out += self._carry(post.to, back, now)
        return out
