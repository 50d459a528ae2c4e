"""The gradient guard: refused gradients, their count, and quarantined workers."""

from math import inf, nan

import numpy as np
import pytest
from msgspec.structs import replace

import ps
from ps.job_spec import shard_specs
from shards import shard_state
from shards.errors import BadInput
from shards.gradient_guard import Guard
from shards.messages import PROTOCOL, Ack, Hello, Install, Join, Kind, Part, Push, Refusal, Remedy
from shards.schema_digest import SCHEMA
from shards.shard import Shard
from shards.transition_io import Arrival
from tests.support import shard_dsl
from tests.support.shard_copies import Copies
from tests.support.shard_dsl import SIZE

BEYOND = "push 1 of worker a: table net has a norm beyond 1.8e+19: expected at most"

TABLE = ps.DenseTable("net", (ps.TensorSpec("w", (256,)),))


def shard_of(guard: Guard) -> Shard:
    """A shard of zeros with workers a and b."""
    (spec,) = shard_specs(TABLE, guard=guard)
    shard = Shard(spec, 1)
    shard.restore(shard_dsl.blank(spec=spec))
    for worker in "ab":
        shard.handle(b"", Hello(1, spec.job, worker, 0, PROTOCOL, SCHEMA), (), 0.0)
        shard.handle(b"", Join(2, spec.job, worker, 0, 1, 0), (), 0.0)
    return shard


def push(shard: Shard, worker: str, value: float, seq: int = 1) -> Arrival:
    spec = shard.spec
    message = Push(
        *(9, spec.job, worker, 0, 1, spec.map.epoch, seq, seq, seq, 1, 8, 0),
        [Part("net", Kind.F4, 0, 256)],
        *(0.5, 0.0, 0.0),
    )
    return Arrival(worker.encode(), message, [np.full(256, value, np.float32).tobytes()])


def answers_to(shard: Shard, *arrivals: Arrival) -> dict[bytes, str]:
    """The answer to each sender: `ack`, or the text of its refusal."""
    return {
        answer.to: answer.message.text if isinstance(answer.message, Refusal) else "ack"
        for answer in shard.handle_together(arrivals, 0.0)
        if isinstance(answer.message, Ack | Refusal)
    }


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_what_is_not_finite_is_refused_alone(value: float) -> None:
    """Even in one pass with a good push, which is applied."""
    shard = shard_of(Guard())
    answers = answers_to(shard, push(shard, "a", 1.0), push(shard, "b", value))
    assert answers[b"a"] == "ack"
    assert answers[b"b"].startswith(
        "push 1 of worker b: table net holds NaN or infinity: expected finite"
    )
    np.testing.assert_allclose(shard.parameters.weights(), -0.01)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("guard", [Guard(), Guard(max_norm=1e30)])
def test_a_finite_gradient_beyond_what_float32_can_sum(guard: Guard) -> None:
    """The refusal names the limit, or a lower cap, and NumPy warns of nothing."""
    shard = shard_of(guard)
    (text,) = answers_to(shard, push(shard, "a", 2e18)).values()
    assert text.startswith(
        "push 1 of worker a: table net has a norm beyond 1.8e+19: expected at most 1.8e+19"
    )
    capped = shard_of(Guard(max_norm=5.0))
    (text,) = answers_to(capped, push(capped, "a", 2e18)).values()
    assert text.startswith(
        "push 1 of worker a: table net has a norm beyond 1.8e+19: expected at most 5 "
    )


def test_a_norm_beyond_the_cap_is_refused_alone() -> None:
    """The norm of 256 ones is 16: a norm at the cap passes, one above it is refused."""
    shard = shard_of(Guard(max_norm=16.0))
    answers = answers_to(shard, push(shard, "a", 1.0), push(shard, "b", 2.0))
    assert answers[b"a"] == "ack"
    assert answers[b"b"].startswith(
        "push 1 of worker b: table net has norm 32: expected at most 16"
    )
    assert shard.version == 1


def test_a_worker_that_keeps_sending_bad_gradients_is_quarantined() -> None:
    """After its last allowed refusal even good pushes are refused; others are not affected."""
    shard = shard_of(Guard(quarantine_after=3))
    for _ in range(3):
        assert "NaN" in answers_to(shard, push(shard, "b", nan))[b"b"]
    last = shard.handle_together([push(shard, "a", 1.0), push(shard, "b", 1.0)], 0.0)
    kinds = {answer.to: answer.message for answer in last}
    assert isinstance(kinds[b"a"], Ack)
    refusal = kinds[b"b"]
    assert isinstance(refusal, Refusal)
    assert refusal.remedy is Remedy.GIVE_UP
    assert refusal.text == "worker b is in quarantine: 3 of its gradients were refused"
    assert shard.version == 1


def test_the_count_is_a_workers_own() -> None:
    """All lives of a worker are counted together, and the limit itself quarantines it."""
    shard = shard_of(Guard(quarantine_after=2))
    for worker in "ab":
        assert "NaN" in answers_to(shard, push(shard, worker, nan))[worker.encode()]
    assert answers_to(shard, push(shard, "a", 1.0)) == {b"a": "ack"}
    assert "NaN" in answers_to(shard, push(shard, "a", nan, seq=2))[b"a"]
    assert (
        "worker a is in quarantine: 2 of" in answers_to(shard, push(shard, "a", 1.0, seq=2))[b"a"]
    )
    assert answers_to(shard, push(shard, "b", 1.0)) == {b"b": "ack"}
    shard.handle(b"", Hello(1, shard.spec.job, "a", 1, PROTOCOL, SCHEMA), (), 0.0)
    assert {name: entry.refused for name, entry in shard.ledger.entries.items()} == {"a": 2, "b": 1}


@pytest.mark.parametrize("successor", [2, 3])
def test_another_copy_knows_the_quarantine(successor: int) -> None:
    """Both a copy that saw the refusals and one that received the state later."""
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


@pytest.mark.parametrize("keep_workers", [True, False])
def test_a_resumed_job_lifts_the_quarantine(keep_workers: bool) -> None:
    """The shards of a reshard know the quarantine; a job that resumes from a snapshot does not, or
    one with a rate too high for all of its workers could never continue."""
    shard = shard_of(Guard(quarantine_after=1))
    assert "NaN" in answers_to(shard, push(shard, "a", nan))[b"a"]
    other = Shard(shard.spec, 1)
    install = Install(1, shard.spec.job, keep_workers)
    other.handle(b"", install, shard_dsl.as_bytes(shard_state.encode(shard.copy())), 0.0)
    assert other.ledger.entries["a"].refused == keep_workers


@pytest.mark.parametrize("max_norm", [-1.0, nan])
def test_a_cap_that_makes_no_sense(max_norm: float) -> None:
    """An invalid cap is refused when the Guard is made."""
    with pytest.raises(BadInput, match="guard: expected a max_norm above 0"):
        shard_specs(TABLE, guard=Guard(max_norm=max_norm))


def test_a_quarantine_of_everybody() -> None:
    """A Guard that quarantines every worker cannot be made."""
    with pytest.raises(BadInput, match="guard: quarantine_after: expected at least 1, got 0"):
        shard_specs(TABLE, guard=Guard(quarantine_after=0))
