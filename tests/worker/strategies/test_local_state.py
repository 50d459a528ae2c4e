"""A worker's own state is named arrays and counters: saved between two steps, it continues."""

import weakref

import numpy as np
import pytest
from msgspec.structs import replace

from shards.rules import Decay
from shards.schedules import Fixed
from shards.tables import KeyRange, segments
from tests.support.pure_cluster import TABLE, bowl, start
from worker.strategies import STRATEGIES, Local, LocalSGD, Strategy
from worker.strategies.base import Floats, rate_multipliers
from worker.training import step_machine as machine
from worker.training.fragment_machine import build_machine
from worker.training.step_machine import Plan, StepMachine

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
        case machine.PushReport():
            pushed += [report.tobytes() for report in want.reports.values()]
        case machine.TakeFragment():
            return machine.FragmentTaken(start(), (want.clock,))
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
    build_machine(planned, TABLE).drive(lambda want: carried_out(want, whole))

    first: list[bytes] = []
    cut = build_machine(planned, TABLE)
    wants = cut.wants()
    want, taken = next(wants), 0
    while not (taken == CUT and isinstance(want, machine.ReadBatches)):
        taken += isinstance(want, machine.ComputeGradient)
        want = wants.send(carried_out(want, first))
    assert cut.local is not None
    arrays, counters = cut.local.save()
    cut.local.weights[:] = np.nan  # the saved arrays are copies
    back = Local.restore(arrays, counters)
    second: list[bytes] = []
    rest = build_machine(planned, TABLE, clock=cut.clock, step=cut.step, local=back)
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


@pytest.mark.parametrize("name", [n for n, kind in STRATEGIES.items() if not kind.fragmented])
@pytest.mark.parametrize("period", [1, 3])
def test_a_pull_is_requested_with_the_push_before_it(name: str, period: int) -> None:
    """Each pull that follows a push was requested by it, with the same clock, and no other is.

    The same is pushed as without. In an exchange the pull comes before the push.
    """
    kind = STRATEGIES[name]
    fields = {"h", "window", "tau", "n_push", "n_fetch"} & set(kind.__struct_fields__)
    planned = plan(replace(kind(), **dict.fromkeys(fields, period)))
    together: list[bytes] = []
    alone: list[bytes] = []
    seen: list[tuple[int | None, int | None]] = []
    requested: int | None = None

    def carry_out(want: machine.Want) -> machine.Answer:
        nonlocal requested
        match want:
            case machine.PushContribution():
                requested = want.prefetch
            case machine.PullWeights():
                seen.append((requested, want.clock))
                requested = None
        return carried_out(want, together)

    StepMachine(planned, TABLE, pulls_at_once=True).drive(carry_out)
    StepMachine(planned, TABLE).drive(lambda want: carried_out(want, alone))
    assert requested is None
    assert together == alone
    if planned.strategy.exchanges:
        assert {asked for asked, _ in seen} == {None}
    else:
        assert all(asked == clock for asked, clock in seen[1:] if asked is not None)
        pushed_first = [number for number in range(1, 20) if planned.strategy.pushes(number - 1)]
        both = [number for number in pushed_first if planned.strategy.fetches(number)]
        assert sum(asked is not None for asked, _ in seen) == len(both)


@pytest.mark.parametrize("name", ["downpour", "local_sgd"])
def test_a_pushed_gradient_is_let_go(name: str) -> None:
    """When the next gradient is wanted, nothing refers to an array that was pushed.

    So one array is enough for all the gradients, where the pushes are acknowledged by then.
    """
    pushed: list[weakref.ref[Floats]] = []
    alive: list[int] = []

    def carry_out(want: machine.Want) -> machine.Answer:
        match want:
            case machine.PushContribution():
                pushed.append(weakref.ref(want.contribution))
            case machine.ReadBatches():
                alive.append(sum(one() is not None for one in pushed))
        return carried_out(want, [])

    StepMachine(plan(STRATEGIES[name]()), TABLE).drive(carry_out)
    assert len(pushed) == {"downpour": 20, "local_sgd": 2}[name]
    assert set(alive) == {0}
