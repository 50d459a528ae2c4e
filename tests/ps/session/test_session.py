"""The session by plain calls: what it sends to each shard, and when; every answer is a literal."""

import msgspec
import numpy as np
import pytest

from ps.session.events import Departed, Pulled, Pushed, Ready, Unreachable
from ps.session.flow_control import PushTimes
from shards.errors import BadInput, BadMessage, DownpourError, Fenced, GiveUp, Mismatch
from shards.messages import (
    PROTOCOL,
    AskedPart,
    Hello,
    Join,
    Kind,
    Leave,
    Left,
    Parked,
    Part,
    Pull,
    Push,
    Remedy,
)
from shards.schema_digest import SCHEMA
from tests.support.session_replies import (
    Array,
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

# --- greeting -------------------------------------------------------------------------------------


def test_the_greeting() -> None:
    """Hello goes to all; Join to shard 0, which reports the clock; Join to the others; then it is
    ready.

    It continues after the largest push number that any shard knows, and at that shard's step. Each
    shard is told so, because none of the pushes that it lacks will come.
    """
    session = a_session()
    assert brief(session.hello(0.0)) == [
        (0, Hello(1, "job", "w", 2, PROTOCOL, SCHEMA)),
        (1, Hello(2, "job", "w", 2, PROTOCOL, SCHEMA)),
    ]
    assert deliver(session, welcome(1, 2, seq=3, boot=8)) == ([], [])
    assert deliver(session, welcome(0, 1, seq=5, boot=9)) == (
        [(0, Join(3, "job", "w", 2, 9, 0, seq=5, step=50))],
        [],
    )
    assert deliver(session, joined(0, 3, clock=41)) == (
        [(1, Join(4, "job", "w", 2, 8, 41, seq=5, step=50))],
        [],
    )
    assert deliver(session, joined(1, 4, clock=41)) == ([], [Ready(5, 50, 41, 10.0)])
    assert (session.seq, session.boots) == (5, (9, 8))


def test_the_largest_push_number_is_kept_while_a_shard_rolls_back() -> None:
    """Shard 0 counts push 5 as this worker's already when shard 1, which had it, returns without:
    another push 5 would be a repetition to shard 0."""
    session = a_session()
    session.hello(0.0)
    deliver(session, welcome(0, 1, seq=3))
    deliver(session, welcome(1, 2, seq=5))
    deliver(session, joined(0, 3, clock=3))
    assert deliver(session, refused(1, 4, Remedy.RESYNCHRONISE))[0] == [
        (1, Hello(5, "job", "w", 2, PROTOCOL, SCHEMA))
    ]
    back = msgspec.structs.replace(welcome(1, 5, seq=2, boot=7), rolled_back=True)
    assert deliver(session, back)[0] == [(1, Join(6, "job", "w", 2, 7, 3, seq=5, step=50))]
    assert deliver(session, joined(1, 6, clock=3))[1] == [Ready(5, 50, 3, 10.0)]


def test_a_push_that_a_shard_skipped_is_not_expected_of_it() -> None:
    """When that shard is greeted again, the worker reports where it began, so no gap opens."""
    session = a_session()
    session.hello(0.0)
    deliver(session, welcome(0, 1, seq=3))
    deliver(session, welcome(1, 2, seq=5))
    deliver(session, joined(0, 3, clock=3))
    deliver(session, joined(1, 4, clock=3))
    assert deliver(session, refused(0, 0, Remedy.RESYNCHRONISE))[0] == [
        (0, Hello(5, "job", "w", 2, PROTOCOL, SCHEMA))
    ]
    back = msgspec.structs.replace(welcome(0, 5, seq=2, boot=7), rolled_back=True)
    assert deliver(session, back)[0] == [
        (0, Join(6, "job", "w", 2, 7, 3, again=True, seq=5, step=50))
    ]


def test_a_worker_starts_at_the_largest_clock_that_a_shard_admits_it_at() -> None:
    """Shard 1 admits it at a later clock than shard 0: it is ready once shard 0 has that clock,
    too.
    """
    session = a_session()
    session.hello(0.0)
    deliver(session, welcome(0, 1))
    deliver(session, welcome(1, 2))
    deliver(session, joined(0, 3, clock=41))
    assert deliver(session, joined(1, 4, clock=44)) == (
        [(0, Join(5, "job", "w", 2, 1, 44))],
        [],
    )
    assert deliver(session, joined(0, 5, clock=44)) == ([], [Ready(0, 0, 44, 10.0)])


def test_a_shard_that_admits_a_worker_again_at_a_later_clock_is_believed() -> None:
    """The other shards are joined at that clock, too, and the next pull is for it."""
    session = ready_session()
    session.hello(0.0)
    deliver(session, welcome(0, 5))
    joins, _ = deliver(session, welcome(1, 6))
    assert joins == [(1, Join(8, "job", "w", 2, 1, 0, again=True))]
    deliver(session, joined(0, 7, clock=0))
    assert deliver(session, joined(1, 8, clock=4))[0] == [
        (0, Join(9, "job", "w", 2, 1, 4, again=True))
    ]
    _, sends = session.pull(0, now=0.0)
    assert [send.message.clock for send in sends if isinstance(send.message, Pull)] == [4, 4]


def test_a_greeting_whose_lease_ran_out() -> None:
    """While shard 0 deferred the worker, its lease at shard 1 expired: only shard 1 is greeted
    again.
    """
    session = a_session()
    session.hello(0.0)
    deliver(session, welcome(0, 1))
    deliver(session, welcome(1, 2))
    assert deliver(session, Parked(3, 0, 1, 0), now=60.0) == ([], [])
    assert deliver(session, joined(0, 3, clock=5), now=61.0)[0] == [
        (1, Join(4, "job", "w", 2, 1, 5))
    ]
    assert deliver(session, refused(1, 4, Remedy.RESYNCHRONISE), now=61.1) == (
        [(1, Hello(5, "job", "w", 2, PROTOCOL, SCHEMA))],
        [],
    )
    assert deliver(session, welcome(1, 5))[0] == [(1, Join(6, "job", "w", 2, 1, 5))]
    assert deliver(session, joined(1, 6, clock=5))[1] == [Ready(0, 0, 5, 10.0)]


def test_a_refused_renewal_makes_a_worker_greet() -> None:
    """A worker with nothing outstanding greets a shard's next life; once, and not while leaving."""
    session = ready_session()
    assert deliver(session, refused(1, 0, Remedy.RESYNCHRONISE))[0] == [
        (1, Hello(5, "job", "w", 2, PROTOCOL, SCHEMA))
    ]
    assert deliver(session, refused(1, 0, Remedy.RESYNCHRONISE)) == ([], [])
    session = ready_session()
    session.leave(0.0)
    assert deliver(session, refused(1, 0, Remedy.RESYNCHRONISE)) == ([], [])


def test_a_shard_that_lacks_what_all_had_acknowledged_is_named() -> None:
    """A new life does not start, unless the shard reports a rollback."""
    session = a_session()
    session.hello(0.0)
    whole = welcome(1, 2, seq=120)
    deliver(session, msgspec.structs.replace(whole, acknowledged=118))
    with pytest.raises(GiveUp, match=r"pushes of w: shard 0 has 59, but all .* acknowledged 118"):
        deliver(session, welcome(0, 1, seq=59))
    session = a_session()
    session.hello(0.0)
    deliver(session, msgspec.structs.replace(whole, acknowledged=118))
    joins, _ = deliver(session, msgspec.structs.replace(welcome(0, 1, seq=59), rolled_back=True))
    assert joins == [(0, Join(3, "job", "w", 2, 1, 0, seq=120, step=1200))]


# --- requests -------------------------------------------------------------------------------------


def test_a_pull() -> None:
    """It asks every shard, and is complete when each has answered; unexpected answers change
    nothing.
    """
    session = ready_session()
    request, sends = session.pull(3, now=0.0)
    assert brief(sends) == [
        (0, Pull(6, "job", "w", 2, 1, 1, 3, [AskedPart("net")])),
        (1, Pull(6, "job", "w", 2, 1, 1, 3, [AskedPart("net")])),
    ]
    assert deliver(session, weights(1, 6, 8, waited_s=0.5), frames=[bytes(1024)]) == ([], [])
    assert deliver(session, weights(1, 6, 9), frames=[bytes(1024)]) == ([], []), "a second answer"
    assert deliver(session, weights(0, 77), frames=[bytes(1024)]) == ([], []), "to no question"
    assert deliver(session, weights(0, 6, 7), frames=[bytes(1024)]) == (
        [],
        [
            Pulled(
                request, (7, 8), ((bytes(1024),), (bytes(1024),)), 0.5, ("net",), {"net": Kind.F4}
            )
        ],
    )
    assert deliver(session, weights(0, 6, 7), frames=[bytes(1024)]) == ([], [])
    assert session.next_deadline is None


def test_a_push() -> None:
    """Each shard is sent its part, as a view; it is pushed once both have acknowledged it."""
    session = ready_session()
    gradient: Array = np.arange(512, dtype=np.float32)
    request, sends = session.push(
        gradient,
        (5, 6),
        clock=4,
        step=9,
        steps=2,
        samples=64,
        loss=0.5,
        times=PushTimes(0.125, 0.25, 0.5, 0.75, 1.0),
        now=1.0,
    )
    told = (2, 64)
    assert brief(sends) == [
        (
            0,
            Push(
                5,
                "job",
                "w",
                2,
                1,
                1,
                1,
                4,
                9,
                *told,
                5,
                [Part("net", Kind.F4, 0, 256)],
                0.5,
                0.125,
                0.25,
                0,
                0.5,
                0.75,
                1.0,
            ),
        ),
        (
            1,
            Push(
                5,
                "job",
                "w",
                2,
                1,
                1,
                1,
                4,
                9,
                *told,
                6,
                [Part("net", Kind.F4, 256, 512)],
                0.5,
                0.125,
                0.25,
                0,
                0.5,
                0.75,
                1.0,
            ),
        ),
    ]
    assert all(np.shares_memory(gradient, send.frames[0]) for send in sends)
    assert [send.frames[0][0] for send in sends] == [0, 256]
    assert session.pending_pushes == 1
    assert deliver(session, ack(1, 5, 1)) == ([], [])
    assert session.pending_pushes == 1
    assert deliver(session, ack(0, 5, 1), now=1.5) == ([], [Pushed(request, 1, 5, 0, 0.5, (9, 9))])
    assert session.pending_pushes == 0


def test_leaving() -> None:
    """It has departed once every shard confirms it."""
    session = ready_session()
    assert brief(session.leave(0.0)) == [
        (0, Leave(5, "job", "w", 2, 1)),
        (1, Leave(5, "job", "w", 2, 1)),
    ]
    assert deliver(session, Left(5, 1, 1)) == ([], [])
    assert deliver(session, Left(5, 0, 1)) == ([], [Departed()])


@pytest.mark.parametrize(
    ("gradient", "versions", "text"),
    [
        (np.zeros(511, np.float32), (0, 0), r"expected float32 of shape \(512,\), got float32 of"),
        (np.zeros(512, np.float64), (0, 0), r"expected float32 of shape \(512,\), got float64 of"),
        (np.zeros(512, ">f4"), (0, 0), r"expected float32 of shape \(512,\), got >f4 of"),
        (np.zeros(1024, np.float32)[::2], (0, 0), "expected a contiguous array, got strides"),
        (np.zeros(512, np.float32), (0,), "expected 2 read versions, one per shard, got 1"),
    ],
)
def test_a_gradient_that_does_not_fit(
    gradient: Array, versions: tuple[int, ...], text: str
) -> None:
    """It is refused before it takes a number: the next push is still the first."""
    session = ready_session()
    with pytest.raises(BadInput, match="push( to table net)?: " + text):
        session.push(
            gradient,
            versions,
            clock=1,
            step=1,
            steps=1,
            samples=1,
            loss=0,
            now=0.0,
        )
    assert (session.seq, session.pending_pushes) == (0, 0)


def test_weights_that_do_not_fit() -> None:
    """A frame with a length that differs from the shard's keys is rejected."""
    session = ready_session(1)
    session.pull(0, now=0.0)
    with pytest.raises(BadMessage, match=r"weights: keys \[0, 512\) as f4 take 2048 bytes, got 9"):
        session.receive(0, weights(0, 4, floats=512), [bytes(9)], 0.0)


@pytest.mark.parametrize(
    ("remedy", "error"),
    [
        (Remedy.FENCED, Fenced),
        (Remedy.BAD_INPUT, BadInput),
        (Remedy.BAD_MESSAGE, BadMessage),
        (Remedy.MISMATCH, Mismatch),
        (Remedy.GIVE_UP, GiveUp),
    ],
)
def test_a_final_refusal_is_raised(remedy: Remedy, error: type[DownpourError]) -> None:
    """As the error that it stands for, with the shard's own words."""
    session = a_session()
    session.hello(0.0)
    with pytest.raises(error, match=r"^because$"):
        deliver(session, refused(0, 1, remedy))


def test_a_message_that_a_shard_cannot_read_is_told() -> None:
    """The shard cannot name the request that it refuses, but the error is raised at once."""
    session = a_session()
    session.hello(0.0)
    assert deliver(session, refused(0, 0, Remedy.RESYNCHRONISE)) == ([], []), "a renewal's"
    with pytest.raises(Mismatch, match=f"protocol {PROTOCOL}, got one that cannot read .* because"):
        deliver(session, refused(0, 0, Remedy.BAD_MESSAGE))
    session = ready_session()
    with pytest.raises(BadMessage, match="because"):
        deliver(session, refused(0, 0, Remedy.BAD_MESSAGE))


def test_later_is_later() -> None:
    """A shard that has no weights yet is asked again after its wait."""
    session = a_session(1)
    session.hello(0.0)
    assert deliver(session, refused(0, 1, Remedy.RETRY), now=0.1) == ([], [])
    assert brief(session.tick(1.0)) == [(0, Hello(1, "job", "w", 2, PROTOCOL, SCHEMA))]


def test_what_a_life_says_is_numbered_once() -> None:
    """No request number is used twice, because a late answer would be taken for another's."""
    session = ready_session(1)
    sends = [*send_push(session), *session.pull(1, 0.0)[1], *session.leave(0.0)]
    numbers = [send.message.request for send in sends]
    assert len(set(numbers)) == 3
    assert min(numbers) > 2, "1 and 2 were the greeting"


def test_silence_is_named() -> None:
    """The error names the shard, the unanswered message, and the time."""
    session = a_session(1, patience_s=3.0)
    session.hello(0.0)
    for now in (1.0, 2.0, 3.0):
        session.tick(now)
    with pytest.raises(Unreachable, match=r"^shard 0 has not answered w's hello for 3 s$"):
        session.tick(4.0)


def test_an_endpoint_that_leads_to_another_shard() -> None:
    """Weights would be assembled in the wrong places: the order of the endpoints is wrong."""
    session = a_session()
    session.hello(0.0)
    with pytest.raises(BadInput, match="endpoint of shard 0: expected that shard"):
        session.receive(0, welcome(1, 1), (), 0.0)
