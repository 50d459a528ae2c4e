"""Synchronous training: pushes are collected until every active worker has sent one."""

import numpy as np
import pytest

from shards.aggregation import ROUND
from shards.messages import Ack, Joined, Left, Parked, Welcome
from tests.support.shard_dsl import (
    REAL,
    SIZE,
    Said,
    Talk,
    gradient,
    hello,
    join,
    leave,
    pull,
    push,
    renew,
    served,
)

pytestmark = pytest.mark.usefixtures("on_host_and_device")


def talk_of(*workers: str) -> Talk:
    talk = Talk(merge=ROUND, bound=0)
    talk.enter(*workers)
    return talk


def test_a_round_is_one_update_with_the_mean() -> None:
    """No worker gets an Ack or weights before every worker has pushed."""
    talk = talk_of("a", "b", "c")
    assert talk.say(push("b", 1), gradient(1)) == []
    assert talk.say(pull("b", 1)) == []
    assert talk.say(push("c", 1), gradient(2)) == []
    assert talk.say(push("a", 1), gradient(6)) == [
        ("a", Ack(101, 0, 1, 1, 1, 0, False)),
        ("b", Ack(101, 0, 1, 1, 1, 0, False)),
        ("c", Ack(101, 0, 1, 1, 1, 0, False)),
        served("b", 1),
    ]
    assert set(talk.weights()[REAL]) == {-3}
    assert (talk.shard.version, talk.shard.updates.steps, talk.shard.updates.samples) == (1, 3, 192)


def test_the_order_of_arrival_does_not_matter() -> None:
    """The mean is summed by name, because float addition is not associative."""
    rng = np.random.default_rng(5)
    gradients = {name: rng.standard_normal(SIZE, np.float32) for name in "abcd"}
    results = []
    for order in ("abcd", "dcba", "bdac"):
        talk = talk_of(*"abcd")
        for name in order:
            talk.say(push(name, 1), [gradients[name].tobytes()])
        talk.say(pull("a", 1))
        results.append(talk.weights().tobytes())
    assert len(set(results)) == 1
    total = gradients["a"] + gradients["b"] + gradients["c"] + gradients["d"]
    got = np.frombuffer(results[0], np.float32)
    np.testing.assert_array_equal(got[REAL], -(total / np.float32(4))[REAL])


def test_a_repetition_waits_with_its_round() -> None:
    """A push repeated while its round is open counts once; repeated later it is a duplicate."""
    talk = talk_of("a", "b")
    assert talk.say(push("a", 1), gradient(1)) == []
    assert talk.say(push("a", 1), gradient(1)) == []
    assert talk.say(push("b", 1), gradient(1)) == [
        ("a", Ack(101, 0, 1, 1, 1, 0, False)),
        ("b", Ack(101, 0, 1, 1, 1, 0, False)),
    ]
    assert talk.say(push("a", 1), gradient(1)) == [("a", Ack(101, 0, 1, 1, 1, 0, True))]
    assert talk.shard.status().pushes == 2


def test_a_second_push_waits_behind_the_first() -> None:
    """The second push is answered with Parked instead of a gap; its worker repeats it later."""
    talk = talk_of("a", "b")
    talk.say(push("a", 1), gradient(1))
    assert talk.say(push("a", 2), gradient(1)) == [("a", Parked(102, 0, 1, 0))]
    talk.say(push("b", 1), gradient(1))
    assert talk.say(push("a", 2), gradient(1)) == []


def _away(talk: Talk, how: str) -> Said:
    """Make worker b, and only b, leave, expire or be replaced."""
    talk.now = 9.0
    talk.say(renew("a"))
    if how == "leave":
        return talk.say(leave("b"))[1:]
    return talk.tick(10.0) if how == "expire" else talk.say(hello("b", 1))[1:]


def test_a_round_closes_without_workers_that_are_gone() -> None:
    """After a departure, an expired lease or a takeover the round closes with the others."""
    for how in ("leave", "expire", "takeover"):
        talk = talk_of("a", "b")
        talk.say(push("a", 1), gradient(1))
        assert _away(talk, how) == [("a", Ack(101, 0, 1, 1, 1, 0, False))], how


def test_what_a_lost_worker_brought_still_counts() -> None:
    """A complete push counts after its worker's lease has expired; only a new life drops it."""
    talk = talk_of("a", "b")
    talk.say(push("b", 1), gradient(1))
    _away(talk, "expire")
    assert talk.say(push("a", 1), gradient(3)) == [
        ("a", Ack(101, 0, 1, 1, 1, 0, False)),
        ("b", Ack(101, 0, 1, 1, 1, 0, False)),
    ]
    talk.say(pull("a", 1))
    assert set(talk.weights()[REAL]) == {-2}


def test_a_new_life_drops_what_the_old_one_brought() -> None:
    """What a Welcome says is applied is all that ever will be of the life before."""
    talk = talk_of("a", "b")
    talk.say(push("b", 1), gradient(1))
    assert talk.say(hello("b", 1)) == [("b", Welcome(10, 0, 1, 1, 0, 0, 0, 10.0))]
    assert talk.say(push("a", 1), gradient(3)) == [("a", Ack(101, 0, 1, 1, 1, 0, False))]
    talk.say(join("b", incarnation=1))
    assert talk.say(push("b", 1, incarnation=1), gradient(5)) == [
        ("b", Ack(101, 0, 1, 1, 2, 1, False))
    ]
    talk.say(leave("a"))
    talk.say(pull("b", 1, incarnation=1))
    assert set(talk.weights()[REAL]) == {-8}


def test_a_latecomer_joins_the_open_round() -> None:
    """It counts from the slowest clock, so the round waits for its first push too."""
    talk = talk_of("a", "b")
    talk.say(push("a", 1), gradient(1))
    talk.say(hello("c"))
    assert talk.say(join("c")) == [("c", Joined(11, 0, 1, 0))]
    assert talk.say(push("b", 1), gradient(1)) == []
    assert talk.say(pull("c", 0)) == [served("c", 0)]
    assert [to for to, _ in talk.say(push("c", 1), gradient(4))] == ["a", "b", "c"]


def test_a_round_does_not_wait_for_a_worker_beyond_it() -> None:
    """A worker admitted at a later clock owes no push to the rounds before.

    Found by simulation: worker c lost its lease at shard 0 alone; there the others' round 1 closed
    without it, and c came back at clock 1. This shard, where it had always counted, still waited
    for the push that c would never make, while c's next pull waited here for the round to close.
    """
    talk = talk_of("a", "b", "c")
    talk.say(push("a", 1), gradient(1))
    assert talk.say(push("b", 1), gradient(1)) == []
    assert talk.say(pull("c", 1)) == []
    assert talk.say(join("c", clock=1)) == [
        ("c", Joined(11, 0, 1, 1)),
        ("a", Ack(101, 0, 1, 1, 1, 0, False)),
        ("b", Ack(101, 0, 1, 1, 1, 0, False)),
        served("c", 1),
    ]


def test_a_later_clock_does_not_hold_back_an_earlier_round() -> None:
    """A push to clock 2 waits for its own round while the round to clock 1 closes.

    Found by simulation: two shards each held one worker's push to the earlier clock back for a
    push to the later one that another worker could only make after its own was acknowledged there.
    """
    talk = talk_of("a", "b")
    talk.say(join("a", clock=1))
    assert talk.say(push("a", 1, clock=2), gradient(1)) == []
    assert talk.say(push("b", 1, clock=1), gradient(2)) == [("b", Ack(101, 0, 1, 1, 1, 0, False))]
    assert talk.say(push("b", 2, clock=2), gradient(4)) == [
        ("a", Ack(101, 0, 1, 1, 2, 1, False)),
        ("b", Ack(102, 0, 1, 2, 2, 1, False)),
    ]
    talk.say(leave("b"))
    talk.say(pull("a", 2))
    assert set(talk.weights()[REAL]) == {-4.5}


def test_leaving_in_the_middle_of_a_round() -> None:
    """When a worker leaves, the round closes with the pushes that it has."""
    talk = talk_of("a", "b")
    talk.say(push("b", 1), gradient(2))
    assert talk.say(leave("a")) == [
        ("a", Left(13, 0, 1)),
        ("b", Ack(101, 0, 1, 1, 1, 0, False)),
    ]
