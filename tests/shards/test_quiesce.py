"""A shard that is quiesced, or has handed over its part, applies no push beyond the cut."""

from typing import Any

from shards.aggregation import ROUND
from shards.messages import (
    HandedOver,
    HandOver,
    Install,
    Left,
    Quiesce,
    Refusal,
    Remedy,
    Welcome,
)
from shards.shard import Shard
from tests.support.shard_dsl import SIZE, fresh, hello, join, leave, push, spec

GRADIENT = [bytes(4 * SIZE)]


def standing(**changes: Any) -> Shard:
    """A shard with two workers."""
    shard = Shard(spec(**changes), boot=1)
    shard.handle(b"operator", Install(1, "job"), fresh(), 0.0)
    for worker in "ab":
        shard.handle(worker.encode(), hello(worker), (), 0.0)
        shard.handle(worker.encode(), join(worker), (), 0.0)
    return shard


def test_only_the_first_operator_redirects_the_workers() -> None:
    """A repetition is answered as before; another operator's successors are refused."""
    shard = standing()
    shard.handle(b"one", Quiesce(2, "job", 60.0), (), 0.0)
    for _ in range(2):
        (answer,) = shard.handle(b"one", HandOver(3, "job", 4), [b"here"], 1.0)
        assert isinstance(answer.message, HandedOver)
    (refused,) = shard.handle(b"two", HandOver(3, "job", 5), [b"there"], 1.0)
    assert isinstance(refused.message, Refusal)
    assert "has handed over its part to others" in refused.message.text
    (moved,) = shard.handle(b"a", hello("a"), (), 2.0)
    assert moved.frames == (b"here",)


def test_successors_that_were_cut_short_are_refused() -> None:
    """Workers that were redirected to half an address would be lost."""
    shard = standing()
    shard.handle(b"one", Quiesce(2, "job", 60.0), (), 0.0)
    (refused,) = shard.handle(b"one", HandOver(3, "job", 4), [b"her"], 1.0)
    assert isinstance(refused.message, Refusal)
    assert refused.message.text == "hand over: expected 4 bytes, got 3"
    shard.handle(b"one", Quiesce(4, "job", 0.0), (), 2.0)
    (welcome,) = shard.handle(b"a", hello("a"), (), 3.0)
    assert isinstance(welcome.message, Welcome)


def test_a_round_beyond_the_cut_stays_open() -> None:
    """It does not close when the other worker's lease runs out, but only after the quiesce."""
    shard = standing(merge=ROUND, bound=0)
    shard.handle(b"a", push("a", 1), GRADIENT, 0.0)
    shard.handle(b"one", Quiesce(2, "job", 60.0), (), 0.0)
    shard.expire(["b"], 1.0)
    assert shard.version == 0
    shard.handle(b"one", Quiesce(3, "job", 0.0), (), 2.0)
    shard.handle(b"a", push("a", 1), GRADIENT, 2.0)
    assert shard.version == 1


def test_a_worker_leaves_after_the_quiesce() -> None:
    """The new shards would wait for a worker that left after the export: its leave is refused."""
    shard = standing()
    shard.handle(b"one", Quiesce(2, "job", 60.0), (), 0.0)
    (refused,) = shard.handle(b"b", leave("b"), (), 1.0)
    assert isinstance(refused.message, Refusal)
    assert refused.message.remedy is Remedy.RETRY
    assert shard.ledger.active == ["a", "b"]
    shard.handle(b"one", Quiesce(3, "job", 0.0), (), 2.0)
    (left,) = shard.handle(b"b", leave("b"), (), 2.0)
    assert isinstance(left.message, Left)


def test_a_shard_that_handed_over_closes_no_round() -> None:
    """Its workers are at the new shards; their leases expire here, and that applies nothing."""
    shard = standing(merge=ROUND, bound=0)
    shard.handle(b"a", push("a", 1), GRADIENT, 0.0)
    shard.handle(b"one", Quiesce(2, "job", 60.0), (), 0.0)
    shard.handle(b"one", HandOver(3, "job", 4), [b"here"], 1.0)
    shard.expire(["b"], 1000.0)
    assert shard.version == 0
