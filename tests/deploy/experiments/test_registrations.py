"""Registrations of shapes, premises, and what their set-ups need: schedules, starts, nets."""

import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from deploy.experiments import report
from deploy.experiments.cluster import ClusterModel
from deploy.experiments.shapes import SHAPES
from deploy.experiments.shapes.base import (
    Bench,
    Check,
    Origin,
    Preset,
    Registration,
    Shape,
    ShapeVerdict,
    keep,
    load_outcomes,
    play,
)
from deploy.experiments.shapes.plan import PlanningBench
from deploy.experiments.training_simulation import TrainingSimulation
from deploy.experiments.trials import Trial, run_trial, with_seed
from deploy.experiments.tuning import TUNING_SEEDS
from deploy.experiments.workloads import workload_of
from shards.errors import BadInput
from tests.support.fresh_clone import ROOT


def quiet(_: str) -> None:
    """Print nothing."""


TRIAL = Trial(workload="quad", strategy="asp", gradients=20)


def check(verdict: ShapeVerdict, origin: Origin = Origin.SOURCE) -> Check:
    return Check("claim", "published", "measured", verdict, origin)


def judge_first(bench: Bench, _: bool) -> list[Check]:
    bench.run([TRIAL], 2)
    return [check(ShapeVerdict.NOT_REPRODUCED)]


def judge_second(bench: Bench, _: bool) -> list[Check]:
    bench.run([TRIAL], 2)
    return [check(ShapeVerdict.REPRODUCED)]


SECOND = Registration(2, judge_second, range(1000, 1010), "abc1234", "2026-11-28T00:00:00+00:00")
TWICE = Shape(99, "t", "s", judge_first, (SECOND,))


def test_an_earlier_registration_keeps_its_verdict(tmp_path: Path) -> None:
    """Both outcomes are kept and shown, the newest is what runs, and each has its own seeds."""
    old = play(TWICE, Preset.CI, control=False, jobs=1, note=quiet, registration=1)
    new = play(TWICE, Preset.CI, control=False, jobs=1, note=quiet)
    assert (old.verdict, new.verdict) == (ShapeVerdict.NOT_REPRODUCED, ShapeVerdict.REPRODUCED)
    assert [result.trial.seed for result in old.trials] == [0, 1]
    assert [result.trial.seed for result in new.trials] == [1000, 1001]
    for outcome in (old, new):
        keep(outcome, tmp_path)
    assert sorted(outcome.name for outcome in load_outcomes(tmp_path)) == ["99", "99.2"]
    report.write_report(tmp_path, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<td>99</td>" in page
    assert "<td>99.2</td>" in page
    with pytest.raises(BadInput, match="shape 99: registration: expected 1 to 2, got 3"):
        TWICE.registration(3)


def test_the_report_shows_whether_a_commit_precedes_the_results() -> None:
    """By the time of the commit and that of the first trial."""
    outcome = play(TWICE, Preset.CI, control=False, jobs=1, note=quiet)
    early, late = (
        structs.replace(outcome, committed_at=text)
        for text in ("2020-01-01T00:00:00+00:00", "2999-01-01T00:00:00+00:00")
    )
    assert early.registered == "abc1234, before the first trial"
    assert late.registered == "abc1234, after the first trial"
    assert structs.replace(outcome, commit="").registered == "no commit is recorded"


def test_the_commit_of_the_second_set_ups_has_them() -> None:
    """Its time is that in git, and it has the functions that run. Copies without git skip it."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    for registered in (one for shape in SHAPES.values() for one in shape.later):
        shown = ["git", "-C", str(ROOT), "show", "-s", "--format=%cI", registered.commit]
        at = subprocess.run(shown, capture_output=True, text=True, check=False).stdout.strip()
        if not at:
            pytest.skip("a shallow clone")
        assert at == registered.committed_at
        name = f"{registered.judge.__module__.replace('.', '/')}.py"
        shown = ["git", "-C", str(ROOT), "show", f"{registered.commit}:{name}"]
        source = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
        assert f"def {registered.judge.__name__}(" in source


def test_an_earlier_trial_dates_the_outcome(tmp_path: Path) -> None:
    """A shape that continues began with the first trial that it kept."""
    first = play(TWICE, Preset.CI, control=False, jobs=1, note=quiet, out=tmp_path)
    kept = min((tmp_path / "shape-trials" / "trials").iterdir())
    again = play(TWICE, Preset.CI, control=False, jobs=1, note=quiet, out=tmp_path)
    assert again.began_at <= kept.stat().st_mtime + 1
    assert again.began_at >= first.began_at - 1


def test_only_registered_seeds_are_reported() -> None:
    """A set-up that asks for others does not run."""

    def judge(bench: Bench, _: bool) -> list[Check]:
        bench.run([TRIAL], 2, first=0)
        return []

    wrong = Shape(99, "t", "s", judge_first, (SECOND._replace(judge=judge),))
    with pytest.raises(AssertionError, match="seeds that are registered"):
        play(wrong, Preset.CI, control=False, jobs=1, note=quiet)


WITH_TRIALS = [n for n, shape in sorted(SHAPES.items()) if shape.later and n != 14]
"""The shapes with later registrations but 14, which runs no trials."""


@pytest.mark.parametrize("number", WITH_TRIALS)
def test_a_later_registration_has_seeds_of_its_own(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No result of an earlier one, nor of the search for rates, is reported again."""
    monkeypatch.setattr("deploy.experiments.shapes.plan._measure_costs", lambda _: (0.0, 0.0))
    reported = list[set[int]]()
    shape = SHAPES[number]
    for registered in (shape.registration(1), *shape.later):
        bench = PlanningBench(Preset.CI)
        bench.seeds = registered.seeds
        registered.judge(bench, False)
        reported.append({result.trial.seed for result in bench.results})
    assert all(reported)
    assert not set.intersection(*reported)
    assert not set.union(*reported) & set(TUNING_SEEDS)


@pytest.mark.parametrize("verdict", [ShapeVerdict.NOT_REPRODUCED, ShapeVerdict.INCONCLUSIVE])
def test_a_premise_that_fails_ends_in_not_applicable(verdict: ShapeVerdict) -> None:
    """Whatever the other checks say; one that holds decides nothing."""
    for premise, expected in (
        (verdict, ShapeVerdict.NOT_APPLICABLE),
        (ShapeVerdict.REPRODUCED, ShapeVerdict.NOT_REPRODUCED),
    ):
        checks = [check(premise, Origin.PREMISE), check(ShapeVerdict.NOT_REPRODUCED)]
        shape = Shape(99, "t", "s", lambda *_, found=checks: found)
        outcome = play(shape, Preset.CI, control=False, jobs=1, note=quiet)
        assert outcome.verdict is expected
        assert outcome.lines()[2].endswith("claim (premise)")


def test_a_premise_is_judged_on_the_seeds_that_choose_rates() -> None:
    """On held-out data, and none of its trials is reported."""
    bench = Bench(Preset.CI, note=quiet)
    (results,) = bench.probe([TRIAL])
    assert [result.trial.seed for result in results] == list(TUNING_SEEDS)
    assert all(result.trial.held_out for result in results)
    assert (bench.results, bench.tuned) == ([], 3)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("fixed", [0.4] * 8),
        ("step:at=0.5/0.75,gamma=0.1", [0.4] * 4 + [0.04] * 2 + [0.004] * 2),
        ("cosine", [0.2 * (1 + math.cos(math.pi * step / 8)) for step in range(8)]),
    ],
)
def test_a_schedule_is_in_shares_of_the_run(schedule: str, rates: list[float]) -> None:
    """The shards of one worker, and its own steps in a window, take the rates of plain SGD."""
    problem = workload_of("quad")
    weights = problem.start(0)
    gradient = np.empty_like(weights)
    for rate, batch in zip(rates, problem.batches(0, 0), strict=False):
        problem.gradient(weights, batch, gradient)
        weights = weights - np.float32(rate) * gradient
    for strategy in ("asp:scale=1", "local_sgd:h=8"):
        trial = Trial(
            workload="quad",
            strategy=strategy,
            rate=0.4,
            schedule=schedule,
            gradients=8,
            cluster=ClusterModel(workers=1),
        )
        simulation = TrainingSimulation(trial.job(), trial.problem())
        simulation.advance(8)
        assert simulation.weights() == pytest.approx(weights, rel=1e-5, abs=1e-7)


def test_slow_workers_reach_the_end_of_a_schedule_too() -> None:
    """Each by its share of the steps; the shards count mean steps."""
    cluster = ClusterModel(workers=4, stragglers={"worker-0": 4, "worker-1": 4, "worker-2": 2})
    trial = Trial(strategy="local_sgd:h=5", schedule="cosine", gradients=800, cluster=cluster)
    ends = [trial.job().plan(number).schedule for number in range(4)]
    assert [end.rate(length) for end, length in zip(ends, (100, 100, 200, 400), strict=True)] == [
        0.0
    ] * 4
    assert ends[3].rate(200) == pytest.approx(trial.rate / 2)
    assert trial.job().plan().schedule.rate(100) == pytest.approx(trial.rate / 2)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("linear", "schedule: expected fixed, cosine or step:at=0.5/0.75,gamma=0.1, got 'linear'"),
        ("step:at=0.5", "schedule: expected fixed, cosine or step"),
        ("step:at=0.7/0.5,gamma=0.1", "schedule: at: expected rising shares between 0 and 1"),
        ("step:at=half,gamma=0.1", "schedule: at: expected a number, got 'half'"),
        ("cosine:gamma=2", "schedule: expected fixed, cosine or step"),
    ],
)
def test_a_wrong_schedule_is_one_sentence(schedule: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Trial(schedule=schedule).check()


def test_a_trial_starts_from_the_weights_of_another() -> None:
    """Those at its end, with a seed of their own for each seed of the trial."""
    first = Trial(workload="quad", strategy="asp:scale=1", gradients=200, rate=0.1)
    first = structs.replace(first, cluster=ClusterModel(workers=1))
    trial = structs.replace(TRIAL, start=first)
    begun = [with_seed(trial, seed).problem().start(seed) for seed in (0, 1, 0)]
    assert (begun[0] == begun[2]).all()
    assert not (begun[0] == begun[1]).all()
    earlier = with_seed(first, 1_000_000)
    simulation = TrainingSimulation(earlier.job(), earlier.problem())
    simulation.advance(200)
    assert (begun[0] == simulation.weights()).all()
    assert run_trial(trial).curve[0].error == pytest.approx(run_trial(earlier).error)
    assert trial.id != TRIAL.id


def test_a_start_of_another_problem_is_one_sentence() -> None:
    with pytest.raises(BadInput, match="start: expected a trial of mlp, got quad"):
        Trial(start=TRIAL).check()
    with pytest.raises(BadInput, match="start: gradients"):
        Trial(start=Trial(gradients=0)).check()


def test_any_hidden_sizes() -> None:
    """mlp:128-64 has three layers of these sizes."""
    shapes = [tensor.shape for tensor in workload_of("mlp:128-64").table.tensors]
    assert shapes == [(784, 128), (128,), (128, 64), (64,), (64, 10), (10,)]
    assert workload_of("mlp:32").table.size == workload_of("mlp").table.size


def test_decay_is_that_of_the_shards_or_of_local_steps() -> None:
    """Weights without a gradient shrink by (1 - rate * decay) a step."""
    for strategy in ("asp:scale=1", "local_sgd:h=4"):
        trial = structs.replace(
            TRIAL, strategy=strategy, rate=0.1, cluster=ClusterModel(workers=1), gradients=4
        )
        ends = []
        for decay in (0.0, 0.5):
            job = structs.replace(trial, decay=decay).job()
            simulation = TrainingSimulation(job, trial.problem())
            simulation.advance(4)
            ends.append(simulation.weights()[0])
        assert ends[1] == pytest.approx(ends[0] * 0.95**4, rel=0.02)
