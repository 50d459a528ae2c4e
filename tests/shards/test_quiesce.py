"""A shard that is quiesced, or has handed over its part, applies no push beyond the cut."""

from typing import Any

from shards.aggregation import ROUND
from shards.messages import (
    Ack,
    HandedOver,
    HandOver,
    Install,
    Left,
    Quiesce,
    Quiesced,
    Refusal,
    Remedy,
    Welcome,
)
from shards.refusals import leaves_state_unchanged
from shards.shard import Shard
from tests.support.shard_dsl import SIZE, fresh, hello, join, leave, push, spec

GRADIENT = [bytes(4 * SIZE)]
OWNER, OTHER = 7, 8


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
    shard.handle(b"one", Quiesce(2, "job", 60.0, OWNER), (), 0.0)
    for _ in range(2):
        (answer,) = shard.handle(b"one", HandOver(3, "job", 4, OWNER), [b"here"], 1.0)
        assert isinstance(answer.message, HandedOver)
    (refused,) = shard.handle(b"two", HandOver(3, "job", 5, OTHER), [b"there"], 1.0)
    assert isinstance(refused.message, Refusal)
    assert "has handed over its part to others" in refused.message.text
    (moved,) = shard.handle(b"a", hello("a"), (), 2.0)
    assert moved.frames == (b"here",)


def test_a_quiesce_belongs_to_one_operator() -> None:
    """Another one neither moves the cut nor ends it, and learns how long to wait; then it may."""
    shard = standing()
    shard.handle(b"one", Quiesce(2, "job", 60.0, OWNER), (), 0.0)
    for seconds in (30.0, 0.0):
        (busy,) = shard.handle(b"two", Quiesce(3, "job", seconds, OTHER), (), 20.0)
        assert isinstance(busy.message, Quiesced)
        assert busy.message.busy_s == 40.0
        assert leaves_state_unchanged(busy.message)
    (waits,) = shard.handle(b"a", push("a", 1), GRADIENT, 21.0)
    assert isinstance(waits.message, Refusal)
    (taken,) = shard.handle(b"two", Quiesce(4, "job", 30.0, OTHER), (), 60.0)
    assert isinstance(taken.message, Quiesced)
    assert taken.message.busy_s == 0.0
    shard.handle(b"one", Quiesce(5, "job", 0.0, OWNER), (), 61.0)
    (waits,) = shard.handle(b"a", push("a", 1), GRADIENT, 62.0)
    assert isinstance(waits.message, Refusal)
    shard.handle(b"two", Quiesce(6, "job", 0.0, OTHER), (), 63.0)
    (ack,) = shard.handle(b"a", push("a", 1), GRADIENT, 64.0)
    assert isinstance(ack.message, Ack)


def test_an_operator_hands_over_only_what_it_quiesces() -> None:
    """The cut that another operator's quiesce keeps is not the one that its new shards hold."""
    shard = standing()
    shard.handle(b"two", Quiesce(2, "job", 60.0, OTHER), (), 0.0)
    (refused,) = shard.handle(b"one", HandOver(3, "job", 4, OWNER), [b"here"], 1.0)
    assert isinstance(refused.message, Refusal)
    assert refused.message.text == "hand over: shard 0 is not quiesced by this operator"


def test_a_shard_that_handed_over_redirects_other_operators() -> None:
    """It has nothing to quiesce; the operator that moved the job may still repeat its requests."""
    shard = standing()
    shard.handle(b"one", Quiesce(2, "job", 60.0, OWNER), (), 0.0)
    shard.handle(b"one", HandOver(3, "job", 4, OWNER), [b"here"], 1.0)
    (again,) = shard.handle(b"one", Quiesce(4, "job", 60.0, OWNER), (), 2.0)
    assert isinstance(again.message, Quiesced)
    (moved,) = shard.handle(b"two", Quiesce(5, "job", 60.0, OTHER), (), 3.0)
    assert isinstance(moved.message, Refusal)
    assert (moved.message.remedy, moved.frames) == (Remedy.MOVED, (b"here",))


def test_successors_that_were_cut_short_are_refused() -> None:
    """Workers that were redirected to half an address would be lost."""
    shard = standing()
    shard.handle(b"one", Quiesce(2, "job", 60.0, OWNER), (), 0.0)
    (refused,) = shard.handle(b"one", HandOver(3, "job", 4, OWNER), [b"her"], 1.0)
    assert isinstance(refused.message, Refusal)
    assert refused.message.text == "hand over: expected 4 bytes, got 3"
    shard.handle(b"one", Quiesce(4, "job", 0.0, OWNER), (), 2.0)
    (welcome,) = shard.handle(b"a", hello("a"), (), 3.0)
    assert isinstance(welcome.message, Welcome)


def test_a_round_beyond_the_cut_stays_open() -> None:
    """It does not close when the other worker's lease runs out, but only after the quiesce."""
    shard = standing(merge=ROUND, bound=0)
    shard.handle(b"a", push("a", 1), GRADIENT, 0.0)
    shard.handle(b"one", Quiesce(2, "job", 60.0, OWNER), (), 0.0)
    shard.expire(["b"], 1.0)
    assert shard.version == 0
    shard.handle(b"one", Quiesce(3, "job", 0.0, OWNER), (), 2.0)
    shard.handle(b"a", push("a", 1), GRADIENT, 2.0)
    assert shard.version == 1


def test_a_worker_leaves_after_the_quiesce() -> None:
    """The new shards would wait for a worker that left after the export: its leave is refused."""
    shard = standing()
    shard.handle(b"one", Quiesce(2, "job", 60.0, OWNER), (), 0.0)
    (refused,) = shard.handle(b"b", leave("b"), (), 1.0)
    assert isinstance(refused.message, Refusal)
    assert refused.message.remedy is Remedy.RETRY
    assert shard.ledger.active == ["a", "b"]
    shard.handle(b"one", Quiesce(3, "job", 0.0, OWNER), (), 2.0)
    (left,) = shard.handle(b"b", leave("b"), (), 2.0)
    assert isinstance(left.message, Left)


def test_a_shard_that_handed_over_closes_no_round() -> None:
    """Its workers are at the new shards; their leases expire here, and that applies nothing."""
    shard = standing(merge=ROUND, bound=0)
    shard.handle(b"a", push("a", 1), GRADIENT, 0.0)
    shard.handle(b"one", Quiesce(2, "job", 60.0, OWNER), (), 0.0)
    shard.handle(b"one", HandOver(3, "job", 4, OWNER), [b"here"], 1.0)
    shard.expire(["b"], 1000.0)
    assert shard.version == 0
