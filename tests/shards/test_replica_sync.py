"""A new backup gets in sync while workers push, however long a state takes to reach it."""

from collections import deque
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from shards import wire_format
from shards.messages import PIECE_BYTES, Ack, Install, Request
from shards.replica import Effects, Post, ShardReplica
from shards.replication_messages import Assignment, Configuration, Replicate, Sync
from shards.shard import Shard
from shards.state_pieces import AHEAD
from tests.support.shard_dsl import SIZE, fresh, hello, join, push, spec

GRADIENT = [np.ones(SIZE, np.float32).tobytes()]
P, B = 1, 2
ENTRY_S = 0.001  # the time that an entry takes on a link


class Pair:
    """A primary with one worker, which has a backup from time 0. Posts stay until delivered."""

    def __init__(self, piece_bytes: int = PIECE_BYTES) -> None:
        shape = spec(bound=None, lease_s=1000.0)
        self.primary, self.backup = (
            ShardReplica(0, boot, partial(Shard, shape, boot), piece_bytes=piece_bytes)
            for boot in (P, B)
        )
        self.posts: list[Post] = []
        self.acknowledged = self.pushed = 0
        self._assign(Configuration(0, 1, P))
        self.say(Install(1, "job"), fresh())
        self.say(hello("a"))
        self.say(join("a"))
        self._assign(Configuration(0, 2, P, B))

    def _assign(self, decided: Configuration) -> None:
        for confirmed in (False, True):
            self.backup.assign(Assignment(decided, confirmed), 0.0)
            self._keep(self.primary.assign(Assignment(decided, confirmed), 0.0))

    def say(self, message: Request, frames: Sequence[bytes] = (), now: float = 0.0) -> None:
        self._keep(self.primary.handle(b"a", message, frames, now))

    def push(self, now: float = 0.0) -> None:
        self.pushed += 1
        self.say(push("a", self.pushed, boot=P), GRADIENT, now)

    def tick(self, now: float) -> None:
        self._keep(self.primary.tick(now))

    def deliver(self, post: Post, now: float = 0.0) -> None:
        """Deliver a post to the backup, and the backup's report to the primary."""
        frames = [f.tobytes() if isinstance(f, np.ndarray) else f for f in post.frames]
        for back in self.backup.receive(P, post.message, frames, now).posts:
            self._keep(self.primary.receive(B, back.message, (), now))

    def _keep(self, effects: Effects) -> None:
        self.posts += effects.posts
        self.acknowledged += sum(isinstance(one.message, Ack) for one in effects.answers)

    def take(self) -> list[Post]:
        taken, self.posts = self.posts, []
        return taken


class Link:
    """A link from primary to backup; a state occupies it for `state_s`, an entry for `entry_s`.

    With `one_state` a second state is dropped while another is on its way.
    """

    def __init__(
        self, pair: Pair, state_s: float, entry_s: float, *, one_state: bool = False
    ) -> None:
        self.states = 0
        self._pair, self._one_state = pair, one_state
        self._state_s, self._entry_s = state_s, entry_s
        self._carried = deque[tuple[float, Post]]()
        self._free_at = 0.0

    def carry(self, now: float) -> None:
        """Tick, deliver what has arrived by now, and accept what is sent."""
        self._pair.tick(now)
        while self._carried and self._carried[0][0] <= now:
            self._pair.deliver(self._carried.popleft()[1], now)
        for post in self._pair.take():
            state = isinstance(post.message, Sync)
            if state and self._one_state and self._state_under_way:
                continue
            self.states += state
            self._free_at = max(self._free_at, now) + (self._state_s if state else self._entry_s)
            self._carried.append((self._free_at, post))

    @property
    def _state_under_way(self) -> bool:
        return any(isinstance(post.message, Sync) for _, post in self._carried)


def summary(posts: list[Post]) -> list[tuple[type, int]]:
    return [
        (type(post.message), post.message.position)
        for post in posts
        if isinstance(post.message, Sync | Replicate)
    ]


def in_sync(pair: Pair) -> bool:
    return pair.primary.in_sync


def same(pair: Pair) -> bool:
    weights = [copy.shard.parameters.weights().tobytes() for copy in (pair.primary, pair.backup)]
    return weights[0] == weights[1]


def test_the_state_of_an_epoch_is_one() -> None:
    """A repeated state is the same one, so the backup needs only the entries that follow it."""
    pair = Pair()
    pair.push()
    pair.tick(0.5)
    pair.push(0.5)
    first, between, again, after = pair.take()
    assert summary([first, between, again, after]) == [
        (Sync, 3), (Replicate, 4), (Sync, 3), (Replicate, 5),
    ]  # fmt: skip
    pair.deliver(first)
    pair.push(0.5)
    assert pair.acknowledged == 2, "the third waits for the backup"
    assert not in_sync(pair)
    for post in (between, after, *pair.take()):
        pair.deliver(post)
    assert (in_sync(pair), pair.acknowledged) == (True, 3)
    assert same(pair)
    pair.deliver(again)
    assert summary(pair.take()) == []
    assert same(pair)


def test_what_was_lost_behind_the_state_is_sent_again() -> None:
    pair = Pair()
    pair.push()
    pair.tick(0.5)
    pair.push(0.5)
    first, _, _, after = pair.take()
    pair.deliver(first, 0.5)
    pair.deliver(after, 0.5)
    assert not in_sync(pair)
    pair.tick(1.0)
    repeated = pair.take()
    assert summary(repeated) == [(Replicate, 4), (Replicate, 5)]
    for post in repeated:
        pair.deliver(post, 1.0)
    assert in_sync(pair)
    assert same(pair)


def test_a_state_travels_in_pieces() -> None:
    """Few pieces are on their way at a time, lost ones are repeated, and pushes do not wait."""
    pair = Pair(piece_bytes=256)
    on_their_way, sent, lost = deque(pair.take()), list[int](), {2, 5}
    for step in range(200):
        now = step / 10
        pair.push(now)
        pair.tick(now)
        on_their_way += pair.take()
        assert sum(isinstance(post.message, Sync) for post in on_their_way) <= AHEAD
        while on_their_way:
            post = on_their_way.popleft()
            if isinstance(post.message, Sync):
                sent.append(post.message.piece.number)
                assert sum(len(bytes(frame)) for frame in post.frames[1:]) <= 256
                if post.message.piece.number in lost:
                    lost.remove(post.message.piece.number)
                    continue
            pair.deliver(post, now)
        if in_sync(pair):
            break
    assert in_sync(pair)
    assert not lost
    assert len(sent) > len(set(sent)) == max(sent) + 1 > AHEAD
    assert pair.acknowledged == pair.pushed
    assert same(pair)


def test_a_state_is_sent_again_ever_later() -> None:
    """If the backup never reports and pushes continue, each resend waits twice as long."""
    pair = Pair()
    sent = []
    for tenth in range(200):
        pair.tick(tenth / 10)
        pair.push(tenth / 10)
        sent += [tenth / 10 for kind, _ in summary(pair.take()) if kind is Sync]
    assert sent == [0.0, 0.5, 1.5, 3.5, 7.5, 15.5]
    assert pair.acknowledged == 200, "without a backup that counts they are committed alone"


@pytest.mark.parametrize(
    ("takes_s", "states", "in_sync_at"), [(0.3, 1, 0.31), (1.2, 2, 2.51), (2.4, 3, 7.55)]
)
def test_a_slow_state_comes_in_sync(takes_s: float, states: int, in_sync_at: float) -> None:
    """The worker pushes every 50 ms without waiting for answers; each state that was resent
    needlessly delays the entries, but only once."""
    pair = Pair()
    link, now = Link(pair, takes_s, ENTRY_S), 0.0
    for hundredth in range(6000):
        now = hundredth / 100
        if hundredth % 5 == 0:
            pair.push(now)
        link.carry(now)
        if in_sync(pair):
            break
    assert (link.states, now) == (states, in_sync_at)


@pytest.mark.parametrize(
    ("entry_s", "in_sync_at", "longest_s"), [(0.04, 52.0, 0.08), (0.1, 100.0, 0.21)]
)
def test_workers_continue_while_a_backup_works_off_a_backlog(
    entry_s: float, in_sync_at: float, longest_s: float
) -> None:
    """A state travels for 20 s, and a worker with two pushes in flight pushes every 50 ms, over a
    faster or a slower link: the backup catches up, and no answer waits for long."""
    pair = Pair()
    link = Link(pair, 20.0, entry_s, one_state=True)  # the driver queues no second state
    now = last = longest = 0.0
    seen = 0
    for hundredth in range(20000):
        now = hundredth / 100
        if hundredth % 5 == 0 and pair.pushed - pair.acknowledged < 2:
            pair.push(now)
        link.carry(now)
        if pair.acknowledged > seen:
            longest, last, seen = max(longest, now - last), now, pair.acknowledged
        if in_sync(pair):
            break
    assert (now, round(max(longest, now - last), 2)) == (in_sync_at, longest_s)


def test_leases_that_run_out_together_are_replicated_in_pieces() -> None:
    """Every worker is cut off at once: no entry has more names than a copy accepts, the backup
    follows, and nothing is repeated for ever."""
    pair = Pair()
    for post in pair.take():
        pair.deliver(post)
    for copy in (pair.primary, pair.backup):
        for number in range(1100):
            copy.shard.ledger.greet(f"w{number}", 0, 10.0)
    pair.tick(20.0)
    pieces = pair.take()
    lengths = []
    for post in pieces:
        assert isinstance(post.message, Replicate)
        read = wire_format.decode_state(wire_format.encode_state(post.message), Replicate)
        lengths.append(len(read.expired))
        pair.deliver(post, 20.0)
    assert lengths == [1024, 76]
    ledgers = [copy.shard.ledger for copy in (pair.primary, pair.backup)]
    assert [ledger.silent(20.0) for ledger in ledgers] == [[], []]
    pair.tick(30.0)
    assert (in_sync(pair), pair.take()) == (True, [])
