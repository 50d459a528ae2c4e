"""The poison guard: what is refused, what is counted, and who is not heard any more."""

from math import inf, nan

import numpy as np
import pytest
from msgspec.structs import replace

import ps
from shards import wire_format
from shards.envelopes import Arrival
from shards.errors import BadInput
from shards.gradient_guard import Guard
from shards.ledger import Ledger
from shards.messages import PROTOCOL, Ack, Hello, Install, Join, Kind, Push, Refusal, Remedy
from shards.parameters import SavedProgress
from shards.shard import Shard
from tests.shards import shard_dsl
from tests.shards.shard_dsl import SIZE
from tests.shards.test_replica_moves import Copies

TABLE = ps.DenseTable("net", (ps.TensorSpec("w", (256,)),))


def shard_of(guard: Guard) -> Shard:
    """One with zeros, and workers a and b."""
    (spec,) = ps.shard_specs(TABLE, guard=guard)
    shard = Shard(spec, 1)
    shard.restore(SavedProgress(0, 0, 0, Ledger()), np.zeros(256, np.float32), {})
    for worker in "ab":
        shard.handle(b"", Hello(1, spec.job, worker, 0, PROTOCOL, spec.build), (), 0.0)
        shard.handle(b"", Join(2, spec.job, worker, 0, 1, 0), (), 0.0)
    return shard


def push(shard: Shard, worker: str, value: float, seq: int = 1) -> Arrival:
    spec = shard.spec
    keys = wire_format.flatten(spec.map.ranges[0])
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


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("guard", [Guard(), Guard(max_norm=1e30)])
def test_a_finite_gradient_beyond_what_float32_can_sum(guard: Guard) -> None:
    """It is refused by its right name, and no warning is shown; a cap that is lower is named."""
    shard = shard_of(guard)
    (text,) = told(shard, push(shard, "a", 2e18)).values()
    assert text.startswith("push 1 of worker a has a norm beyond 1.8e+19: expected at most 1.8e+19")
    capped = shard_of(Guard(max_norm=5.0))
    (text,) = told(capped, push(capped, "a", 2e18)).values()
    assert text.startswith("push 1 of worker a has a norm beyond 1.8e+19: expected at most 5 ")


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
    """Of all its lives, and the limit is the first that is too many."""
    shard = shard_of(Guard(quarantine_after=2))
    for worker in "ab":
        assert "NaN" in told(shard, push(shard, worker, nan))[worker.encode()]
    assert told(shard, push(shard, "a", 1.0)) == {b"a": "ack"}
    assert "NaN" in told(shard, push(shard, "a", nan, seq=2))[b"a"]
    assert "worker a is in quarantine: 2 of" in told(shard, push(shard, "a", 1.0, seq=2))[b"a"]
    assert told(shard, push(shard, "b", 1.0)) == {b"b": "ack"}
    shard.handle(b"", Hello(1, shard.spec.job, "a", 1, PROTOCOL, shard.spec.build), (), 0.0)
    assert {name: entry.refused for name, entry in shard.ledger.entries.items()} == {"a": 2, "b": 1}


@pytest.mark.parametrize("successor", [2, 3])
def test_another_copy_knows_who_is_in_quarantine(successor: int) -> None:
    """One that was there when it was refused, and one that was given the state later."""
    copies = Copies()
    bad = [np.full(SIZE, nan, np.float32).tobytes()]
    for _ in range(Guard().quarantine_after):
        (refusal,) = copies.say(1, shard_dsl.push("a", 1), bad)
        assert isinstance(refusal, Refusal)
        assert refusal.remedy is Remedy.BAD_INPUT
    if successor not in copies.copies:
        copies.configure(1, successor)
    copies.configure(successor)
    for worker in "ab":
        copies.say(successor, shard_dsl.hello(worker))
        copies.say(successor, replace(shard_dsl.join(worker), boot=successor))
    refusal = copies.pushed(successor, "a", 1)
    assert isinstance(refusal, Refusal)
    assert refusal.text == "worker a is in quarantine: 16 of its gradients were refused"
    assert isinstance(copies.pushed(successor, "b", 1), Ack)


@pytest.mark.parametrize("goes_on", [True, False])
def test_who_resumes_a_job_hears_it_again(goes_on: bool) -> None:
    """Shards that a job moves to know the quarantine; a job that begins from a snapshot does not,
    or one whose rate was too high for all of its workers could never go on."""
    shard = shard_of(Guard(quarantine_after=1))
    assert "NaN" in told(shard, push(shard, "a", nan))[b"a"]
    saved, weights, _ = shard.copy()
    other = Shard(shard.spec, 1)
    install = Install(1, shard.spec.job, "net", [], goes_on)
    other.handle(b"", install, (wire_format.encode_state(saved), weights.tobytes()), 0.0)
    assert other.ledger.entries["a"].refused == goes_on


@pytest.mark.parametrize("max_norm", [-1.0, nan])
def test_a_cap_that_makes_no_sense(max_norm: float) -> None:
    """It is refused when the job is described."""
    with pytest.raises(BadInput, match="guard: expected a max_norm above 0"):
        ps.shard_specs(TABLE, guard=Guard(max_norm=max_norm))


def test_a_quarantine_of_everybody() -> None:
    """A job is not described with one."""
    with pytest.raises(BadInput, match="guard: quarantine_after: expected at least 1, got 0"):
        ps.shard_specs(TABLE, guard=Guard(quarantine_after=0))
