"""The session when something fails: silence, gaps, lost leases, restarted shards."""

import weakref
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from ps.session.events import Pulled, Pushed, Unreachable, Usurped
from ps.session.session import Session
from shards.errors import BadInput, GiveUp
from shards.messages import PROTOCOL, Ack, Hello, Join, Parked, Pull, Push, Remedy
from shards.schema_digest import SCHEMA
from tests.support.session_replies import (
    TABLE,
    a_session,
    ack,
    brief,
    deliver,
    joined,
    ready_session,
    refused,
    send_push,
    weights,
    welcome,
)


def clocks(sends: Sequence[tuple[int, object]]) -> list[tuple[int, str, int]]:
    """Shard, kind and clock of each message sent."""
    return [
        (shard, type(message).__name__, message.clock)
        for shard, message in sends
        if isinstance(message, Push | Pull | Join)
    ]


# --- silence --------------------------------------------------------------------------------------


def test_silence_is_answered_by_repeating_ever_later() -> None:
    """Repeats after 1 s, then at twice the wait, up to eight times: a slow link is not flooded."""
    session = ready_session(1, patience_s=100.0)
    send_push(session, now=0.0)
    repeated: list[float] = []
    while len(repeated) < 7:
        now = session.next_deadline
        assert now is not None
        assert session.tick(now - 0.001) == []
        ((shard, message),) = brief(session.tick(now))
        assert (shard, type(message)) == (0, Push)
        repeated.append(now)
    assert repeated == [1.0, 3.0, 7.0, 15.0, 23.0, 31.0, 39.0]


def test_a_slow_link_is_given_its_time() -> None:
    """After pushes that take five seconds the wait rises to ten, but at most a third of the
    patience.

    A single slow push may have met an outage, and at most doubles the next wait.
    """
    for patience_s, first in ((100.0, [1.0, 2.0, 4.0, 8.0, 10.0]), (15.0, [1.0, 2.0, 4.0, 5.0])):
        session = ready_session(1, patience_s=patience_s)
        for clock, wait_s in enumerate(first, start=1):
            now = 100.0 * clock
            (send,) = send_push(session, now=now, clock=clock)
            assert session.next_deadline == now + wait_s
            deliver(session, ack(0, send.message.request, clock), now=now + 5.0)


def test_a_shard_is_given_up_when_it_stays_silent() -> None:
    """Only while it owes an answer, and only the shard that does."""
    session = ready_session(2, patience_s=6.0)
    _, _ = session.pull(0, now=100.0)
    deliver(session, weights(0, 6), now=100.1, frames=[bytes(1024)])
    for now in (101.0, 103.0, 105.0):
        assert [shard for shard, _ in brief(session.tick(now))] == [1]
    with pytest.raises(Unreachable, match="shard 1 has not answered w's pull for 6 s"):
        session.tick(107.0)


def test_a_driver_that_was_away_gives_a_shard_its_time_again() -> None:
    """A push lost at the start of a minute's computing is repeated before a shard is given up."""
    session = ready_session(1)
    send_push(session, now=0.0)
    for now in (60.0, 62.0, 66.0, 74.0, 82.0):
        assert len(session.tick(now)) == 1
    with pytest.raises(Unreachable):
        session.tick(90.0)


def test_a_driver_that_is_stopped_again_and_again_loses_no_shard() -> None:
    """Of four absences of twenty seconds only the intended waits count: 1, 2, 4 and 8 s."""
    session = ready_session(1)
    send_push(session, now=0.0)
    for now in (20.0, 40.0, 60.0, 80.0):
        assert len(session.tick(now)) == 1


def test_being_parked_is_no_silence() -> None:
    """A shard that answers "wait" is alive, however often it does."""
    session = ready_session(1, patience_s=6.0)
    session.pull(9, now=0.0)
    for second in range(2, 60, 2):
        session.tick(float(second))
        deliver(session, Parked(4, 0, 1, 3), now=second + 0.1)
    (event,) = deliver(session, weights(0, 4, floats=512), now=60.0, frames=[bytes(2048)])[1]
    assert isinstance(event, Pulled)


def test_a_quick_shard_may_be_slow_to_be_waited_for() -> None:
    """The minute of computing before a pull that is then parked does not count as silence."""
    session = ready_session(1)
    session.pull(0, now=0.0)
    deliver(session, weights(0, 4, floats=512), now=0.1, frames=[bytes(2048)])
    session.pull(1, now=60.0)
    assert len(session.tick(61.0)) == 1


# --- another client of the name -------------------------------------------------------------------


def known(shard: int, request: int, seq: int) -> Ack:
    """An acknowledgement of a push that the shard already has."""
    return msgspec.structs.replace(ack(shard, request, seq), duplicate=True)


def test_a_push_that_left_once_and_is_known_is_anothers() -> None:
    """Two clients use one worker name: this one learns that its push was not applied."""
    session = ready_session(1)
    (send,) = send_push(session)
    usurped, _ = deliver(session, known(0, send.message.request, 1))[1]
    assert isinstance(usurped, Usurped)
    assert usurped.text.startswith("worker w: another client uses incarnation 2 of this worker:")


def test_a_push_may_be_known_that_was_repeated() -> None:
    """After silence, and after a cut."""
    session = ready_session(1)
    (send,) = send_push(session)
    session.tick(5.0)
    (event,) = deliver(session, known(0, send.message.request, 1))[1]
    assert isinstance(event, Pushed)
    (send,) = send_push(session, clock=2)
    session.resume_link(0, 6.0)
    (event,) = deliver(session, known(0, send.message.request, 2))[1]
    assert isinstance(event, Pushed)


# --- gradients that are refused -----------------------------------------------------------------


def test_a_part_that_is_refused_is_made_up_for_by_none() -> None:
    """The driver learns of the first refusal; the shards get that push without values."""
    session = ready_session(2)
    (first, second) = send_push(session)
    request = first.message.request
    with pytest.raises(BadInput, match=r"^shard 0: because$"):
        deliver(session, refused(0, request, Remedy.BAD_INPUT))
    assert deliver(session, refused(1, request, Remedy.BAD_INPUT)) == ([], [])
    for shard, send in enumerate(session.tick(0.0)):
        bare = msgspec.structs.replace((first, second)[shard].message, parts=[])
        assert (send.shard, send.message) == (shard, bare)
        assert send.frames == ()
    assert deliver(session, ack(0, request, 1)) == ([], [])
    (event,) = deliver(session, ack(1, request, 1))[1]
    assert isinstance(event, Pushed)
    assert session.pending_pushes == 0


def test_memory_that_was_refused_is_not_written_while_a_copy_is_on_its_way() -> None:
    """A late copy of the push may refer to it, until the shard has the replacement."""
    session = ready_session(1)
    gradient = TABLE.empty()
    (send,) = send_push(session, gradient=gradient)
    request = send.message.request
    del send
    with pytest.raises(BadInput):
        deliver(session, refused(0, request, Remedy.BAD_INPUT))
    held = weakref.ref(gradient)
    del gradient
    assert held() is not None
    deliver(session, ack(0, request, 1))
    assert held() is None


# --- links that were cut --------------------------------------------------------------------------


def test_a_link_that_was_renewed_is_told_all_that_is_outstanding() -> None:
    """Everything to that shard is repeated in the order asked, and its waits start afresh."""
    session = ready_session(2)
    send_push(session, now=0.0)
    session.pull(1, now=0.5)
    deliver(session, ack(0, 5, 1), now=0.6)
    assert [type(message) for _, message in brief(session.resume_link(0, 0.7))] == [Pull]
    again = brief(session.resume_link(1, 0.9))
    assert [(shard, type(message)) for shard, message in again] == [(1, Push), (1, Pull)]
    assert session.tick(1.6) == []
    assert [shard for shard, _ in brief(session.tick(1.9))] == [0, 1, 1]


def deadlines(session: Session, until: float) -> list[tuple[float, str]]:
    """When the session sends something again before `until`, if nothing is answered, and what."""
    said: list[tuple[float, str]] = []
    while session.next_deadline is not None and session.next_deadline < until:
        at = session.next_deadline
        said += [(round(at, 3), type(send.message).__name__) for send in session.tick(at)]
    return said


def test_a_lost_message_to_another_copy_is_soon_sent_again() -> None:
    """Whatever is lost first, the Hello, the Join or the push: it is sent again after 0.1 s, where
    others are after a second. So half a second after the announcement all is acknowledged.
    """
    session = ready_session(1)
    send_push(session, now=99.0)
    deliver(session, ack(0, 3, 1), now=99.01)
    send_push(session, clock=2, now=100.0)
    ((_, hello),) = brief(session.greet_new_primary(0, now=200.0))
    assert deadlines(session, 200.15) == [(200.1, "Hello")]
    (((_, join),), _) = deliver(session, welcome(0, hello.request, seq=1, boot=8), now=200.15)
    assert deadlines(session, 200.3) == [(200.25, "Join")]
    (((_, push),), _) = deliver(session, joined(0, join.request, boot=8), now=200.3)
    assert deadlines(session, 200.45) == [(200.4, "Push")]
    _, events = deliver(session, ack(0, push.request, 2, boot=8), now=200.45)
    assert [type(event) for event in events] == [Pushed]


def test_what_another_copy_is_slow_to_answer_is_not_sent_too_often() -> None:
    """Its greeting is repeated ten times a second for two seconds, and then as any message; a push
    at intervals that double, and on a slow link after two of its pushes' durations.
    """
    session = ready_session(1)
    ((_, hello),) = brief(session.greet_new_primary(0, now=200.0))
    times = [at for at, _ in deadlines(session, 205.0)]
    assert len([at for at in times if at < 202.05]) == 20
    assert len([at for at in times if at > 202.05]) <= 5
    for push_s, after in ((0.01, [0.1, 0.3, 0.7, 1.5]), (0.3, [0.6, 1.8])):
        session = ready_session(1)
        send_push(session, now=99.0)
        deliver(session, ack(0, 3, 1), now=99.0 + push_s)
        send_push(session, clock=2, now=100.0)
        ((_, hello),) = brief(session.greet_new_primary(0, now=200.0))
        (((_, join),), _) = deliver(session, welcome(0, hello.request, seq=1, boot=8), now=200.0)
        deliver(session, joined(0, join.request, boot=8), now=200.0)
        assert [at for at, _ in deadlines(session, 202.0)] == [200.0 + s for s in after]


def test_over_a_renewed_link_greetings_come_first_as_ever() -> None:
    """Before it has joined, a worker sends nothing else; an unregistered shard is greeted."""
    session = a_session(1)
    session.hello(0.0)
    assert [type(message) for _, message in brief(session.resume_link(0, 0.5))] == [Hello]
    session = ready_session(1)
    send_push(session)
    session.greet_new_primary(0, 1.0)
    assert [type(message) for _, message in brief(session.resume_link(0, 1.5))] == [Hello]


# --- gaps -----------------------------------------------------------------------------------------


def test_a_gap_is_mended_once() -> None:
    """Every push from the missing one on is sent again, in order; the refusals of later pushes,
    which state the same gap, cause nothing more.
    """
    session = ready_session(1)
    for clock in (1, 2, 3):
        send_push(session, clock=clock)
    sends, _ = deliver(session, refused(0, 4, Remedy.GAP, expected=1), now=0.2)
    assert [(s, m.seq) for s, m in sends if isinstance(m, Push)] == [(0, 1), (0, 2), (0, 3)]
    assert deliver(session, refused(0, 5, Remedy.GAP, expected=1), now=0.2) == ([], [])
    deliver(session, ack(0, 3, 1), now=0.3)
    sends, _ = deliver(session, refused(0, 5, Remedy.GAP, expected=2), now=0.4)
    assert [(s, m.seq) for s, m in sends if isinstance(m, Push)] == [(0, 2), (0, 3)]


# --- resynchronising ------------------------------------------------------------------------------


def test_a_restarted_shard_is_greeted_and_sent_everything_again() -> None:
    """Once, however many requests it refuses; addressed to its new life; in the order asked."""
    session = ready_session()
    send_push(session, clock=1)
    session.pull(1, now=0.0)
    hello = (1, Hello(8, "job", "w", 2, PROTOCOL, SCHEMA))
    assert deliver(session, refused(1, 5, Remedy.RESYNCHRONISE)) == ([hello], [])
    assert deliver(session, refused(1, 7, Remedy.RESYNCHRONISE)) == ([], [])
    assert send_push(session, clock=2)[0].shard == 0, "nothing goes there before it has joined"
    assert deliver(session, welcome(1, 8, boot=2))[0] == [
        (1, Join(10, "job", "w", 2, 2, 0, again=True))
    ]
    sends, events = deliver(session, joined(1, 10, boot=2))
    assert [(s, type(m), m.boot) for s, m in sends if isinstance(m, Push | Pull)] == [
        (1, Push, 2),
        (1, Pull, 2),
        (1, Push, 2),
    ]
    assert events == []
    assert deliver(session, refused(1, 5, Remedy.RESYNCHRONISE))[0] != [], "refused anew"


def test_a_shard_that_has_forgotten_is_given_up() -> None:
    """A shard that returns without a push that it had acknowledged cannot be repaired from here."""
    session = ready_session(1)
    send_push(session, clock=1)
    deliver(session, ack(0, 3, 1))
    session.pull(1, now=0.0)
    deliver(session, refused(0, 5, Remedy.RESYNCHRONISE))
    with pytest.raises(GiveUp, match="shard 0 came back at push 0 of w but had acknowledged 1:"):
        deliver(session, welcome(0, 6, seq=0, boot=2))


def test_an_acknowledgement_may_overtake_a_welcome() -> None:
    """Found by simulation: a push in flight is applied after the greeting was answered, and its
    acknowledgement arrives before that answer, which then seems to have forgotten it.
    """
    session = ready_session(1)
    send_push(session, clock=1)
    session.pull(1, now=0.0)
    deliver(session, refused(0, 5, Remedy.RESYNCHRONISE))
    deliver(session, ack(0, 3, 1))
    assert deliver(session, welcome(0, 6, seq=0))[0] == [
        (0, Join(7, "job", "w", 2, 1, 1, again=True, seq=1, step=1))
    ]


def test_a_worker_that_was_overtaken_counts_on_beside_the_others() -> None:
    """Its lease ran out and the others are at clock 100: every clock it sends moves up, at all
    shards.

    Without this the others would wait at the bound until it had taken every step that it missed.
    The other shard learns it from a Join; the pull is requested again under a new number, because
    an answer to its old clock may have passed a gate that the new one must not.
    """
    session = ready_session()
    send_push(session, clock=1)
    asked, _ = session.pull(1, now=0.0)
    deliver(session, weights(1, 7), frames=[bytes(1024)])
    deliver(session, refused(0, 5, Remedy.RESYNCHRONISE))
    deliver(session, welcome(0, 8))
    sends, _ = deliver(session, joined(0, 9, clock=100))
    assert clocks(sends) == [(1, "Join", 100), (1, "Pull", 100), (0, "Push", 100), (0, "Pull", 100)]
    pulls = {message.request for _, message in sends if isinstance(message, Pull)}
    assert len(pulls) == 1
    assert 7 not in pulls
    (pull,) = pulls
    assert deliver(session, weights(0, 7), frames=[bytes(1024)]) == ([], []), (
        "the old one is nothing"
    )
    deliver(session, weights(0, pull), frames=[bytes(1024)])
    _, (pulled,) = deliver(session, weights(1, pull), frames=[bytes(1024)])
    assert isinstance(pulled, Pulled)
    assert pulled.request == asked
    assert clocks(brief(send_push(session, clock=2)))[0] == (0, "Push", 101)
    assert clocks(brief(session.pull(2, 0.0)[1])) == [(0, "Pull", 101), (1, "Pull", 101)]


def test_a_step_that_was_let_through_is_counted_before_it_is_pushed() -> None:
    """Found by simulation: a worker that is overtaken while it computes still pushes that step.

    So it continues level with the others with that step done; otherwise it would end up one ahead
    of them without having passed a gate.
    """
    session = ready_session(1)
    session.pull(0, now=0.0)
    _, (pulled,) = deliver(session, weights(0, 4, floats=512), frames=[bytes(2048)])
    assert isinstance(pulled, Pulled)
    session.pull(1, now=0.0)
    deliver(session, refused(0, 6, Remedy.RESYNCHRONISE))
    deliver(session, welcome(0, 7))
    sends, _ = deliver(session, joined(0, 8, clock=100))
    assert clocks(sends) == [(0, "Pull", 100)]
    assert clocks(brief(send_push(session, clock=1))) == [(0, "Push", 100)]


def test_a_worker_that_was_not_overtaken_keeps_its_clock() -> None:
    """Its pushes in flight count: shard 0 has not applied them yet."""
    session = ready_session()
    send_push(session, clock=1)
    send_push(session, clock=2)
    deliver(session, refused(0, 5, Remedy.RESYNCHRONISE))
    deliver(session, welcome(0, 7))
    sends, _ = deliver(session, joined(0, 8, clock=1))
    assert clocks(sends) == [(0, "Push", 1), (0, "Push", 2)]


def test_frames_are_sent_again_as_they_are() -> None:
    """A repeated push has the same array; the driver must not change it before it is acked."""
    session = ready_session(1)
    first = send_push(session)[0].frames[0]
    (again,) = session.tick(1.0)
    assert np.shares_memory(first, again.frames[0])


# --- another copy serves --------------------------------------------------------------------------


def test_another_copy_is_greeted_and_sent_what_was_not_acknowledged() -> None:
    """The greeting is repeated soon, as the copy may not have been ready. The earlier silence was
    not its own.
    """
    session = ready_session(1, patience_s=30.0)
    send_push(session, now=100.0)
    ((shard, hello),) = brief(session.greet_new_primary(0, now=200.0))
    assert (shard, type(hello)) == (0, Hello)
    assert brief(session.tick(200.05)) == []
    assert brief(session.tick(200.1)) == [(0, hello)]
    (((_, join),), _) = deliver(session, welcome(0, hello.request, boot=8), now=200.2)
    assert isinstance(join, Join)
    (((_, push),), _) = deliver(session, joined(0, join.request, boot=8), now=200.3)
    assert isinstance(push, Push)
    assert (push.seq, push.boot) == (1, 8)
