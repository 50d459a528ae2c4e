"""The rules of the shapes: censored runs, best levels, checks of their own, and tests on a part."""

import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from deploy.experiments import report, statistics
from deploy.experiments.cluster import ClusterModel, StepTimes
from deploy.experiments.images import Mlp, choose_images, mnist
from deploy.experiments.shapes import SHAPES, delays, momentum, waiting, windows
from deploy.experiments.shapes.base import (
    Bench,
    Check,
    Origin,
    Preset,
    ShapeVerdict,
)
from deploy.experiments.shapes.plan import PlanningBench
from deploy.experiments.statistics import TargetTimes
from deploy.experiments.training_simulation import CurvePoint, TrainingSimulation
from deploy.experiments.trial_table import TableTrial, describe_setting, write_table
from deploy.experiments.trials import Trial, TrialResult
from deploy.experiments.tuning import Tuned
from shards.shard import Shard
from tests.support.shape_outcomes import keep_outcome

INF = math.inf


def quiet(_: str) -> None:
    """Print nothing."""


class ScriptedBench(Bench):
    """A bench whose trials reach any error after a time that a function of the trial gives."""

    measures = False

    def __init__(self, seconds: Mapping[str, Sequence[float]], key: str) -> None:
        super().__init__(Preset.CI, note=quiet)
        self.seconds, self.key = seconds, key

    def tune(self, levels: Sequence[Trial]) -> list[Tuned]:
        return [Tuned(0.01, 0.01, 5.0) for _ in levels]

    def _run(self, trials: Sequence[Trial]) -> list[TrialResult]:
        return [self._result(trial) for trial in trials]

    def _result(self, trial: Trial) -> TrialResult:
        times = self.seconds[str(getattr(trial, self.key))]
        seconds = times[trial.seed % len(times)]
        reached = math.isfinite(seconds)
        end = CurvePoint(
            updates=int(seconds) if reached else trial.gradients,
            gradients=trial.gradients,
            seconds=seconds if reached else 9e9,
            loss=1.0,
            error=1.0 if reached else 90.0,
        )
        wait = 0.5 / (1 + (trial.staleness or 0))
        return TrialResult(trial=trial, curve=[end], staleness=[1], wait_share=wait)


def times(*values: float) -> TargetTimes:
    return TargetTimes(values)


def kind(*levels: float, end: float = INF) -> delays.DelayTimes:
    """Ten seeds that differ a little, with these times at delays of 0, 8 and 32."""
    return delays.DelayTimes(
        [0, 8, 32], [times(*(level * (1 + seed / 1000) for seed in range(10))) for level in levels]
    )


def test_runs_that_missed_do_not_count_as_the_end() -> None:
    """At 32 all seeds of one layer missed, and six layers diverged: that level says nothing. At 8
    six layers are steeper, although their T(0) is larger, which an end of 6,000 turned round."""
    shallow, deep = kind(600, 1320, INF), kind(1400, 5800, INF)
    apart = deep.compare(shallow)
    assert apart.low > 0
    assert apart.mean == pytest.approx((math.log(5800 / 1400) - math.log(1320 / 600)) / 8)
    kinds = {(1, "sgd"): shallow, (6, "sgd"): deep}
    assert delays.judge_depths(kinds, [1, 6]).verdict is ShapeVerdict.REPRODUCED
    capped = [np.minimum([*level.values], 6000) for level in (*shallow.times, *deep.times)]
    ratios = [capped[2] / capped[0], capped[5] / capped[3]]
    assert np.mean(ratios[0]) > np.mean(ratios[1]), "at the run's end the shallow net looks steeper"


def test_one_censored_run_in_ten_counts_as_infinite() -> None:
    """A slope of ten seeds has the interval of its median, with one infinite seed among them; with
    two the level is left out, and with one level left nothing is known."""
    base, late = times(*[100.0] * 10), [200.0 + seed for seed in range(9)]
    slope = statistics.slope_of_times([0, 8], [base, times(*late, INF)])
    assert max(slope.by_seed) == INF
    assert 0 < slope.interval.low < slope.interval.high < INF
    slope = statistics.slope_of_times([0, 8], [base, times(*late[:8], INF, INF)])
    assert not slope.known
    assert (slope.interval.low, slope.interval.high) == (-INF, INF)
    assert kind(600, INF, INF).compare(kind(600, 900, 1200)).low == -INF


def test_the_interval_of_a_median_covers_it() -> None:
    """Nominal 95 %, and at least that, with a fifth of the values infinite."""
    sets = np.random.default_rng(1).normal(1.5, 1.0, (2000, 10))
    sets[sets > np.quantile(sets, 0.8)] = INF
    intervals = [statistics.median_interval(values) for values in sets]
    assert np.mean([one.low <= 1.5 <= one.high for one in intervals]) > 0.95
    assert statistics.median_interval([1.0] * 5).high == INF
    assert statistics.median_interval([1.0, 2, 3, 4, 5, INF]) == (4.0, 1.0, INF)
    assert statistics.subtract_pairs([INF, INF, 1], [INF, 1, 1]).tolist() == [0, INF, 0]


def test_the_best_level_needs_a_probability() -> None:
    """The least median is in the set by luck in half of the draws, surely in all, or not at all."""
    sure = [[1300.0] * 10, [600.0] * 10, [900.0] * 10]
    assert statistics.best_probability(sure, [1]) == 1.0
    assert statistics.best_probability(sure, [2]) == 0.0
    assert statistics.best_probability(sure, [1], gain=3.0) == 0.0
    assert statistics.best_probability([[5.0] * 10] * 4, [0]) == 0.25
    assert statistics.best_probability([[INF] * 10] * 4, [0]) == 0.0
    noise = np.random.default_rng(3).normal(636, 30, (2, 10)).tolist()
    assert 0.05 < statistics.best_probability(noise, [0]) < 0.95


def test_without_delays_no_kind_is_steeper() -> None:
    """The control of shape 12: its levels are the same runs, which take as long."""
    seconds = {
        f"deep:{layers}": [100.0 * layers + seed for seed in range(10)] for layers in (1, 2, 6)
    }
    checks = delays.judge(ScriptedBench(seconds, "workload"), control=True)
    assert {check.verdict for check in checks} == {ShapeVerdict.NOT_REPRODUCED}


def judged(checks: list[Check], words: str) -> Check:
    """The one check with these words in its claim."""
    (one,) = (check for check in checks if words in check.claim)
    return one


def test_bounds_are_not_judged_by_luck() -> None:
    """Shape 2: times that do not depend on the bound, with an interval of both signs, do not show
    that they rise; and 635 s against 638 does not make a bound the best."""
    dice = np.random.default_rng(0)
    flat = {str(s): (3600 + dice.normal(0, 100, 10)).tolist() for s in (0, 1, 2, 4, 8, 16)}
    checks = waiting.bounds(ScriptedBench(flat, "staleness"), control=False)
    assert judged(checks, "updates").verdict is ShapeVerdict.INCONCLUSIVE
    assert judged(checks, "best s").verdict is not ShapeVerdict.REPRODUCED
    close = {**flat, "0": [1300.0] * 10, "8": [635.0, 650.0] * 5, "16": [638.0, 642.0] * 5}
    checks = waiting.bounds(ScriptedBench(close, "staleness"), control=False)
    assert judged(checks, "best s").verdict is ShapeVerdict.INCONCLUSIVE
    clear = {str(s): [900.0 + s + seed for seed in range(10)] for s in (2, 4, 8, 16)}
    clear |= {"0": [2000.0 + seed for seed in range(10)], "1": [600.0 + s for s in range(10)]}
    best = judged(waiting.bounds(ScriptedBench(clear, "staleness"), control=False), "best s")
    assert best.verdict is ShapeVerdict.REPRODUCED
    assert best.measured.endswith("bootstrap probability 1.00")


def test_idling_with_missed_targets_is_inconclusive() -> None:
    """Shape 3: a level that most seeds miss has no part in the slope."""
    missed = {str(s): [100.0] * 5 + [INF] * 5 for s in (1, 2, 4, 8, 16)} | {"0": [100.0] * 10}
    checks = waiting.idling(ScriptedBench(missed, "staleness"), control=False)
    assert judged(checks, "slope").verdict is ShapeVerdict.INCONCLUSIVE
    assert "more than one run in ten is censored" in judged(checks, "slope").measured


def test_a_tau_is_best_only_with_a_probability() -> None:
    """Shape 4: equal times at a long exchange do not show that the best tau grows."""
    near = [times(*[100.0 + seed for seed in range(10)]), times(*[200.0] * 10)]
    dice = np.random.default_rng(2).normal(900, 30, (2, 10))
    unclear = windows.judge_best_tau([1, 50], near, [times(*level) for level in dice])
    assert unclear.verdict is ShapeVerdict.INCONCLUSIVE
    assert windows.judge_best_tau([1, 50], near, near[::-1]).verdict is ShapeVerdict.REPRODUCED
    assert windows.judge_best_tau([1, 50], near, near).verdict is ShapeVerdict.NOT_REPRODUCED


def test_the_best_momentum_needs_a_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shape 8: equal errors of all momenta do not show that the best one falls."""
    dice = np.random.default_rng(4)

    class Noise(ScriptedBench):
        def _result(self, trial: Trial) -> TrialResult:
            point = CurvePoint(1, 1, 1.0, 1.0, float(dice.normal(5, 1)))
            return TrialResult(trial=trial, curve=[point])

    check = momentum._explicit(Noise({}, "rule"), "asp:scale=1")
    assert check.verdict is ShapeVerdict.INCONCLUSIVE


def test_asynchronous_averaging_does_not_discount(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shape 4 weighs each worker's window alike, however stale it is."""
    ran = list[Trial]()

    class Noting(PlanningBench):
        def _run(self, trials: Sequence[Trial]) -> list[TrialResult]:
            ran.extend(trials)
            return super()._run(trials)

    monkeypatch.setattr("deploy.experiments.shapes.plan._measure_costs", lambda _: (0.0, 0.0))
    check = windows.sparknet(Noting(Preset.CI), False)[-1]
    assert check.claim.startswith("asynchronous averaging")
    late = [one for one in ran if one.rule == "sgd" and "local_sgd" not in one.strategy][-1]
    assert late.cluster.workers == 5
    trial = structs.replace(late, workload="quad", gradients=2000, rate=0.001, held_out=False)
    simulation = TrainingSimulation(trial.job(), trial.problem())
    scales = set[float]()
    handle = Shard.handle

    def noting(shard: Shard, *arguments: object) -> object:
        outs = handle(shard, *arguments)  # type: ignore[arg-type]
        scales.update(out.message.scale for out in outs if hasattr(out.message, "scale"))
        return outs

    monkeypatch.setattr(Shard, "handle", noting)
    simulation.advance(2000)
    assert simulation.shards[0].metrics.since(0)[1]["staleness"].max() > 2
    assert len(scales) == 1, "no push counts less than another, however stale"


def test_tested_images_are_a_fair_part() -> None:
    """Each digit has its share, both halves of the test set are in it, and a smaller part is within
    a larger one. All of them are the test set itself."""
    data = mnist()
    images, labels = choose_images(2000)
    shares = np.bincount(data.test_labels) / 5
    assert np.abs(np.bincount(labels) - shares).max() <= 1
    known = {image.tobytes(): at for at, image in enumerate(data.test)}
    rows = [known[image.tobytes()] for image in images]
    assert 900 < sum(row < 5000 for row in rows) < 1100
    assert set(rows) < {known[image.tobytes()] for image in choose_images(4000)[0]}
    assert (choose_images(10_000)[0] == data.test).all()


def test_a_part_is_as_hard_as_the_whole() -> None:
    """The same weights, wrong on 7.8 % of the first 2,000 images and on 5.6 % of all, have the same
    error on the 2,000 that are measured, within a point."""
    trial = Trial(rate=0.05, gradients=6000, strategy="asp:scale=1")
    simulation = TrainingSimulation(trial.job(), trial.problem())
    simulation.advance(6000)
    weights = simulation.weights()
    whole, part = (Mlp(tested=count).measure(weights).error for count in (10_000, 2000))
    assert part == pytest.approx(whole, abs=1.0)


def test_rates_are_chosen_on_images_that_are_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trial of a search measures test images, whatever the shape asks for."""
    bench, tried = Bench(Preset.CI, note=quiet), list[Trial]()

    def run(trials: Sequence[Trial]) -> list[TrialResult]:
        tried.extend(trials)
        point = CurvePoint(1, 1, 1.0, 1.0, 5.0)
        return [TrialResult(trial=trial, curve=[point]) for trial in trials]

    monkeypatch.setattr(bench, "_run", run)
    bench.tune([Trial(workload=name) for name in ("mlp", "l1", "deep:2", "lenet", "charlm")])
    assert tried
    assert all(trial.held_out for trial in tried)
    tried[0].check()


@pytest.mark.parametrize(
    ("number", "words"),
    [(1, "mean staleness"), (4, "asynchronous averaging"), (11, "remedy")],
)
def test_checks_of_our_own_are_marked(
    number: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Averaging that waits for nobody and the remedies are in no source."""
    monkeypatch.setattr("deploy.experiments.shapes.plan._measure_costs", lambda _: (0.0, 0.0))
    checks = SHAPES[number].judge(PlanningBench(Preset.CI), False)
    assert judged(checks, words).origin is Origin.OWN
    assert Origin.SOURCE in {check.origin for check in checks}


@pytest.mark.parametrize("number", sorted(set(SHAPES) - {14, 17}))  # these have no trials
def test_the_rows_of_a_table_tell_trials_apart(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials that differ have different settings in the table and in the report."""
    monkeypatch.setattr("deploy.experiments.shapes.plan._measure_costs", lambda _: (0.0, 0.0))
    bench = PlanningBench(Preset.CI)
    SHAPES[number].judge(bench, False)
    results = list({result.trial.id: result for result in bench.results}.values())
    rows = Counter(
        tuple(map(str, TableTrial("", "", "", {}, result).row()[2:])) for result in results
    )
    assert rows.most_common(1)[0][1] == 1
    described = Counter(
        (trial.seed, trial.strategy, trial.rate, trial.cluster.workers, setting)
        for trial in (one.trial for one in results)
        for setting in (describe_setting(trial),)
    )
    assert described.most_common(1)[0][1] == 1


def test_a_report_has_delays_and_step_times(tmp_path: Path) -> None:
    """So the levels of shape 12 differ in the page and in the table."""
    cluster = ClusterModel(
        workers=2,
        delays=32,
        times=StepTimes(cv=0.3, slow_share=0.02, slow_factor=10),
        stragglers={"worker-1": 4.0},
    )
    trial = Trial(workload="deep:6", tested=2000, until_error=8.0, staleness=3, cluster=cluster)
    end = CurvePoint(1, 1, 1.0, 1.0, 5.0)
    keep_outcome(tmp_path, 12, [TrialResult(trial=trial, curve=[end])])
    report.write_report(tmp_path, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "deep:6, batch 4; sgd; steps of 1 s lognormal, cv 0.3, 2.00% of them 10x" in page
    assert "; bound 3; delays 0 to 32; slow worker-1=4; tested on 2000; until 8 %" in page
    assert write_table(tmp_path, tmp_path / "trials.csv") == 1
    with (tmp_path / "trials.csv").open() as file:
        (row,) = csv.DictReader(file)
    names = ("delays", "step_cv", "slow_share", "stragglers", "tested", "until_error")
    assert [row[name] for name in names] == ["32", "0.3", "0.02", "worker-1=4", "2000", "8.0"]
