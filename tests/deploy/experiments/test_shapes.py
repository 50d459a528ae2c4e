"""The shapes: their figures where theory gives them, their verdicts, and their controls."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from deploy.experiments.cluster import ClusterModel, Law, StepTimes
from deploy.experiments.goodput_simulation import Failures, expect_decoupled, simulate_goodput
from deploy.experiments.jobs import SimulatedJob
from deploy.experiments.shapes import (
    SHAPES,
    averages,
    base,
    failures,
    fragments,
    momentum,
    plan,
    shape_numbered,
    speed,
    windows,
)
from deploy.experiments.shapes.base import (
    Bench,
    Check,
    Preset,
    Shape,
    ShapeOutcome,
    ShapeVerdict,
    keep,
    load_outcomes,
    play,
)
from deploy.experiments.statistics import Interval
from deploy.experiments.timing_simulation import TimingSimulation
from deploy.experiments.trials import Trial, TrialResult, run_trials
from deploy.experiments.tuning import Tuned
from shards.aggregation import Average
from shards.errors import BadInput
from shards.gate import Gate
from worker.strategies import strategy_of


def quiet(_: str) -> None:
    """Print nothing."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench whose sizes are those of ci."""
    return Bench(Preset.CI, note=quiet)


@pytest.mark.parametrize("control", [False, True])
def test_the_speed_of_updates_is_dutta_s(control: bool) -> None:
    """H_W, H_W - H_(W-K) and K/W steps per update within 2 %; the former not with fixed times."""
    law = Law.FIXED if control else Law.EXPONENTIAL
    cluster = ClusterModel(workers=speed.WORKERS, times=StepTimes(law=law))
    sync, batch = speed.speeds(cluster, 1500)
    assert sync.verdict == (ShapeVerdict.NOT_REPRODUCED if control else ShapeVerdict.REPRODUCED)
    assert batch.verdict == ShapeVerdict.REPRODUCED


def test_asynchrony_is_momentum() -> None:
    """Four workers of exponential times act as momentum 3/4; rounds do not."""
    assert momentum.fit_momentum("asp:scale=1", 4, 40) == pytest.approx(0.75, abs=0.03)
    assert abs(momentum.fit_momentum("bsp", 4, 10) - 0.75) > 0.03


@pytest.mark.parametrize("n", [1, 2, 15, 30])
def test_the_staleness_of_softsync_is_n(n: int) -> None:
    """Thirty workers: a mean of (W-1)n/W within 5 %, and never above 2n."""
    strategy = strategy_of("strategy", f"softsync:n={n}").for_workers(30)
    job = SimulatedJob(
        strategy=strategy, cluster=ClusterModel(workers=30), rate=0.1, seed=0, bound=None
    )
    stale = TimingSimulation(job).run(12_000).records["staleness"]
    assert stale.mean() == pytest.approx(29 * n / 30, rel=0.05)
    assert stale.max() <= 2 * n


def spectral_radius(eta: float, alpha: float, workers: int) -> float:
    """How a round of turns stretches the workers' weights and the centre, at most."""
    whole = np.eye(workers + 1)
    for worker in range(workers):
        turn = np.eye(workers + 1)
        turn[worker, worker] = 1 - eta - alpha
        turn[worker, -1] = turn[-1, worker] = alpha
        turn[-1, -1] = 1 - alpha
        whole = turn @ whole
    return float(abs(np.linalg.eigvals(whole)).max())


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize(
    ("eta", "alpha"), [(0.5, 0.3), (0.5, 0.95), (0.8375, 0.7575), (1.5, 0.35), (2.1, 0.1)]
)
def test_easgd_is_stable_where_its_map_is(eta: float, alpha: float, workers: int) -> None:
    """The real strategy and shard grow where the linear map of a round does. For one worker that is
    the published condition; for two the map still shrinks at the third of these places."""
    assert windows.stable(eta, alpha, workers) == (spectral_radius(eta, alpha, workers) < 1)
    if workers == 1:
        assert windows.stable(eta, alpha, 1) == (alpha < (4 - 2 * eta) / (4 - eta))


def test_a_bound_that_is_off_by_one_shows_in_the_clock_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gap reaches s + 1; with a gate that lets one step more pass, it reaches s + 2."""
    cluster = ClusterModel(workers=4, stragglers={"worker-1": 5.0})
    job = SimulatedJob(strategy=strategy_of("s", "ssp"), cluster=cluster, rate=0.1, seed=0, bound=3)
    assert TimingSimulation(job).run(500).records["clock_gap"].max() == 4
    right = Gate.passes
    monkeypatch.setattr(Gate, "passes", lambda gate, clock, low: right(gate, clock - 1, low))
    assert TimingSimulation(job).run(500).records["clock_gap"].max() == 5


class TinyBench(Bench):
    """Real runs of a few gradients, at a given rate: enough where the control leaves levels that
    are the same run."""

    def run(
        self, trials: Iterable[Trial], seeds: int, *, first: int | None = None
    ) -> list[list[TrialResult]]:
        return super().run([self._tiny(one) for one in trials], 2, first=first)

    def tune(self, levels: Sequence[Trial]) -> list[Tuned]:
        return [Tuned(0.01, 0.01, 50.0) for _ in levels]

    def _tiny(self, trial: Trial) -> Trial:
        gradients = 2 * trial.cluster.workers + 20
        if trial.workload == "mlp:digits":  # which has to reach the time that is compared
            gradients = trial.gradients
        return structs.replace(trial, gradients=gradients, look_every=10, tested=50, batch=2)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6, 7, 9, 16, 18])
def test_without_its_cause_a_shape_is_not_reproduced(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few gradients: the levels that a rule compares do not differ. Those of 8 and 10 are
    tested above, that of 12 in test_shape_rules.py, and `make experiment E=controls` runs all
    thirteen at full length."""
    steady = check(ShapeVerdict.REPRODUCED)
    monkeypatch.setattr(windows, "_stability", lambda *_: steady)
    monkeypatch.setattr(windows, "measure_rounds", lambda *_: steady)
    checks = SHAPES[number].judge(TinyBench(Preset.CI, note=quiet), True)
    assert ShapeVerdict.NOT_REPRODUCED in {one.verdict for one in checks}, checks


def check(verdict: ShapeVerdict) -> Check:
    return Check("claim", "published", "measured", verdict)


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["reproduced", "reproduced"], "reproduced"),
        (["reproduced", "not reproduced", "missing"], "not reproduced"),
        (["reproduced", "inconclusive"], "inconclusive"),
        (["reproduced", "missing"], "inconclusive"),
    ],
)
def test_a_verdict_is_that_of_all_checks(verdicts: list[str], expected: str) -> None:
    """The last line of a shape is its verdict, the published figure and the measured one."""
    checks = [check(ShapeVerdict(verdict)) for verdict in verdicts]
    shape = Shape(99, "t", "s", lambda *_: checks)
    outcome = play(shape, Preset.CI, control=False, jobs=1, note=quiet)
    assert outcome.verdict == expected
    assert outcome.lines()[-1].startswith(f"shape 99: {expected}: ")
    assert outcome.lines()[-1].endswith("published: published; measured: measured")


def test_own_checks_decide_no_verdict() -> None:
    """A check that no publication has is marked, and leaves the verdict to the others."""
    wrong = structs.replace(check(ShapeVerdict.NOT_REPRODUCED), origin=base.Origin.OWN)
    shape = Shape(99, "t", "s", lambda *_: [check(ShapeVerdict.REPRODUCED), wrong])
    outcome = play(shape, Preset.CI, control=False, jobs=1, note=quiet)
    assert outcome.verdict == ShapeVerdict.REPRODUCED
    assert [line.endswith("(own check)") for line in outcome.lines()[2:6:2]] == [False, True]


def test_a_run_that_diverged_costs_infinitely_much() -> None:
    """One in six decides against the claim; without it the interval does."""
    ratios = np.array([1.0, 1.001, 0.999, 1.0, 1.0, np.inf])
    cost = fragments._judge_cost("it", ratios)
    assert (cost.verdict, cost.measured) == (ShapeVerdict.NOT_REPRODUCED, "1 of 6 runs diverged")
    assert fragments._judge_cost("it", ratios[:5]).verdict == ShapeVerdict.REPRODUCED
    assert fragments._judge_cost("it", 1.02 * ratios[:5]).verdict == ShapeVerdict.NOT_REPRODUCED
    assert fragments._judge_cost("it", 1.01 * ratios[:5]).verdict == ShapeVerdict.INCONCLUSIVE


def test_lengths_are_judged_by_their_intervals() -> None:
    """Radial averaging keeps a length within 5 %, the mean shrinks with the root of M; and the
    other way round neither holds."""
    kept = [[1.0, 1.01, 0.99] for _ in averages.LEARNERS]
    shrunk = [[count**-0.5 * one for one in (1.0, 1.01, 0.99)] for count in averages.LEARNERS]
    assert averages._judge_kept(kept).verdict == ShapeVerdict.REPRODUCED
    assert averages._judge_shrinking(shrunk).verdict == ShapeVerdict.REPRODUCED
    assert averages._judge_kept(shrunk).verdict == ShapeVerdict.NOT_REPRODUCED
    assert averages._judge_shrinking(kept).verdict == ShapeVerdict.NOT_REPRODUCED


def test_a_merge_of_trained_learners_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few steps: the mean of M reports is shorter than one, the radial average is not."""
    monkeypatch.setattr(averages, "FIRST_STEPS", 20)
    monkeypatch.setattr(averages, "LEARNERS", (2, 16))
    lengths = averages.measure_lengths(1)
    assert lengths[Average.RADIAL, 16] == pytest.approx(1, abs=0.02)
    assert lengths[Average.MEAN, 16] < lengths[Average.MEAN, 2] < 0.97
    cosine = averages.measure_cosine(1)
    assert lengths[Average.MEAN, 16] ** 2 == pytest.approx(1 / 16 + 15 / 16 * cosine)


@pytest.mark.parametrize("control", [False, True])
def test_the_goodput_of_learners_that_fail(control: bool, small: Bench) -> None:
    """The published figures follow from the model, and not where failures cost nothing."""
    verdicts = {one.verdict for one in failures.judge(small, control) if one.origin == "source"}
    wrong, right = {ShapeVerdict.NOT_REPRODUCED}, {ShapeVerdict.REPRODUCED}
    assert verdicts == (wrong if control else right)


@pytest.mark.parametrize("learners", [1, 16, 1000])
def test_goodput_is_that_of_formulas(learners: int) -> None:
    """Without what checkpoints cost, the mean times between failures and of restarts decide."""
    model = Failures(learners, 7200.0, save_s=0.0)
    got = simulate_goodput(model, 40_000, 1)
    anyone_s = model.between_s / learners
    assert got.synchronous == pytest.approx(anyone_s / (anyone_s + model.restart_s), rel=0.03)
    assert got.decoupled == pytest.approx(expect_decoupled(model), rel=0.01)
    cycle_s = model.between_s + model.restart_s
    pauses_s = 2 * learners * model.pause_s  # in the time of a learner's cycle
    assert got.elastic == pytest.approx(model.between_s / (cycle_s + pauses_s), rel=0.01)
    saved = simulate_goodput(model._replace(save_s=30.0), 40_000, 1)
    assert saved.synchronous < got.synchronous
    assert simulate_goodput(model, 40_000, 1) == got


def test_a_shape_continues_where_it_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trial is kept when it is done, and is not run again; one with a torn file is."""
    ran = list[int]()

    def counted(trials: Sequence[Trial], jobs: int) -> Iterator[TrialResult]:
        for result in run_trials(trials, jobs):
            if len(ran) == 5:
                raise KeyboardInterrupt
            ran.append(result.trial.seed)
            yield result

    def judge(bench: Bench, _: bool) -> list[Check]:
        trial = Trial(workload="quad", strategy="asp", gradients=20)
        bench.run([trial, structs.replace(trial, rate=0.02)], 4)
        return [check(ShapeVerdict.REPRODUCED)]

    def played(out: Path | None) -> ShapeOutcome:
        shape = Shape(99, "t", "s", judge)
        return play(shape, Preset.CI, control=False, jobs=1, note=quiet, out=out)

    whole = played(None)
    monkeypatch.setattr(base, "run_trials", counted)
    with pytest.raises(KeyboardInterrupt):
        played(tmp_path)
    assert ran == [0, 1, 2, 3, 0]
    torn, *_ = sorted((tmp_path / "shape-trials" / "trials").iterdir())
    torn.write_bytes(torn.read_bytes()[:-1])
    ran.clear()
    again = played(tmp_path)
    assert len(ran) == 4
    keep(again, tmp_path)
    assert len(load_outcomes(tmp_path)[0].trials) == 8
    assert not list(tmp_path.rglob("*.partial"))
    for one, other in zip(again.trials, whole.trials, strict=True):
        assert structs.replace(one, cpu_s=0.0) == structs.replace(other, cpu_s=0.0)


def test_a_rule_is_judged_by_the_interval() -> None:
    wide, above, below = Interval(1, -1, 3), Interval(1, 0.5, 2), Interval(-1, -2, -0.5)
    assert [base.positive(one) for one in (wide, above, below)] == [
        ShapeVerdict.INCONCLUSIVE,
        ShapeVerdict.REPRODUCED,
        ShapeVerdict.NOT_REPRODUCED,
    ]
    assert [base.at_most(one, 0) for one in (wide, below, above)] == [
        ShapeVerdict.INCONCLUSIVE,
        ShapeVerdict.REPRODUCED,
        ShapeVerdict.NOT_REPRODUCED,
    ]


def test_rates_are_chosen_on_seeds_of_their_own(
    small: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best has the least error, the greedy one is the largest within a standard error. All
    seeds are tried around them only, and rates below 1e-3 if that is the best of the first ones."""
    ran: list[Trial] = []

    def results(trials: list[Trial]) -> Any:
        ran.extend(trials)
        at = {-2: 70.0, -1: 70.0, 0: 50.0, 1: 20.0, 2: 10.0, 3: 9.0, 4: 9.2, 5: 12.0, 6: 90.0}
        powers = [round(math.log2(one.rate / 0.001)) + one.batch - 4 for one in trials]
        return [
            Scored(at.get(power, 90.0) + one.seed - 101)
            for power, one in zip(powers, trials, strict=True)
        ]

    monkeypatch.setattr(small, "_run", results)
    (chosen,) = small.tune([Trial()])
    assert chosen == Tuned(0.008, 0.016, 9.0)
    tried = Counter(round(math.log2(one.rate / 0.001)) for one in ran)
    assert tried == {0: 1, 2: 3, 3: 3, 4: 3, 5: 3, 6: 3, 8: 1}
    assert {one.seed for one in ran} == {100, 101, 102}
    assert small.tuned == len(ran)
    assert small.results == []
    low, usual = small.tune([Trial(batch=10), Trial()])
    assert low == Tuned(0.001 / 8, 0.001 / 4, 9.0)
    assert usual == chosen


class Scored:
    """A result of which only the error matters."""

    cpu_s = 0.0

    def __init__(self, error: float) -> None:
        self.error = error


def test_every_shape_is_there() -> None:
    """Eighteen shapes, and one sentence for any other number."""
    assert sorted(SHAPES) == list(range(1, 19))
    with pytest.raises(BadInput, match="shape: expected one of 1 to 18, got 99"):
        shape_numbered(99)


@pytest.mark.parametrize("number", sorted(set(SHAPES) - {14, 17}))  # these have no trials
@pytest.mark.parametrize("control", [False, True])
def test_every_shape_can_be_planned(
    number: int, control: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan leads every shape to its end, and has as many trials as the shape reports, without
    running one of them."""
    monkeypatch.setattr(plan, "_measure_costs", lambda _: (0.001, 0.5))
    planned = plan.plan_of(SHAPES[number], Preset.CI, control=control)
    assert planned.trials > 0
    assert planned.tuning > 0
    assert planned.cpu_s > 0.5 * (planned.trials + planned.tuning)


def test_a_plan_counts_what_a_shape_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reported trials are the same in number, and the cost is that of their gradients."""
    trial = Trial(workload="quad", strategy="asp", gradients=200, look_every=50)

    def judge(bench: Bench, control: bool) -> list[Check]:
        (rates,) = bench.tune([trial])
        bench.run([structs.replace(trial, rate=rates.best)] * 2, 3)
        return []

    shape = Shape(99, "two trials", "nobody", judge)
    ran = play(shape, Preset.CI, control=False, jobs=1, note=quiet)
    planned = plan.plan_of(shape, Preset.CI, control=False)
    assert planned.trials == len(ran.trials) == 6
    assert planned.cpu_s > 0
    monkeypatch.setattr(plan, "_measure_costs", lambda _: (0.01, 0.5))
    again = plan.plan_of(shape, Preset.CI, control=False)
    assert again.cpu_s == pytest.approx((again.trials + again.tuning) * (200 * 0.01 + 4 * 0.5))
