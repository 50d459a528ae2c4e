"""A worker's own state is named arrays and counters: saved between two steps, it continues."""

import numpy as np
import pytest
from msgspec.structs import replace

from shards.rules import Decay
from shards.schedules import Fixed
from shards.tables import KeyRange, segments
from tests.support.pure_cluster import TABLE, bowl, start
from worker import step_machine as machine
from worker.step_machine import Plan, StepMachine
from worker.strategies import STRATEGIES, Local, LocalSGD, Strategy
from worker.strategies.base import Floats, rate_multipliers

CUT = 7


def carried_out(want: machine.Want, pushed: list[bytes]) -> machine.Answer:
    """Weights that never change, and gradients that depend on them and on the step."""
    match want:
        case machine.ReadBatches():
            return machine.BatchesRead(4)
        case machine.PullWeights():
            return machine.WeightsPulled(start(), (want.clock,))
        case machine.ComputeGradient():
            return machine.GradientComputed(bowl(0, want.step, want.weights), 1.0)
        case machine.PushContribution():
            pushed.append(want.contribution.tobytes())
    return None


def plan(strategy: Strategy) -> Plan:
    return Plan(
        steps=20,
        seed=1,
        strategy=strategy.for_workers(2),
        schedule=Fixed(base_rate=0.05),
        decay=Decay(0.01),
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_saved_state_continues_to_the_bit(name: str) -> None:
    """Cut between two steps, saved and restored, a worker pushes what it would have pushed."""
    kind = STRATEGIES[name]
    short = {"h": 5, "window": 5, "tau": 5, "n_push": 5, "n_fetch": 5}
    options = {field: short[field] for field in kind.__struct_fields__ if field in short}
    planned = plan(replace(kind(), **options))
    whole: list[bytes] = []
    StepMachine(planned, TABLE).drive(lambda want: carried_out(want, whole))

    first: list[bytes] = []
    cut = StepMachine(planned, TABLE)
    wants = cut.wants()
    want, taken = next(wants), 0
    while not (taken == CUT and isinstance(want, machine.ReadBatches)):
        taken += isinstance(want, machine.ComputeGradient)
        want = wants.send(carried_out(want, first))
    assert cut.local is not None
    arrays, counters = cut.local.save()
    cut.local.weights[:] = np.nan  # the saved arrays are copies
    back = Local.restored(arrays, counters)
    second: list[bytes] = []
    rest = StepMachine(planned, TABLE, clock=cut.clock, step=cut.step, local=back)
    rest.drive(lambda want: carried_out(want, second))
    assert first + second == whole
    assert rest.step == 20


@pytest.mark.parametrize("name", ["adag", "dynsgd", "easgd", "fedbuff", "local_sgd"])
def test_an_optimizer_takes_the_place_of_the_rule(name: str) -> None:
    """With one that takes the steps of the strategy's own rule, the same is pushed."""
    planned = replace(plan(STRATEGIES[name]()), decay=Decay())
    rates = np.float32(0.05) * rate_multipliers(
        segments(TABLE, KeyRange(0, TABLE.size)), TABLE.size
    )
    given: list[machine.ComputeGradient] = []

    def optimizer() -> Floats:
        return np.asarray(given[-1].weights - rates * bowl(0, given[-1].step, given[-1].weights))

    def carry_out(want: machine.Want) -> machine.Answer:
        if isinstance(want, machine.ComputeGradient):
            given.append(want)
        return carried_out(want, own)

    by_rule: list[bytes] = []
    own: list[bytes] = []
    StepMachine(planned, TABLE).drive(lambda want: carried_out(want, by_rule))
    StepMachine(planned, TABLE, optimizer=optimizer).drive(carry_out)
    assert len(own) == len(by_rule) > 0
    for one, other in zip(own, by_rule, strict=True):
        pushed, expected = (np.frombuffer(each, np.float32) for each in (one, other))
        np.testing.assert_allclose(pushed, expected, rtol=1e-4, atol=1e-6)


def test_data_may_end_when_the_weights_are_there() -> None:
    """No gradient ends the run: the window is pushed, with the rows that each step really had."""
    seen: list[machine.PushContribution] = []

    def carry_out(want: machine.Want) -> machine.Answer:
        match want:
            case machine.ComputeGradient(weights, step):
                return machine.GradientComputed(weights, 1.0, rows=step) if step < 7 else None
            case machine.PushContribution():
                seen.append(want)
        return carried_out(want, [])

    StepMachine(plan(LocalSGD(h=5)), TABLE).drive(carry_out)
    assert [(one.steps, one.samples) for one in seen] == [(5, 0 + 1 + 2 + 3 + 4), (2, 5 + 6)]
