"""Hundreds of workers at one shard: the cost of a transition, in instructions, not time."""

import sys
from types import FrameType
from typing import Any

import pytest

from shards.messages import Weights
from shards.shard_status import Standing
from tests.support.shard_dsl import Talk, pull, renew


def crowd(size: int) -> Talk:
    """A shard with `size` workers at clock 0, and `size` others that wait for them."""
    talk = Talk(bound=0, lease_s=10.0)
    for number in range(size):
        talk.enter(f"slow{number}", f"fast{number}")
        talk.shard.ledger.advance(f"fast{number}", 9)
        talk.say(pull(f"slow{number}", 1))
        talk.say(pull(f"fast{number}", 9))
    talk.now = 9.0
    for number in range(size):
        talk.say(renew(f"fast{number}"))
    return talk


def steps(act: Any) -> int:
    """The number of interpreter instructions that `act` takes."""
    taken = 0

    def count(frame: FrameType, event: str, _: object) -> Any:
        nonlocal taken
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        taken += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        act()
    finally:
        sys.settrace(before)
    return taken


@pytest.mark.skipif(sys.gettrace() is not None, reason="something else traces this run")
def test_leases_that_run_out_together_cost_no_more_each() -> None:
    """With eight times as many expiring and waiting workers the work is about eight times as much,
    not sixty-four times.
    """
    few, many = crowd(25), crowd(200)
    each = [steps(lambda talk=talk: talk.tick(10.0)) for talk in (few, many)]
    assert 1000 < each[0] < each[1] < 10 * each[0]


def test_leases_that_run_out_together_release_the_waiting_workers() -> None:
    """All waiting workers are answered, and the requests of the silent ones are dropped."""
    talk = crowd(100)
    said = talk.tick(10.0)
    assert [name for name, _ in said] == [f"fast{number}" for number in range(100)]
    assert all(isinstance(message, Weights) for _, message in said)
    standings = [talk.shard.ledger.entries[f"slow{number}"].standing for number in range(100)]
    assert standings == [Standing.EXPIRED] * 100
    assert (talk.shard.gate.waiting, talk.shard.ledger.floor) == ([], 9)
