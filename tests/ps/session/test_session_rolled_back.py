"""A worker after a shard's rollback: it continues, and reports what that shard had."""

import pytest

from ps.session.events import RolledBack
from shards.errors import GiveUp
from shards.messages import Join, Pull, Push, Remedy, Welcome
from tests.support.session_replies import (
    ack,
    deliver,
    joined,
    ready_session,
    refused,
    send_push,
    weights,
    welcome,
)


def rolled_back(shard: int, request: int, seq: int, boot: int = 2) -> Welcome:
    """As `welcome`: `seq` pushes, two versions each."""
    return Welcome(request, shard, boot, 1, 2 * seq, seq, 10 * seq, 10.0, rolled_back=True)


def test_a_rolled_back_shard_is_told_what_it_had() -> None:
    """It receives the last push that it acknowledged, with step and clock; everything outstanding
    follows.
    """
    session = ready_session(1)
    for clock in (1, 2, 3):
        send_push(session, clock=clock)
    for seq, request in ((1, 3), (2, 4)):
        deliver(session, ack(0, request, seq))
    session.pull(3, now=0.0)
    deliver(session, refused(0, 7, Remedy.RESYNCHRONISE))
    sends, events = deliver(session, rolled_back(0, 8, seq=1))
    assert sends == [(0, Join(9, "job", "w", 2, 2, 2, again=True, seq=2, step=2))]
    assert events == [RolledBack(0, 2, 2, lost=1)]
    sends, _ = deliver(session, joined(0, 9, clock=2, boot=2))
    owed = [message for _, message in sends if isinstance(message, Push | Pull)]
    assert [(type(message), message.boot) for message in owed] == [(Push, 2), (Pull, 2)]
    assert isinstance(owed[0], Push)
    assert owed[0].seq == 3


def test_pushes_of_a_life_before_count_as_well() -> None:
    """A worker that began after a shard's fifth push reports it, though it has pushed nothing
    itself.
    """
    session = ready_session(1)
    session.greet_new_primary(0, 0.0)
    deliver(session, welcome(0, 3, seq=5, boot=2))
    deliver(session, joined(0, 4, boot=2))
    session.greet_new_primary(0, 1.0)
    sends, events = deliver(session, rolled_back(0, 5, seq=3, boot=3))
    assert sends == [(0, Join(6, "job", "w", 2, 3, 0, again=True, seq=5, step=50))]
    assert events == [RolledBack(0, 3, 6, lost=2)]


def test_an_answer_of_the_former_life_is_none() -> None:
    """It may acknowledge lost pushes, and show lost weights: both are requested again."""
    session = ready_session(1)
    send_push(session, clock=1)
    session.pull(1, now=0.0)
    deliver(session, refused(0, 5, Remedy.RESYNCHRONISE))
    deliver(session, rolled_back(0, 6, seq=0))
    assert deliver(session, ack(0, 3, 1)) == ([], [])
    assert deliver(session, weights(0, 5), frames=[bytes(1024)]) == ([], [])
    sends, _ = deliver(session, joined(0, 7, boot=2))
    assert [type(message) for _, message in sends] == [Push, Pull]


def test_it_is_told_once() -> None:
    """When the same life welcomes again, after a lease ran out, nothing more is lost."""
    session = ready_session(1)
    send_push(session, clock=1)
    deliver(session, ack(0, 3, 1))
    for request, events in ((4, [RolledBack(0, 2, 0, lost=1)]), (6, [])):
        session.greet_new_primary(0, 1.0)
        assert deliver(session, rolled_back(0, request, seq=0))[1] == events
        deliver(session, joined(0, request + 1, boot=2))


def test_a_shard_that_does_not_say_so_is_given_up() -> None:
    """It lost acknowledged pushes without reporting a rollback."""
    session = ready_session(2)
    send_push(session, clock=1)
    deliver(session, ack(1, 5, 1))
    session.greet_new_primary(1, 1.0)
    with pytest.raises(GiveUp, match="shard 1 came back at push 0 of w but had acknowledged 1"):
        deliver(session, welcome(1, 6, seq=0, boot=2))
