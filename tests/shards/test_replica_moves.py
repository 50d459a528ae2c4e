"""Copies during a reshard: a successor has the progress that the primary had reported."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from shards import wire_format
from shards.aggregation import EACH, ROUND, Merge
from shards.envelopes import Outgoing
from shards.ledger import Ledger, LedgerEntry
from shards.messages import (
    Ack,
    Cut,
    FromShard,
    HandedOver,
    HandOver,
    Install,
    Installed,
    Quiesce,
    Quiesced,
    Refusal,
    Remedy,
    Request,
    Standing,
    Welcome,
)
from shards.parameters import SavedProgress
from shards.replica import Effects, ShardReplica
from shards.replication_messages import Assignment, Configuration
from shards.shard import Shard
from shards.wire_format import Buffer
from tests.shards.shard_dsl import SIZE, fresh, hello, join, leave, push, spec

GRADIENT = [np.ones(SIZE, np.float32).tobytes()]
HERE = b"here"


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
        self.say(1, *(given or (Install(1, "job", "net", []), fresh())))
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


def refused(answer: FromShard) -> tuple[Remedy, str]:
    assert isinstance(answer, Refusal)
    return answer.remedy, answer.text


def hold(seconds: float = 60.0) -> Quiesce:
    return Quiesce(2, "job", "net", seconds)


def cut(**pushes: int) -> list[bytes]:
    return [wire_format.encode_state(Cut(pushes))]


WAITS = (Remedy.RETRY, "worker a: push 2 waits while the shards are quiesced")


@pytest.mark.parametrize("later", [False, True], ids=["replicated", "synchronised later"])
def test_a_successor_is_quiesced_where_its_predecessor_was(later: bool) -> None:
    """No push beyond the cut is applied for the full duration by the successor's clock."""
    group = Copies()
    group.pushed(1, "a", 1)
    (held,) = group.say(1, hold(), cut(a=1, b=1))
    assert isinstance(held, Quiesced)
    assert held.missing
    if later:
        group.configure(1, 3)
    successor = 3 if later else 2
    group.configure(successor, now=1000.0)
    for worker in "ab":
        (welcome,) = group.say(successor, hello(worker), now=1000.0)
        assert isinstance(welcome, Welcome)
        assert welcome.seq == (1 if worker == "a" else 0)
    assert refused(group.pushed(successor, "a", 2, now=1059.0)) == WAITS
    assert isinstance(group.pushed(successor, "b", 1, now=1059.0), Ack)
    assert isinstance(group.pushed(successor, "a", 2, now=1060.0), Ack)


def test_a_quiesce_is_not_reported_before_a_successor_would_keep_it() -> None:
    """A quiesce that the backup has not reported is not answered, and not in force there."""
    group = Copies()
    group.cut_off = {2}
    assert group.say(1, hold()) == []
    group.configure(2, now=10.0)
    group.say(2, hello("a"), now=10.0)
    assert isinstance(group.pushed(2, "a", 1, now=10.0), Ack)


@pytest.mark.parametrize("later", [False, True], ids=["replicated", "synchronised later"])
def test_a_successor_redirects_workers(later: bool) -> None:
    """It redirects to the shards its predecessor was given; another operator is refused."""
    group = Copies()
    group.say(1, hold())
    (answer,) = group.say(1, HandOver(3, "job", "net", len(HERE)), [HERE])
    assert isinstance(answer, HandedOver)
    if later:
        group.configure(1, 3)
    successor = 3 if later else 2
    group.configure(successor, now=1000.0)
    effects = group.copies[successor].handle(b"a", hello("a"), (), 1000.0)
    assert [answer.frames for answer in effects.answers] == [(HERE,)]
    (again,) = group.say(successor, HandOver(3, "job", "net", len(HERE)), [HERE], now=1000.0)
    assert isinstance(again, HandedOver)
    (other,) = group.say(successor, HandOver(4, "job", "net", 5), [b"there"], now=1000.0)
    assert refused(other)[1] == "hand over: shard 0 has handed over its part to others"


def test_no_worker_is_redirected_before_a_successor_would() -> None:
    """A handover that the backup has not reported shows in no answer, and dies with its copy."""
    group = Copies()
    group.say(1, hold())
    group.cut_off = {2}
    assert group.say(1, HandOver(3, "job", "net", len(HERE)), [HERE]) == []
    assert group.say(1, hello("a")) == []
    group.configure(2, now=10.0)
    (welcome,) = group.say(2, hello("a"), now=10.0)
    assert isinstance(welcome, Welcome)
    assert refused(group.pushed(2, "a", 1, now=10.0))[0] is Remedy.RETRY, "it is still quiesced"


def test_a_round_beyond_the_cut_stays_open_at_a_new_copy() -> None:
    """It stays open when the other worker leaves; both copies close it after the quiesce."""
    group = Copies(ROUND)
    group.say(1, push("a", 1), GRADIENT)
    group.say(1, hold())
    group.say(1, leave("b"))
    group.configure(1, 3)
    group.say(1, hello("b"))
    assert [group.copies[boot].shard.version for boot in (1, 3)] == [0, 0]
    group.say(1, hold(0.0))
    group.say(1, push("a", 1), GRADIENT)
    assert [group.copies[boot].shard.version for boot in (1, 3)] == [1, 1]


def test_a_successor_recognises_a_state_that_its_predecessor_installed() -> None:
    """An operator that got no answer repeats the Install, and learns that the shard has the state.

    If a worker has pushed since, a late copy is refused: it would undo that push.
    """
    given = [wire_format.encode_state(SavedProgress(7, 7, 7, ledger())), *fresh()[1:]]
    group = Copies(given=(Install(1, "job", "net", [], True), given))
    again = Install(2, "job", "net", [], True)
    group.configure(2, 3, now=50.0)
    for _ in range(2):
        (installed,) = group.say(2, again, given, now=50.0)
        assert isinstance(installed, Installed)
        assert installed.version == 7
    for boot in (2, 3):
        shard = group.copies[boot].shard
        assert (shard.version, shard.ledger.cut) == (7, {"a": 7})
    other = [given[0], np.full(SIZE, 2, np.float32).tobytes()]
    text = "install: shard 0 serves workers by now; expected a fresh one"
    (answer,) = group.say(2, again, other, now=50.0)
    assert refused(answer) == (Remedy.GIVE_UP, text)
    group.say(2, hello("a"), now=50.0)
    assert isinstance(group.pushed(2, "a", 8, now=50.0), Ack)
    (answer,) = group.say(2, again, given, now=50.0)
    assert refused(answer) == (Remedy.GIVE_UP, text)


def ledger() -> Ledger:
    """The ledger of worker a, after 7 of its pushes were applied elsewhere."""
    return Ledger(
        {"a": LedgerEntry(0, seq=7, clock=7, step=7, standing=Standing.ACTIVE, admitted=True)}
    )
