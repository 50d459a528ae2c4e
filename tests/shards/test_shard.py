"""The shard by plain calls: its answer to each message, and the change of its state."""

import pytest

from shards.messages import Ack, Joined, Left, Parked, Read, Refusal, Remedy, Renewed, Welcome
from shards.shard_status import Standing
from shards.tables import Layout, cut_evenly
from tests.support.shard_dsl import (
    REAL,
    TABLE,
    Talk,
    gradient,
    hello,
    join,
    leave,
    pull,
    push,
    refusal,
    renew,
    served,
)

pytestmark = pytest.mark.usefixtures("on_host_and_device")


def test_the_life_of_a_worker() -> None:
    """Hello, join, pull, push, renew, leave: each has its answer."""
    talk = Talk()
    assert talk.say(hello("w")) == [("w", Welcome(10, 0, 1, 1, 0, 0, 0, 10.0))]
    assert talk.say(join("w")) == [("w", Joined(11, 0, 1, 0))]
    assert talk.say(pull("w", 0)) == [served("w", 0)]
    assert not talk.weights().any()
    assert talk.say(push("w", 1), gradient(2)) == [("w", Ack(101, 0, 1, 1, 1, 0, False))]
    assert talk.say(pull("w", 1)) == [served("w", 1)]
    assert set(talk.weights()[REAL]) == {-2}
    assert talk.weights().sum() == -2 * len(REAL), "the padding stays zero"
    assert talk.say(renew("w")) == [("w", Renewed(0, 0, 1))]
    assert talk.say(leave("w")) == [("w", Left(13, 0, 1))]
    assert talk.say(leave("w")) == [("w", Left(13, 0, 1))], "a repetition is answered again"


# --- exactly once ---------------------------------------------------------------------------------


def test_a_repeated_push_is_applied_once() -> None:
    """A repeated push is acknowledged as a duplicate, with the present version."""
    talk = Talk()
    talk.enter("w")
    talk.say(push("w", 1), gradient(1))
    talk.say(push("w", 2), gradient(1))
    assert talk.say(push("w", 1), gradient(1)) == [("w", Ack(101, 0, 1, 1, 2, 0, True))]
    talk.say(Read(1, "job"))
    assert set(talk.weights()[REAL]) == {-2}


def test_a_push_ahead_of_a_lost_one_is_not_applied() -> None:
    """The refusal of a push beyond the next one names the number that is missing."""
    talk = Talk()
    talk.enter("w")
    said = talk.say(push("w", 3), gradient(1))
    assert refusal(said) == Refusal(
        103, 0, 1, Remedy.GAP, "worker w: expected push 1, got 3", expected=1
    )
    assert talk.shard.version == 0


def test_a_new_life_continues_after_the_pushes_of_the_old_one() -> None:
    """Its Welcome has seq and step; the old life is fenced; a push repeated is a duplicate."""
    talk = Talk()
    talk.enter("w")
    talk.say(push("w", 1, clock=4, step=4, steps=4), gradient(1))
    assert talk.say(hello("w", 1)) == [("w", Welcome(10, 0, 1, 1, 1, 1, 4, 10.0))]
    late = refusal(talk.say(push("w", 2), gradient(1)))
    assert (late.remedy, late.text) == (
        Remedy.FENCED,
        "worker w: incarnation 1 has taken over from 0",
    )
    assert talk.say(join("w", incarnation=1)) == [("w", Joined(11, 0, 1, 4))]
    assert talk.say(push("w", 1, incarnation=1), gradient(1)) == [
        ("w", Ack(101, 0, 1, 1, 1, 0, True))
    ]


def test_a_duplicate_raises_the_clock() -> None:
    """A new life that lags behind one shard catches up there too, and the others may continue."""
    talk = Talk(bound=0)
    talk.enter("a", "b")
    talk.say(push("a", 1), gradient(1))
    talk.say(push("b", 1), gradient(1))
    assert talk.say(pull("b", 2)) == []
    assert talk.say(push("a", 1, clock=2), gradient(1)) == [
        ("a", Ack(101, 0, 1, 1, 2, 0, True)),
    ]
    assert talk.say(push("b", 2), gradient(1)) == [
        ("b", Ack(102, 0, 1, 2, 3, 2, False)),
        served("b", 3),
    ]


# --- the gate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [0, 1, 5, None])
def test_the_bound(bound: int | None) -> None:
    """A worker takes bound + 1 steps ahead of another, and then waits for it."""
    talk = Talk(bound=bound)
    talk.enter("slow", "fast")
    steps = 20 if bound is None else bound + 1
    for clock in range(steps):
        assert talk.say(pull("fast", clock)) == [served("fast", clock)]
        talk.say(push("fast", clock + 1), gradient(1))
    assert talk.shard.status().max_clock_gap == steps
    talk.now = 3.0
    waiting = talk.say(pull("fast", steps))
    if bound is None:
        assert waiting == [served("fast", steps)]
        return
    assert waiting == []
    assert talk.say(pull("fast", steps)) == [("fast", Parked(12, 0, 1, 0))]
    talk.now = 5.0
    assert talk.say(push("slow", 1), gradient(1)) == [
        ("slow", Ack(101, 0, 1, 1, steps + 1, steps, False)),
        served("fast", steps + 1, waited_s=2.0),
    ]


def test_whatever_raises_the_slowest_clock_opens_the_gate() -> None:
    """A departure, an expired lease and a takeover release every request that waited for it."""
    for how in ("leave", "expire", "takeover"):
        talk = Talk(bound=0)
        talk.enter("slow", "a", "b")
        for worker in ("a", "b"):
            talk.say(push(worker, 1), gradient(1))
            assert talk.say(pull(worker, 1)) == []
        talk.now = 9.0
        for worker in ("a", "b"):
            talk.say(renew(worker))
        if how == "leave":
            said = talk.say(leave("slow"))[1:]
        elif how == "takeover":
            said = talk.say(hello("slow", 1))[1:]
        else:
            assert talk.tick(9.9) == []
            said = talk.tick(10.0)
        waited = talk.now
        assert said == [served("a", 2, waited_s=waited), served("b", 2, waited_s=waited)], how


def test_a_worker_that_is_gone_is_not_answered() -> None:
    """The parked requests of a worker that left are forgotten."""
    talk = Talk(bound=0)
    talk.enter("slow", "fast")
    talk.say(push("fast", 1), gradient(1))
    assert talk.say(pull("fast", 1)) == []
    talk.say(leave("fast"))
    assert talk.say(push("slow", 1), gradient(1)) == [("slow", Ack(101, 0, 1, 1, 2, 1, False))]


def test_a_lease_that_ran_out() -> None:
    """A worker with an expired lease must say hello, and then counts from the slowest clock."""
    talk = Talk()
    talk.enter("lost", "w")
    talk.now = 9.0
    for seq in range(1, 8):
        talk.say(push("w", seq), gradient(1))
    talk.tick(12.0)
    said = refusal(talk.say(push("lost", 1), gradient(1)))
    assert said.remedy is Remedy.RESYNCHRONISE
    assert said.text == "worker lost: the lease ran out at step 0"
    assert talk.say(hello("lost")) == [("lost", Welcome(10, 0, 1, 1, 7, 0, 0, 10.0))]
    assert talk.say(join("lost")) == [("lost", Joined(11, 0, 1, 7))]
    assert talk.say(push("lost", 1), gradient(1)) == [("lost", Ack(101, 0, 1, 1, 8, 7, False))]
    standing = {one.worker: one.standing for one in talk.shard.status().workers}
    assert standing == {"lost": Standing.ACTIVE, "w": Standing.ACTIVE}


def test_a_late_tick_extends_the_leases() -> None:
    """Leases last longer by the time that the driver was held up, and then run out; the gate and
    workers that have gone are not affected."""
    talk = Talk(bound=0)
    talk.enter("slow", "fast", "gone", "lost")
    talk.say(leave("gone"))
    talk.now = 5.0
    for worker in ("slow", "fast"):
        talk.say(renew(worker))
    talk.tick(10.0)  # the lease of "lost" runs out
    talk.say(push("fast", 1), gradient(1))
    talk.say(renew("slow"))
    assert talk.say(pull("fast", 1)) == []
    talk.shard.forgive_silence(1000.0)
    assert talk.tick(1019.9) == []
    standing = {one.worker: one.standing for one in talk.shard.status().workers}
    assert standing == {
        "slow": Standing.ACTIVE,
        "fast": Standing.ACTIVE,
        "gone": Standing.LEFT,
        "lost": Standing.EXPIRED,
    }
    talk.say(renew("fast"))
    assert talk.tick(1020.0) == [served("fast", 1, waited_s=1010.0)]


def test_any_message_renews_a_lease() -> None:
    """A parked pull that is repeated keeps its worker alive."""
    talk = Talk(bound=0)
    talk.enter("slow", "fast")
    talk.say(push("fast", 1), gradient(1))
    for now in (0.0, 8.0, 16.0, 24.0):
        talk.tick(now)
        talk.say(pull("fast", 1))
        talk.say(renew("slow"))
    assert {one.standing for one in talk.shard.status().workers} == {Standing.ACTIVE}


# --- warm start -----------------------------------------------------------------------------------


def test_one_replica_warms_up_alone() -> None:
    """The others are admitted after its steps, at its clock, in the order of arrival."""
    talk = Talk(warm_steps=3)
    for worker in ("a", "b", "c"):
        talk.say(hello(worker))
    assert talk.say(join("a")) == [("a", Joined(11, 0, 1, 0))]
    assert talk.say(join("b")) == []
    assert talk.say(join("c")) == []
    assert talk.say(join("b")) == [("b", Parked(11, 0, 1, 0))]
    talk.say(push("a", 1, clock=2, step=2, steps=2), gradient(1))
    assert talk.say(push("a", 2, clock=3, step=3), gradient(1)) == [
        ("a", Ack(102, 0, 1, 2, 2, 1, False)),
        ("b", Joined(11, 0, 1, 3)),
        ("c", Joined(11, 0, 1, 3)),
    ]


def test_another_replica_warms_up_when_the_first_is_gone() -> None:
    """Exactly one takes its place; the first one, if it returns, is admitted as well."""
    talk = Talk(warm_steps=3)
    talk.say(hello("a"))
    talk.say(join("a"))
    talk.now = 9.0
    for worker in ("b", "c"):
        talk.say(hello(worker))
        talk.say(join(worker))
    assert talk.tick(10.0) == [("b", Joined(11, 0, 1, 0))]
    talk.say(hello("a"))
    assert talk.say(join("a")) == [("a", Joined(11, 0, 1, 0))], "it still counts at other shards"


def test_only_shard_0_decides_who_warms_up() -> None:
    """Two shards might choose different replicas, and then neither would begin."""
    talk = Talk(installed=False, shard=1, map=cut_evenly(Layout((TABLE,)), 2), warm_steps=3)
    for worker in ("a", "b"):
        talk.shard.ledger.greet(worker, 0, 10.0)
        assert talk.say(join(worker)) == [(worker, Joined(11, 1, 1, 0))]
