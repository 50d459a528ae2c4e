"""The step machine of a model in fragments: what it wants, and where its weights go."""

from collections.abc import Sequence
from math import isnan, sqrt
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ps import DenseTable, TensorSpec
from shards.errors import BadInput
from shards.rules import AdamW, Decay
from shards.schedules import Fixed
from shards.tables import Layout
from worker.strategies import Local
from worker.strategies.decoupled_diloco import DecoupledDiLoCo
from worker.strategies.fragments import Fragments, fragment_after
from worker.strategies.streaming_diloco import StreamingDiLoCo
from worker.training import step_machine as machine
from worker.training.fragment_machine import build_machine
from worker.training.step_machine import Plan, StepMachine

F = np.float32
Floats = NDArray[np.float32]
LAYOUT = Layout(
    (
        DenseTable("body", (TensorSpec("a", (30,)), TensorSpec("b", (5, 8), lr_mult=2.0))),
        DenseTable("embeddings", (TensorSpec("e", (40, 10)),)),
        DenseTable("head", (TensorSpec("h", (9,)), TensorSpec("mean", (4,), 0.0, 0.0, True))),
    )
)
RATE, OUTER = 0.05, F(0.7)
STEPS, SAMPLES = 23, 4


def start() -> Floats:
    arena = LAYOUT.empty()
    dice = np.random.default_rng(3)
    for views in LAYOUT.views(arena).values():
        for view in views.values():
            view[...] = dice.standard_normal(view.shape, np.float32)
    return arena


def gradient(worker: int, step: int, weights: Floats) -> Floats:
    """The gradient of a bowl whose lowest point differs from step to step."""
    dice = np.random.default_rng(100 * worker + step)
    out = LAYOUT.empty()
    for table, views in LAYOUT.views(out).items():
        for name, view in views.items():
            at = LAYOUT.views(weights)[table][name]
            view[...] = F(0.3) * (at - dice.standard_normal(at.shape, np.float32))
    return out


def plan(strategy: Fragments, steps: int = STEPS) -> Plan:
    schedule = Fixed(base_rate=RATE)
    return Plan(steps=steps, seed=1, strategy=strategy, schedule=schedule, decay=Decay())  # type: ignore[arg-type]


class FakeShard:
    """Merges each report as it comes, and hands out a table some requests later."""

    def __init__(self, delays: Sequence[int]) -> None:
        self.tables = {name: part.copy() for name, part in LAYOUT.split(start()).items()}
        self.version = 0
        self._delays = list(delays)  # of each answer in turn, in unsuccessful attempts to take it
        self._answers: dict[tuple[int, str], list[Any]] = {}

    def merge(self, worker: int, want: machine.PushReport) -> None:
        for name, report in want.reports.items():
            self.tables[name] = self.tables[name] - OUTER * report
            self.version += 1
            if want.clock is not None:
                delay = self._delays.pop(0) if self._delays else 0
                self._answers[worker, name] = [delay, self.tables[name], (self.version,)]

    def take(self, worker: int, want: machine.TakeFragment) -> machine.FragmentTaken | None:
        answer = self._answers[worker, want.table]
        answer[0] -= 1
        if answer[0] >= 0 and not want.wait:
            return None
        del self._answers[worker, want.table]
        return machine.FragmentTaken(answer[1], answer[2])

    def arena(self) -> Floats:
        return np.concatenate(list(self.tables.values()))


class Learner:
    """One machine at a fake shard; `events` are what happened, for an oracle to repeat."""

    def __init__(
        self, number: int, steps: StepMachine, shard: FakeShard, events: list[Any]
    ) -> None:
        self.number, self.machine, self.shard, self.events = number, steps, shard, events
        self.pushes: list[machine.PushReport] = []
        self._wants = steps.wants()
        self.want: machine.Want | None = next(self._wants)

    def turn(self) -> None:
        """Carry out the present want."""
        assert self.want is not None
        try:
            self.want = self._wants.send(self._answer(self.want))
        except StopIteration:
            self.want = None

    def _answer(self, want: machine.Want) -> machine.Answer:
        match want:
            case machine.ReadBatches():
                return machine.BatchesRead(SAMPLES)
            case machine.PullWeights():
                self.events.append(("pull", self.number))
                return machine.WeightsPulled(self.shard.arena(), (self.shard.version,))
            case machine.ComputeGradient():
                self.events.append(("step", self.number))
                computed = gradient(self.number, want.step, want.weights)
                return machine.GradientComputed(computed, 2.0)
            case machine.PushReport():
                self.pushes.append(want)
                self.events += [("push", self.number, name) for name in want.reports]
                self.shard.merge(self.number, want)
            case machine.TakeFragment():
                taken = self.shard.take(self.number, want)
                if taken is not None:
                    self.events.append(("take", self.number, want.table))
                return taken
        return None

    def finish(self) -> "Learner":
        while self.want is not None:
            self.turn()
        return self


def learn(strategy: Fragments, delays: Sequence[int] = (), steps: int = STEPS) -> Learner:
    shard = FakeShard(delays)
    return Learner(0, build_machine(plan(strategy, steps), LAYOUT), shard, []).finish()


# --- when -----------------------------------------------------------------------------------------


def test_each_fragment_has_its_own_offset() -> None:
    """Each of P fragments is due once in a period, no two at one step, the first at its end."""
    for period in range(1, 25):
        for fragments in range(1, period + 1):
            due = [fragment_after(step, period, fragments) for step in range(period)]
            assert sorted(d for d in due if d is not None) == list(range(fragments))
            assert due[-1] == 0


def test_fragments_are_pushed_and_taken_in_order() -> None:
    """With 3 fragments, a period of 7 and an overlap of 2: taken before the third step after."""
    learner = learn(StreamingDiLoCo(h=7, overlap=2), steps=12)
    happened, steps = [], 0
    for kind, _, *table in learner.events:
        steps += kind == "step"
        if table:
            happened.append((steps, kind, table[0]))
    assert happened == [
        (2, "push", "embeddings"),
        (4, "push", "head"),
        (4, "take", "embeddings"),
        (6, "take", "head"),
        (7, "push", "body"),
        (9, "push", "embeddings"),
        (9, "take", "body"),
        (11, "push", "head"),
        (11, "take", "embeddings"),
        (12, "push", "body"),
        (12, "push", "embeddings"),
    ]


def test_a_learner_waits_right_before_the_next_exchange() -> None:
    """An answer that is late is asked for after each step, and waited for in the last of them."""
    learner = learn(StreamingDiLoCo(h=7, overlap=2), delays=[2, 100], steps=12)
    takes, steps = [], 0
    for kind, _, *table in learner.events:
        steps += kind == "step"
        if kind == "take":
            takes.append((steps, table[0]))
    assert takes == [(6, "embeddings"), (9, "body"), (10, "head"), (11, "embeddings")]


def test_without_overlap_each_answer_is_waited_for() -> None:
    """At an overlap of 0 no step is taken between a report and its answer, however late."""
    learner = learn(StreamingDiLoCo(h=7, overlap=0), delays=[0, 9, 2], steps=12)
    kinds = [kind for kind, *_ in learner.events]
    pushed = [place for place, kind in enumerate(kinds[:-3]) if kind == "push"]
    assert [kinds[place + 1] for place in pushed] == ["take"] * len(pushed) == ["take"] * 5


# --- what -----------------------------------------------------------------------------------------


def test_reports_count_each_step_once() -> None:
    """Steps, samples and the clock count every step once; tokens and window begin at a receipt."""
    learner = learn(DecoupledDiLoCo(h=7, overlap=2), steps=12)
    pushes = learner.pushes
    assert [push.steps for push in pushes] == [2, 2, 3, 2, 2, 1, 0]
    assert [push.window for push in pushes] == [2, 4, 7, 5, 5, 3, 1]
    assert [push.tokens for push in pushes] == [SAMPLES * push.window for push in pushes]
    assert sum(push.samples for push in pushes) == 12 * SAMPLES
    assert [push.clock for push in pushes] == [1, 2, 3, 4, 5, None, None]
    assert (learner.machine.step, learner.machine.clock) == (12, 7)
    assert [push.loss for push in pushes[:-1]] == [2.0] * 6
    assert isnan(pushes[-1].loss)


def test_steps_without_a_report_are_counted() -> None:
    """A plan that ends while its only fragment is under way pushes the count of its last steps."""
    layout = Layout(LAYOUT.tables[:1])

    def carry_out(want: machine.Want) -> machine.Answer:
        match want:
            case machine.ReadBatches():
                return machine.BatchesRead(0)
            case machine.PullWeights():
                return machine.WeightsPulled(layout.empty(), (0,))
            case machine.ComputeGradient():
                return machine.GradientComputed(layout.empty(), 1.0, rows=0)
            case machine.PushReport():
                pushes.append(want)
        return None

    def with_rows(want: machine.Want) -> machine.Answer:
        return machine.BatchesRead(1) if isinstance(want, machine.ReadBatches) else carry_out(want)

    pushes: list[machine.PushReport] = []
    steps = build_machine(plan(StreamingDiLoCo(h=4, overlap=2), 5), layout)
    steps.drive(with_rows)
    assert [(list(push.reports), push.steps, push.tokens) for push in pushes] == [
        (["body"], 4, 4),  # a loop without samples counts its steps
        ([], 1, 0),
    ]
    assert steps.step == 5
    pushes.clear()
    build_machine(plan(StreamingDiLoCo(h=4)), layout).drive(carry_out)
    assert pushes == []  # no data, no weights, no push


# --- where ----------------------------------------------------------------------------------------


class Oracle:
    """The events of some learners as one serial loop, from the formulas of the paper."""

    def __init__(self, alpha: float, weight_decay: float) -> None:
        self.alpha, self.weight_decay = alpha, weight_decay
        self.theta = {name: part.copy() for name, part in LAYOUT.split(start()).items()}
        self.asked: dict[tuple[int, str], Floats] = {}
        self.x: dict[int, dict[str, Floats]] = {}
        self.anchor: dict[int, dict[str, Floats]] = {}
        self.moments: dict[int, tuple[int, Floats, Floats]] = {}
        self.multipliers = LAYOUT.empty()
        views = LAYOUT.views(self.multipliers)
        views["body"]["a"][...], views["body"]["b"][...] = 1, 2
        views["embeddings"]["e"][...] = views["head"]["h"][...] = 1
        self.buffer = LAYOUT.empty()
        LAYOUT.views(self.buffer)["head"]["mean"][...] = 1

    def repeat(self, events: Sequence[Any]) -> Floats:
        for kind, worker, *table in events:
            getattr(self, kind)(worker, *table)
        return np.concatenate(list(self.theta.values()))

    def pull(self, worker: int) -> None:
        self.anchor[worker] = dict(self.theta)
        self.x[worker] = dict(self.theta)
        self.moments[worker] = (0, LAYOUT.empty(), LAYOUT.empty())

    def step(self, worker: int) -> None:
        x = np.concatenate(list(self.x[worker].values()))
        count, m, v = self.moments[worker]
        g = gradient(worker, count, x)
        b1, b2 = F(0.9), F(0.999)
        m, v, count = b1 * m + (F(1) - b1) * g, b2 * v + (F(1) - b2) * (g * g), count + 1
        correction = sqrt(1 - 0.999**count) / (1 - 0.9**count)
        rates = F(RATE * correction) * self.multipliers
        fade = F(self.weight_decay / correction)
        trained = x - rates * (m / (np.sqrt(v) + F(1e-8)) + fade * x)
        x = np.where(self.buffer == 1, x - g, trained)
        self.moments[worker] = count, m, v
        self.x[worker] = {name: part.copy() for name, part in LAYOUT.split(x).items()}

    def push(self, worker: int, table: str) -> None:
        report = self.anchor[worker][table] - self.x[worker][table]
        self.theta[table] = self.theta[table] - OUTER * report
        self.asked[worker, table] = self.theta[table]

    def take(self, worker: int, table: str) -> None:
        new = self.anchor[worker][table] = self.asked[worker, table]
        a = F(self.alpha)
        self.x[worker][table] = a * self.x[worker][table] + F(1 - self.alpha) * new


ORDERS = {
    "one": (0,),
    "in turn": (0, 1, 2),
    "one is slow": (0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 2),
    "bursts": (0,) * 19 + (1,) * 23 + (2,) * 7,
    "random": tuple(np.random.default_rng(7).integers(0, 4, 97).tolist()),
}


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("order", ORDERS)
def test_learners_equal_a_serial_loop(order: str, alpha: float) -> None:
    """Learners in any interleaving, with late answers, make the bits of one loop."""
    strategy = DecoupledDiLoCo(h=6, overlap=2, alpha=alpha, weight_decay=0.1)
    events: list[Any] = []
    shard = FakeShard([0, 3, 1, 100, 2, 0, 5, 1, 1, 4] * 10)
    learners = [
        Learner(number, build_machine(plan(strategy), LAYOUT), shard, events)
        for number in range(max(ORDERS[order]) + 1)
    ]
    while any(learner.want is not None for learner in learners):
        for number in ORDERS[order]:
            if learners[number].want is not None:
                learners[number].turn()
    got = shard.arena()
    assert np.abs(got - start()).max() > 1e-2, "nothing was learnt"
    np.testing.assert_array_equal(got, Oracle(alpha, 0.1).repeat(events))
    assert all(learner.machine.step == STEPS for learner in learners)


@pytest.mark.parametrize("cut", [1, 5, 9, 10, 17])
def test_a_saved_state_continues_to_the_bit(cut: int) -> None:
    """Cut between two steps, saved and restored, a learner pushes what it would have pushed."""
    strategy = StreamingDiLoCo(h=7, overlap=3)
    delays = [0, 4, 1, 2, 0, 1, 0, 3]
    whole = learn(strategy, delays)
    shard, taken = FakeShard(delays), 0
    first = Learner(0, build_machine(plan(strategy), LAYOUT), shard, [])
    while not (taken == cut and isinstance(first.want, machine.ReadBatches)):
        taken += isinstance(first.want, machine.ComputeGradient)
        first.turn()
    assert first.machine.local is not None
    arrays, counters = first.machine.local.save()
    first.machine.local.weights[:] = np.nan  # the saved arrays are copies
    local = Local.restore(arrays, counters)
    clock, step = first.machine.clock, first.machine.step
    continued = build_machine(plan(strategy), LAYOUT, clock=clock, step=step, local=local)
    second = Learner(0, continued, shard, []).finish()
    both = first.pushes + second.pushes
    assert [push[1:4] for push in both] == [push[1:4] for push in whole.pushes]
    for got, expected in zip(both, whole.pushes, strict=True):
        assert list(got.reports) == list(expected.reports)
        for name, report in got.reports.items():
            np.testing.assert_array_equal(report, expected.reports[name])


def test_a_restarted_learner_begins_with_new_fragments_and_its_moments() -> None:
    """Between windows only the moments of its own rule are kept; all fragments are pulled."""
    learner = learn(StreamingDiLoCo(h=7), steps=9)
    assert learner.machine.local is not None
    assert learner.machine.local.fragments == []  # they were reported at the end, and count once
    kept = learner.machine.local.between_windows(AdamW.slot_names)
    moments = {name: array.copy() for name, array in kept.slots.items()}
    continued = build_machine(plan(StreamingDiLoCo(h=7)), LAYOUT, clock=4, step=9, local=kept)
    again = Learner(0, continued, FakeShard([]), [])
    wants = [again.want]
    for _ in range(2):
        again.turn()
        wants.append(again.want)
    assert [type(want).__name__ for want in wants] == [
        "ReadBatches",
        "PullWeights",
        "ComputeGradient",
    ]
    np.testing.assert_array_equal(kept.weights, start())
    assert tuple(moments) == AdamW.slot_names
    assert all(np.abs(array).max() > 0 for array in moments.values())
    assert kept.count == 9


# --- wrong options --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"overlap": 7}, "overlap: expected fewer than h = 7 steps, got 7"),
        ({"overlap": -1}, "overlap: expected at least 0, got -1"),
        ({"alpha": 1.5}, r"alpha: expected \[0, 1\], got 1.5"),
        ({"alpha": float("nan")}, "alpha: expected"),
        ({"average": "median"}, "average: expected mean"),
        ({"k": 0}, "k: expected at least 1, got 0"),
        ({"grace": -0.1}, r"grace: expected \[0, 1\], got -0.1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], line: str) -> None:
    """In one line with the strategy, the option and what was expected."""
    with pytest.raises(BadInput, match=f"^strategy decoupled_diloco: {line}"):
        DecoupledDiLoCo(h=7, **options)


def test_more_than_the_job_has_is_refused() -> None:
    """A quorum above the number of workers, more fragments than steps, and a bound."""
    strategy = DecoupledDiLoCo(h=7, k=3)
    assert strategy.for_workers(3) is strategy
    with pytest.raises(BadInput, match="k: expected at most 2 workers, got 3"):
        strategy.for_workers(2)
    strategy.check_fragments(7)
    with pytest.raises(BadInput, match="h: expected at least 1 step for each of 8 dense tables"):
        strategy.check_fragments(8)
    strategy.check(None, prefetch=False)
    with pytest.raises(BadInput, match="expected no staleness bound, got 4"):
        strategy.check(4, prefetch=False)


def test_a_slow_learner_takes_fewer_steps() -> None:
    """Its period is shorter by its speed, but longer than the overlap."""
    strategy = DecoupledDiLoCo(h=12, overlap=2, speeds={"w0": 6.0, "w1": 2.0, "w2": 1.0})
    assert [strategy.for_worker(name).h for name in ("w0", "w1", "w2", "w9")] == [12, 4, 3, 12]


def test_a_late_worker_reports_earlier() -> None:
    """By as many steps as it was late, once: the reports under way then are as late for the same
    reason. One exchange is skipped; from then on they are as far apart as before."""
    late = iter([3, 3, 0, 0])

    class LateShard(FakeShard):
        def take(self, worker: int, want: machine.TakeFragment) -> machine.FragmentTaken | None:
            taken = super().take(worker, want)
            return None if taken is None else taken._replace(late=next(late, 0))

    steps = build_machine(plan(DecoupledDiLoCo(h=12, overlap=2, alpha=0.5), 60), LAYOUT)
    learner = Learner(0, steps, LateShard([]), []).finish()
    ends = np.cumsum([push.steps for push in learner.pushes if push.clock is not None])
    assert ends.tolist() == [4, *range(9, 60, 4)]
