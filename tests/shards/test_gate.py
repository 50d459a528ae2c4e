"""Bounded staleness: which requests pass, which wait, and which are released."""

import pytest

from shards.errors import BadMessage
from shards.gate import MAX_PARKED, Gate
from shards.messages import Join, Pull

INF = None


def pull(worker: str, clock: int, request: int = 1) -> Pull:
    return Pull(request, "job", worker, 0, 1, 1, clock, [])


@pytest.mark.parametrize(
    ("bound", "clock", "slowest", "passes"),
    [
        (0, 5, 5, True),
        (0, 6, 5, False),
        (3, 8, 5, True),
        (3, 9, 5, False),
        (3, 0, 5, True),
        (INF, 10**9, 0, True),
        (0, 10**9, None, True),
    ],
)
def test_the_bound(bound: int | None, clock: int, slowest: int | None, passes: bool) -> None:
    """A step at clock c waits until all have reached c - s; without bound or others, it passes."""
    assert Gate(bound).passes(clock, slowest) is passes


def test_a_request_is_parked_once() -> None:
    """A repetition keeps its place, and is answered at the address that it now comes from."""
    gate = Gate(0)
    assert gate.park(b"old", pull("w", 3), 1.0)
    assert not gate.park(b"new", pull("w", 3), 2.0)
    assert gate.park(b"new", pull("w", 4, request=2), 3.0)
    released = list(gate.release(lambda _: True))
    assert [(w.sender, w.message.request, w.since) for w in released] == [
        (b"new", 1, 1.0),
        (b"new", 2, 3.0),
    ]
    assert list(gate.release(lambda _: True)) == []


def test_every_request_below_the_limit_is_released() -> None:
    """Not only those exactly at the limit are released: in the order of clocks, then of arrival."""
    gate = Gate(1)
    for now, (worker, clock) in enumerate([("a", 7), ("b", 5), ("c", 4), ("d", 5)]):
        gate.park(worker.encode(), pull(worker, clock), float(now))
    slowest = 4
    released = [w.sender for w in gate.release(lambda m: gate.passes(m.clock, slowest))]
    assert released == [b"c", b"b", b"d"]
    assert [gate.waits(worker) for worker in "abcd"] == [True, False, False, False]


def test_releasing_one_can_keep_the_next_waiting() -> None:
    """Each is tested after the one before was dealt with: of two joins, one warms up."""
    gate = Gate(0)
    gate.park(b"a", Join(1, "job", "a", 0, 1, 0), 0.0)
    gate.park(b"b", Join(1, "job", "b", 0, 1, 0), 1.0)
    released = gate.release(lambda message: message.worker == "a" or not gate.waits("a"))
    admitted = next(released).message.worker
    gate.park(b"a", Join(2, "job", "a", 0, 1, 0), 2.0)
    assert (admitted, list(released)) == ("a", [])
    assert gate.waits("b")


def test_a_worker_that_is_gone_waits_no_more() -> None:
    """All its requests are dropped, and none of the others."""
    gate = Gate(0)
    for request in (1, 2):
        gate.park(b"gone", pull("gone", 9, request), 0.0)
        gate.park(b"here", pull("here", 9, request), 0.0)
    gate.forget("gone")
    gate.forget("nobody")
    assert [w.sender for w in gate.release(lambda _: True)] == [b"here", b"here"]


def test_a_worker_waits_a_bounded_number_of_times() -> None:
    """A worker that parks too many requests is refused; the others are not affected."""
    gate = Gate(0)
    for request in range(MAX_PARKED):
        assert gate.park(b"a", pull("greedy", 3, request), 1.0)
    with pytest.raises(BadMessage, match="greedy: expected at most 256 requests that wait"):
        gate.park(b"a", pull("greedy", 3, MAX_PARKED), 1.0)
    assert not gate.park(b"a", pull("greedy", 3, 0), 1.0)
    assert gate.park(b"b", pull("modest", 3), 1.0)
    assert len(gate.waiting) == MAX_PARKED + 1
