"""The estimator finds how many requests a link needs in flight, on a link played by the test.

The link is a line that one request occupies for `line_s`, and a way of `rtt_s` there and back. The
caller computes for `own_s` between two requests, and waits when too many are unanswered.
"""

import math

import pytest

from ps.session.flow_control import FlowControl, WindowEstimator
from shards.messages import Push


def played(
    pace: WindowEstimator, own_s: float, rtt_s: float, line_s: float, steps: int = 300
) -> list[float]:
    """The times at which the caller began each step; `pace` limits the requests in flight."""
    now = line_free = 0.0
    flying: list[tuple[int, float]] = []  # requests, and when they are answered
    begun = []
    for request in range(steps):
        begun.append(now)
        back = now + own_s
        while flying and flying[0][1] <= back:
            pace.record_answer(flying.pop(0)[0], back, listening=False)
        now = back
        pace.record_compute(own_s)
        while len(flying) >= (1 if pace.should_probe else pace.early):
            answered, now = flying[0][0], max(now, flying.pop(0)[1])
            pace.record_answer(answered, now, listening=True)
        line_free = max(line_free, now) + line_s
        pace.record_send(request, now)
        flying.append((request, line_free + rtt_s))
    return begun


def step_s(begun: list[float]) -> float:
    """The average time of a step, in seconds."""
    return (begun[-1] - begun[0]) / (len(begun) - 1)


@pytest.mark.parametrize(
    ("own_s", "rtt_s", "line_s"),
    [(0.1, 0.001, 0.001), (0.05, 0.1, 0.02), (0.01, 0.2, 0.004), (0.01, 0.1, 0.03), (0.2, 0.15, 0)],
)
def test_neither_caller_nor_line_waits(own_s: float, rtt_s: float, line_s: float) -> None:
    """A step takes the time of the slower of the two, with few more in flight than that needs."""
    pace = WindowEstimator(64)
    begun = played(pace, own_s, rtt_s, line_s)
    assert step_s(begun[150:]) == pytest.approx(max(own_s, line_s), rel=0.03)
    needed = (rtt_s + line_s) / max(own_s, line_s)
    assert pace.early <= math.ceil(1.25 * needed) + 1


@pytest.mark.parametrize(
    ("own_s", "rtt_s", "line_s", "most"), [(0.045, 0.28, 0.138, 1.05), (0.01, 0.2, 0.004, 2.0)]
)
def test_it_finds_out_soon(own_s: float, rtt_s: float, line_s: float, most: float) -> None:
    """A hundred steps take little longer than with the right number from the start; one more
    request in flight every eight answers made that 1.2 and 3.5 times.
    """
    took = step_s(played(WindowEstimator(64), own_s, rtt_s, line_s, steps=100))
    assert took < most * max(own_s, line_s)


def test_a_near_shard_wants_one() -> None:
    """Where answers come at once, weights are requested one step ahead."""
    pace = WindowEstimator(64)
    played(pace, 0.1, 0.001, 0.001)
    assert pace.early == 1


def test_no_more_than_is_allowed() -> None:
    """The limit of memory or the bound always holds."""
    pace = WindowEstimator(3)
    played(pace, 0.001, 0.5, 0.001)
    assert pace.early == 3


def test_it_follows_a_link_that_changes() -> None:
    """When the round trip grows, requests are sent earlier, within the window of the estimator."""
    pace = WindowEstimator(64)
    played(pace, 0.05, 0.02, 0.001)
    before = pace.early
    played(pace, 0.05, 0.4, 0.001, steps=1000)
    assert before == 1
    assert pace.early >= 8


def test_what_nobody_heard_is_not_believed() -> None:
    """An answer that waited while the caller computed does not measure the link."""
    pace = WindowEstimator(64)
    pace.record_compute(0.01)
    pace.record_send(1, 1.0)
    pace.record_answer(1, 6.0, listening=False)
    assert pace.early == 1


def test_what_the_caller_does_between_two_requests_counts_once() -> None:
    """Also when it calls for something else in between, which is not its own time."""
    pacing = FlowControl(None, 0.0)
    pacing.begin(1000, shared=False)
    came = []
    for kind, comes, goes in ((Push, 1.0, 1.0), (None, 3.0, 10.0), (Push, 11.0, 11.0)):
        came.append(pacing.enter(kind, comes))
        pacing.leave(goes)
    assert came == [1.0, 2.0, 1.0]
    assert pacing.pushes._compute_s == 1.0 + 0.25 * (3.0 - 1.0)
