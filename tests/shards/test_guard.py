"""The poison guard: what is refused, what is counted, and who is not heard any more."""

from math import inf, nan

import numpy as np
import pytest

import ps
from shards import codec
from shards.errors import BadInput, GiveUp
from shards.guard import Guard, Quarantine
from shards.ledger import Ledger
from shards.messages import PROTOCOL, Ack, Hello, Join, Kind, Push, Refusal, Remedy
from shards.shard import Shard
from shards.state import Saved
from shards.transitions import Arrival

TABLE = ps.DenseTable("net", (ps.TensorSpec("w", (256,)),))


def shard_of(guard: Guard) -> Shard:
    """One with zeros, and workers a and b."""
    (spec,) = ps.shard_specs(TABLE, guard=guard)
    shard = Shard(spec, 1)
    shard.restore(Saved(0, 0, 0, Ledger()), np.zeros(256, np.float32), {})
    for worker in "ab":
        shard.handle(b"", Hello(1, spec.job, worker, 0, PROTOCOL, spec.build), (), 0.0)
        shard.handle(b"", Join(2, spec.job, worker, 0, 1, 0), (), 0.0)
    return shard


def push(shard: Shard, worker: str, value: float, seq: int = 1) -> Arrival:
    spec = shard.spec
    keys = codec.flatten(spec.map.ranges[0])
    message = Push(
        *(9, spec.job, worker, 0, 1, spec.map.epoch, "net", seq, seq, seq, 1, 8, 0, Kind.F4, keys),
        *(0.5, 0.0, 0.0),
    )
    return Arrival(worker.encode(), message, [np.full(256, value, np.float32).tobytes()])


def told(shard: Shard, *arrivals: Arrival) -> dict[bytes, str]:
    """What each sender is told: `ack`, or what it is refused with."""
    return {
        answer.to: answer.message.text if isinstance(answer.message, Refusal) else "ack"
        for answer in shard.handle_together(arrivals, 0.0)
        if isinstance(answer.message, Ack | Refusal)
    }


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_what_is_not_finite_is_refused_alone(value: float) -> None:
    """Beside a good push in one pass too; the good one is applied."""
    shard = shard_of(Guard())
    answers = told(shard, push(shard, "a", 1.0), push(shard, "b", value))
    assert answers[b"a"] == "ack"
    assert answers[b"b"].startswith("push 1 of worker b holds NaN or infinity: expected finite")
    weights, _ = shard.held.copy()
    np.testing.assert_allclose(weights, -0.01)


def test_a_norm_beyond_the_cap_is_refused_alone() -> None:
    """The norm of 256 ones is 16: at the cap it passes, above it not."""
    shard = shard_of(Guard(max_norm=16.0))
    answers = told(shard, push(shard, "a", 1.0), push(shard, "b", 2.0))
    assert answers[b"a"] == "ack"
    assert answers[b"b"].startswith("push 1 of worker b has norm 32: expected at most 16")
    assert shard.version == 1


def test_a_worker_that_goes_on_is_quarantined() -> None:
    """After so many refusals nothing of it is applied, be it good; the others go on."""
    shard = shard_of(Guard(quarantine_after=3))
    for _ in range(3):
        assert "NaN" in told(shard, push(shard, "b", nan))[b"b"]
    last = shard.handle_together([push(shard, "a", 1.0), push(shard, "b", 1.0)], 0.0)
    kinds = {answer.to: answer.message for answer in last}
    assert isinstance(kinds[b"a"], Ack)
    refusal = kinds[b"b"]
    assert isinstance(refusal, Refusal)
    assert refusal.remedy is Remedy.GIVE_UP
    assert refusal.text == "worker b is in quarantine: 3 of its gradients were refused"
    assert shard.version == 1


def test_the_count_is_a_workers_own() -> None:
    """And the limit is the first that is too many."""
    quarantine = Quarantine(Guard(quarantine_after=2))
    quarantine.count("a")
    quarantine.count("b")
    quarantine.check("a")
    quarantine.count("a")
    with pytest.raises(GiveUp, match="worker a is in quarantine: 2 of its gradients"):
        quarantine.check("a")
    quarantine.check("b")


@pytest.mark.parametrize("max_norm", [-1.0, nan])
def test_a_cap_that_makes_no_sense(max_norm: float) -> None:
    """It is refused when the job is described."""
    with pytest.raises(BadInput, match="guard: expected a max_norm above 0"):
        ps.shard_specs(TABLE, guard=Guard(max_norm=max_norm))
