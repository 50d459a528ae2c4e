"""The estimators of the second registrations, and what they do where a premise fails."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from deploy.experiments.cluster import StepTimes
from deploy.experiments.shapes import (
    averages,
    local_updates,
    second_asynchrony,
    second_waiting,
    second_windows,
)
from deploy.experiments.shapes.base import (
    Bench,
    Judge,
    Origin,
    Preset,
    ShapeVerdict,
    judge_equal,
    state_premise,
)
from deploy.experiments.statistics import Interval, equivalent
from deploy.experiments.training_simulation import CurvePoint
from deploy.experiments.trials import Trial, TrialResult
from deploy.experiments.tuning import TUNING_SEEDS, Tuned
from shards.aggregation import Average


def quiet(_: str) -> None:
    """Print nothing."""


def curve(errors: Sequence[float], step_s: float = 1.0) -> TrialResult:
    """A result with these errors, a look each `step_s`."""
    points = [CurvePoint(at, at, at * step_s, error / 10, error) for at, error in enumerate(errors)]
    return TrialResult(trial=Trial(), curve=points)


def test_a_target_is_reached_by_a_running_mean() -> None:
    """One lucky look does not reach it; a run that never does takes infinitely long."""
    lucky = curve([20.0] * 10 + [2.0] + [20.0] * 9 + [4.0] * 20)
    assert second_windows._smooth_times([lucky], 5.0) == [26.0]
    assert second_windows._smooth_times([curve([20.0] * 40)], 5.0) == [np.inf]
    falling = [curve(np.linspace(50, 10, 41).tolist())] * 2
    assert second_windows.find_targets(falling, (0.5, 1.0)) == pytest.approx([33.0, 13.0])


def test_a_speed_up_is_the_geometric_mean_over_targets() -> None:
    """Twice as fast to each target is 2, and a seed that misses one counts as 0."""
    errors = np.linspace(50, 10, 41).tolist()
    serial, fast = [curve(errors)] * 8, [curve(errors, 0.5)] * 8
    targets = second_windows.find_targets(serial, (0.5, 0.9))
    assert second_windows.measure_speedups(serial, fast, targets) == pytest.approx((2, 2, 2))
    stuck = [*fast[:7], curve([50.0] * 41)]
    assert second_windows.measure_speedups(serial, stuck, targets).low < 2
    assert second_windows.measure_speedups(serial, stuck, targets).mean == pytest.approx(14 / 8)


def test_the_optimum_of_a_parabola_has_an_interval() -> None:
    """It is found between the momenta tried; where it falls with W, the slope's interval is below
    0, and where errors are noise it holds 0."""
    at = np.array(second_windows.MOMENTA)
    assert second_windows._optimum(3 + (at - 0.4) ** 2) == pytest.approx(0.4)
    assert second_windows._optimum(3 - (at - 0.4) ** 2) in (0.0, 0.9)
    assert second_windows._optimum(3 + (at - 2) ** 2) == 0.9
    dice = np.random.default_rng(0)
    best = np.array([0.7, 0.45, 0.1])[:, None, None]
    noise = dice.normal(0, 0.02, (3, 6, 10))
    fall = second_windows._bootstrap_slope(np.log2([1, 4, 16]), (at[:, None] - best) ** 2 + noise)
    assert fall.mean == pytest.approx(-0.15, abs=0.03)
    assert fall.high < 0
    none = second_windows._bootstrap_slope(np.log2([1, 4, 16]), noise)
    assert none.low < 0 < none.high


def test_curves_cross_for_good() -> None:
    """The time after which the mean of the slow way stays below that of the fast way."""
    slow = [curve([100.0 - at for at in range(101)], 50.0)] * 2
    fast = [curve([40.0] * 101, 50.0)] * 2
    assert second_windows._crossing(slow, fast, 5000) == "after 3050 s"
    assert second_windows._crossing(fast, [curve([30.0] * 101, 50.0)], 5000) == "not at all"


def test_the_published_stragglers_are_those_of_the_set_up() -> None:
    """1.3 % of the steps 3 times as long keep the quantiles; 2 % ten times as long do not."""
    fitted = StepTimes(cv=0.1, slow_share=0.013, slow_factor=3.0)
    assert second_waiting._premise_quantiles(fitted).verdict is ShapeVerdict.REPRODUCED
    first = StepTimes(cv=0.1, slow_share=0.02, slow_factor=10.0)
    assert second_waiting._premise_quantiles(first).verdict is ShapeVerdict.NOT_REPRODUCED


def test_equivalence_of_several_levels() -> None:
    """All within the margin, one outside of it, or one too wide to say."""
    near, far = equivalent([1.0, 1.1] * 5, [1.0] * 10, 1.0), (False, Interval(2, 1.5, 2.5))
    wide = (False, Interval(0.5, -0.5, 1.5))
    assert judge_equal([near, near], 1.0) is ShapeVerdict.REPRODUCED
    assert judge_equal([near, wide], 1.0) is ShapeVerdict.INCONCLUSIVE
    assert judge_equal([near, wide, far], 1.0) is ShapeVerdict.NOT_REPRODUCED


class Untrained(Bench):
    """A bench on which nothing learns."""

    def tune(self, levels: Sequence[Trial]) -> list[Tuned]:
        return [Tuned(0.01, 0.01, 5.0) for _ in levels]

    def _run(self, trials: Sequence[Trial]) -> list[TrialResult]:
        point = CurvePoint(1, 1, 1.0, 2.3, 90.0)
        return [TrialResult(trial=trial, curve=[point], staleness=[1]) for trial in trials]


@pytest.mark.parametrize(
    "judge",
    [
        second_asynchrony.softsync,
        second_asynchrony.compensation,
        second_asynchrony.compensation_at_the_limit,
        second_asynchrony.too_high_a_rate,
        second_waiting.bounds,
        second_waiting.idling,
        second_waiting.backups,
        second_windows.sparknet,
        second_windows.delays,
        second_windows.longer_delays,
        local_updates.judge_tuned,
    ],
)
def test_a_failed_premise_ends_the_shape(judge: Judge) -> None:
    """Nothing is reported but the premises; a control runs all the same."""
    bench = Untrained(Preset.CI, note=quiet)
    assert {check.origin for check in judge(bench, False)} == {Origin.PREMISE}
    assert not bench.results


@pytest.mark.parametrize(
    ("cosine", "control", "judged"), [(0.11, 0, 0), (0.11, 1, 1), (0.02, 0, 1)]
)
def test_radial_averaging_is_judged_on_nearly_orthogonal_reports(
    cosine: float, control: int, judged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shape 14: the tuning seeds say whether they are; others are reported, of this registration
    alone. A control is judged in any case."""
    probed, reported = list[int](), list[int]()

    def measure_cosine(seed: int) -> float:
        probed.append(seed)
        return cosine

    def measure_lengths(seed: int) -> dict[tuple[Average, int], float]:
        reported.append(seed)
        return {(average, count): 1.0 for average in Average for count in averages.LEARNERS}

    monkeypatch.setattr(averages, "measure_cosine", measure_cosine)
    monkeypatch.setattr(averages, "measure_lengths", measure_lengths)
    checks = averages.judge_orthogonal(Bench(Preset.CI, note=quiet), bool(control))
    assert [check.origin for check in checks] == [Origin.PREMISE] + 2 * judged * [Origin.SOURCE]
    assert probed == list(TUNING_SEEDS)
    assert reported == list(averages.SECOND_SEEDS)[: 6 * judged]
    first = range(averages.FIRST_SEED, averages.FIRST_SEED + 2 * averages.SEEDS)
    assert not set(averages.SECOND_SEEDS) & {*TUNING_SEEDS, *first}


class Chosen(Bench):
    """A bench on which a function of the trial gives its error, also that of the tuned rates.

    A level's tuned rate is a hundredth of its error.
    """

    def __init__(self, seeds: range, error_of: Callable[[Trial], float]) -> None:
        super().__init__(Preset.CI, note=quiet)
        self.seeds, self._error_of = seeds, error_of

    def tune(self, levels: Sequence[Trial]) -> list[Tuned]:
        known = [self._error_of(level) for level in levels]
        return [Tuned(error / 100, error / 100, error) for error in known]

    def _run(self, trials: Sequence[Trial]) -> list[TrialResult]:
        return [
            TrialResult(
                trial=trial,
                curve=[CurvePoint(100, 100, 100.0, 2.3, self._error_of(trial) + trial.seed / 1e5)],
                staleness=[1],
                updates=100,
            )
            for trial in trials
        ]


def test_each_number_of_workers_has_the_largest_rate_it_bears() -> None:
    """Shape 6.3: 3 points behind SGD are borne, and nothing beyond; seeds from 2000."""

    def error_of(trial: Trial) -> float:
        workers = trial.cluster.workers
        limit = {1: 1.0, 4: 0.25, 8: 0.13}[workers]
        lost = 80.0 if trial.rate > limit else {1: 0.0, 4: 1.0, 8: 2.0}[workers]
        return 3.0 + lost * (0.4 if trial.strategy.startswith("dc_asgd") else 1.0)

    bench = Chosen(second_asynchrony.THIRD_SEEDS, error_of)
    checks = second_asynchrony.compensation_at_the_limit(bench, False)
    assert {check.verdict for check in checks} == {ShapeVerdict.REPRODUCED}
    assert "+1.00 points at 0.215" in checks[0].measured
    assert "+2.00 points at 0.128" in checks[1].measured
    rates = {
        (result.trial.cluster.workers, result.trial.strategy[:3], round(result.trial.rate, 3))
        for result in bench.results
    }
    assert rates == {
        *((1, "asp", rate) for rate in (0.215, 0.128)),
        *((4, kind, 0.215) for kind in ("asp", "dc_")),
        *((8, kind, 0.128) for kind in ("asp", "dc_")),
        (8, "asp", 0.215),
    }


def test_each_level_has_the_outer_step_that_suits_it() -> None:
    """Shape 7.2: the reported trials have the outer rate, momentum and inner rate of the least
    error; the naive form may take a smaller rate."""

    def error_of(level: Trial) -> float:
        small = "async_diloco:h=25,n=1" in level.strategy and "outer_lr=0.175" in level.strategy
        suits = "outer_lr=0.35,momentum=0.9" in level.strategy
        return 1.0 if small else 2.0 if suits else 3.0

    bench = Chosen(local_updates.SECOND_SEEDS, error_of)
    checks = local_updates.judge_tuned(bench, False)
    assert [check.origin for check in checks].count(Origin.PREMISE) == 2
    chosen = {result.trial.strategy: result.trial.rate for result in bench.results}
    assert len(chosen) == 6  # H 25 is a level for four workers, and for eight
    assert chosen.pop("async_diloco:h=25,n=1,outer_lr=0.175,momentum=0.5") == 0.01
    assert all("outer_lr=0.35,momentum=0.9" in strategy for strategy in chosen)
    assert set(chosen.values()) == {0.02}
    assert all(result.trial.start is not None for result in bench.results)


def test_a_control_has_no_premise() -> None:
    """It ends as not reproduced, not as not applicable."""
    bench, failed = Bench(Preset.CI, note=quiet), state_premise("claim", "measured", False)
    assert bench.ends_at([failed], control=False)
    assert not bench.ends_at([failed], control=True)


@pytest.mark.parametrize(
    ("seconds", "limit", "verdict"),
    [
        (9.0, 10.0, ShapeVerdict.REPRODUCED),
        (np.inf, 10.0, ShapeVerdict.NOT_REPRODUCED),
        (9.0, np.inf, ShapeVerdict.REPRODUCED),
        (np.inf, np.inf, ShapeVerdict.INCONCLUSIVE),
    ],
)
def test_two_missed_targets_say_nothing(
    seconds: float, limit: float, verdict: ShapeVerdict
) -> None:
    """A time that is infinite is no shorter than another such time."""
    assert second_windows.judge_times(seconds, limit) is verdict
