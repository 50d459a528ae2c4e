"""Training along a trace: the weights, records and measurements of the training simulator."""

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from deploy.experiments import trials
from deploy.experiments.cluster import ClusterModel, Law, StepTimes, WorkerKill
from deploy.experiments.timing_simulation import TIMED
from deploy.experiments.trace_training import NeedsMessages, TraceTraining, is_traced, keeps_step
from deploy.experiments.training_simulation import Course, TrainingSimulation
from deploy.experiments.trials import Trial, group_trials, run_together, run_trial, run_trials
from worker.strategies.base import Floats

SLOW = "rtt=300ms,jitter=30ms,rate=1Mbit,loss=10%"
UNEVEN = ClusterModel(workers=6, stragglers={"worker-3": 2.5})
EVEN = ClusterModel(workers=12, times=StepTimes(law=Law.FIXED))
STRATEGIES: dict[str, int | None] = {
    "asp": None,
    "ssp": 1,
    "bsp": None,
    "bsp:b=2": None,
    "cached_ssp": 3,
    "softsync:n=4": None,
    "stale_rate": None,
    "dc_asgd": None,
    "dc_asgd:adaptive=true": None,
    "downpour:n_push=3,n_fetch=2": 8,
    "downpour:n_push=2,n_fetch=6": 9,
    "sparknet:tau=3": None,
    "local_sgd:h=4": None,
    "fedbuff:k=3,window=4": None,
    "easgd:tau=4": None,
    "eamsgd:tau=3": None,
    "adag:window=3": None,
    "dynsgd:window=3": None,
}


def quad(strategy: str, **settings: Any) -> Trial:
    """A trial of 200 gradients on the quadratic problem, measured at every third."""
    given: dict[str, Any] = {
        "rate": 0.05,
        "gradients": 200,
        "look_every": 3,
        "cluster": UNEVEN,
        "staleness": STRATEGIES.get(strategy),
        **settings,
    }
    return Trial(workload="quad", strategy=strategy, **given)


def trained(simulation: TrainingSimulation | TraceTraining, trial: Trial) -> Course:
    found = simulation.run(
        trial.gradients, look_every=trial.look_every, until_error=trial.until_error
    )
    return found[0] if isinstance(found, list) else found


def both(trial: Trial) -> tuple[tuple[Course, Floats], tuple[Course, Floats]]:
    """The courses and weights of the training simulator, and along a trace."""
    full, traced = (
        TrainingSimulation(trial.job(), trial.problem()),
        TraceTraining([trial.job()], trial.problem()),
    )
    return (trained(full, trial), full.weights()), (trained(traced, trial), traced.weights())


def assert_same(trial: Trial) -> Course:
    """Check that both end with the same bits, on the same way; returns the course."""
    (full, weights), (traced, by_trace) = both(trial)
    assert by_trace.tobytes() == weights.tobytes()
    none = np.zeros(0, TIMED)
    # By its text, in which one NaN equals another.
    assert repr(traced._replace(records=none)) == repr(full._replace(records=none))
    assert len(traced.records) == len(full.records)
    numbers = [int(name.removeprefix(b"worker-")) for name in full.records["worker"]]
    assert traced.records["worker"].tolist() == numbers
    for column in set(TIMED.names or ()) - {"worker"}:
        assert np.array_equal(traced.records[column], full.records[column]), column
    return traced


@pytest.mark.parametrize("strategy", ["asp", "bsp", "softsync:n=4", "fedbuff:k=3,window=4"])
def test_delays_are_part_of_the_trace(strategy: str) -> None:
    """A step sees the weights of up to three pulls before, in windows, too."""
    course = assert_same(quad(strategy, cluster=structs.replace(UNEVEN, delays=3)))
    assert course.records["staleness"].max() > 3 or strategy != "asp"


@pytest.mark.parametrize("bound", [0, 1, 16])
def test_a_cache_is_part_of_the_trace(bound: int) -> None:
    """A worker pulls when its copy is too old, and sees its own updates until then."""
    falling = {"schedule": "step:at=0.5,gamma=0.1"}
    assert_same(quad("cached_ssp", staleness=bound, **falling))
    assert_same(quad("cached_ssp", staleness=bound, cluster=EVEN))


@pytest.mark.parametrize("link", ["", SLOW])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_trace_is_that_of_the_training_simulator(strategy: str, link: str) -> None:
    """Weights, records and every measurement are equal to the bit, with a slow worker."""
    if link and strategy == "cached_ssp":
        pytest.skip("its cache is for workers without links")
    assert_same(quad(strategy, cluster=structs.replace(UNEVEN, link=link)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_happens_at_one_moment_keeps_its_order(strategy: str) -> None:
    """Twelve workers with the same step times: every event has others at its time."""
    assert_same(quad(strategy, cluster=EVEN))


@pytest.mark.parametrize(
    "settings",
    [
        {"rule": "momentum:momentum=0.9"},
        {"rule": "adam"},
        {"rule": "adagrad", "decay": 1e-3},
        {"rule": "rmsprop", "schedule": "step:at=0.5/0.75,gamma=0.1"},
        {"schedule": "cosine"},
        {"until_error": 20.0},
    ],
)
def test_rules_and_rates_are_the_shard_s(settings: dict[str, Any]) -> None:
    """Slots, weight decay, a falling rate and an early end."""
    for strategy in ("asp", "bsp", "softsync:n=4", "downpour:n_push=3,n_fetch=2"):
        assert_same(quad(strategy, **settings))


@pytest.mark.parametrize(
    "strategy", ["asp", "bsp", "bsp:b=2", "softsync:n=4", "dc_asgd", "sparknet:tau=5"]
)
def test_a_run_diverges_at_the_same_update(strategy: str) -> None:
    """Its last measurement has the error of a guess, at the same update and time."""
    course = assert_same(quad(strategy, rate=1e6, gradients=3000, look_every=40))
    assert course.diverged_at is not None
    assert course.final.error == 100.0


def test_a_refusal_over_a_link_takes_the_training_simulator() -> None:
    """It travels to its worker, and pushes that pass it are applied; the trial's result is the
    training simulator's."""
    trial = quad("asp", rate=1e6, gradients=3000, cluster=structs.replace(UNEVEN, link=SLOW))
    with pytest.raises(NeedsMessages):
        TraceTraining([trial.job()], trial.problem()).run(trial.gradients)
    full = TrainingSimulation(trial.job(), trial.problem())
    course = trained(full, trial)
    result = run_trial(trial)
    assert result.diverged_at == course.diverged_at is not None
    assert repr(result.curve) == repr(course.curve)


@pytest.mark.parametrize(
    "settings",
    [
        {"cluster": structs.replace(UNEVEN, shards=2)},
        {"cluster": structs.replace(UNEVEN, joins={"worker-1": 3.0})},
        {"cluster": structs.replace(UNEVEN, kill=(WorkerKill(at_s=3.0, worker=1),))},
        {"on_stale": "drop:2"},
        {"strategy": "downpour:warm_steps=20"},
        {"strategy": "diloco:h=3"},
    ],
)
def test_the_rest_takes_the_training_simulator(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no trace has is chosen in one place, and is run message by message."""
    trial = structs.replace(quad("asp"), **settings)
    assert not is_traced(trial.job())

    def refuse(*_: object) -> None:
        raise AssertionError("no trace has this")

    monkeypatch.setattr(trials, "TraceTraining", refuse)
    assert run_trial(trial).gradients == 200


def mlp(strategy: str, rule: str, **settings: Any) -> list[Trial]:
    """Trials of three seeds at three rates, which keep step; one rate is far too high."""
    base = Trial(
        strategy=strategy,
        rule=rule,
        batch=4,
        tested=500,
        gradients=300,
        look_every=50,
        cluster=ClusterModel(workers=4),
        **settings,
    )
    return [
        structs.replace(base, seed=seed, rate=rate)
        for seed in (1, 2, 3)
        for rate in (0.01, 0.1, 1e12)
    ]


@pytest.mark.parametrize(
    ("strategy", "rule", "staleness"),
    [
        ("asp:scale=1", "sgd", None),
        ("asp", "adam", None),
        ("ssp", "momentum", 1),
        ("bsp", "momentum", None),
        ("softsync:n=2", "sgd", None),
    ],
)
def test_runs_in_lockstep_are_those_by_themselves(
    strategy: str, rule: str, staleness: int | None
) -> None:
    """Weights within 1e-5; the same updates, times, target times and divergence, also after some
    of them have ended."""
    several = mlp(strategy, rule, staleness=staleness)
    jobs, problem = [trial.job() for trial in several], several[0].problem()
    together = TraceTraining(jobs, problem)
    courses = together.run(300, look_every=50)
    ended = 0
    for number, (trial, course) in enumerate(zip(several, courses, strict=True)):
        apart = TraceTraining([trial.job()], problem)
        alone = trained(apart, trial)
        assert course.diverged_at == alone.diverged_at
        assert course.seconds == alone.seconds
        assert course.records.tobytes() == alone.records.tobytes()
        assert [point[:3] for point in course.curve] == [point[:3] for point in alone.curve]
        assert course.first_below(30.0) == alone.first_below(30.0)
        if course.diverged_at is None:
            assert together.weights(number) == pytest.approx(apart.weights(), abs=1e-5)
        ended += course.diverged_at is not None
    assert 3 <= ended < 9 or rule == "adam", "those at the rate that is far too high"


def test_a_target_ends_each_run_by_itself() -> None:
    """Runs in lockstep that reach it early leave the others, which continue."""
    several = mlp("asp:scale=1", "sgd", until_error=40.0)[:5]
    together = run_together(several)
    alone = [run_trial(trial) for trial in several]
    assert len({result.gradients for result in together}) > 1
    for one, other in zip(together, alone, strict=True):
        assert one.gradients == other.gradients
        assert one.staleness == other.staleness
        assert one.wait_share == other.wait_share


def test_only_runs_that_keep_step_are_grouped() -> None:
    """Seeds, rates, bounds and step times may differ; workers, batches, looks, links, windows and
    what weighs by staleness may not. A group has a most, and every trial is in one."""
    base = Trial(cluster=ClusterModel(workers=4))
    alike = [
        base,
        structs.replace(base, seed=5),
        structs.replace(base, rate=0.5, rule="adam"),
        structs.replace(base, strategy="ssp", staleness=3),
        structs.replace(base, cluster=ClusterModel(workers=4, stragglers={"worker-0": 3.0})),
    ]
    apart = [
        structs.replace(base, batch=8),
        structs.replace(base, gradients=500),
        structs.replace(base, cluster=ClusterModel(workers=5)),
        structs.replace(base, cluster=ClusterModel(workers=4, link="rtt=1ms")),
        structs.replace(base, strategy="softsync:n=2"),
        structs.replace(base, strategy="easgd:tau=2"),
        structs.replace(base, strategy="stale_rate"),
        structs.replace(base, strategy="dc_asgd"),
        structs.replace(base, strategy="bsp:b=1"),
        structs.replace(base, workload="quad"),
    ]
    groups = group_trials([*alike, *apart])
    assert sorted(number for group in groups for number in group) == list(range(15))
    assert [len(group) for group in groups] == [4, 1, *[1] * 10]
    assert [len(group) for group in group_trials([base] * 30)] == [12, 12, 6]
    assert not keeps_step(apart[3].job())


def test_results_come_in_the_order_of_the_trials() -> None:
    """Also from groups that end in another order, and from processes."""
    first = structs.replace(quad("asp"), gradients=20)
    others = [structs.replace(trial, gradients=20) for trial in mlp("asp", "sgd")[:3]]
    several = [others[0], first, others[1], structs.replace(first, seed=9), others[2]]
    for processes in (1, 2):
        results = list(run_trials(several, processes))
        assert [result.trial for result in results] == several
        assert all(math.isfinite(result.curve[0].loss) for result in results)


def test_an_error_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its traceback comes back, also where the error itself cannot be sent."""
    with (tmp_path / "file").open("wb") as file:

        def fail(_: object) -> None:
            raise ValueError("a reason", file)

        monkeypatch.setattr(trials, "run_together", fail)
        with pytest.raises(RuntimeError) as raised:
            trials._run_apart([])
    sent = pickle.dumps(raised.value)
    assert b"in fail" in sent
