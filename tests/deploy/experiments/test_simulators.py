"""The two simulators of training: what they promise, and that they run the code under test."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as some
from msgspec import structs

from deploy.experiments import trials
from deploy.experiments.agreement import agreement
from deploy.experiments.cluster import ClusterModel, Law, LinkPartition, StepTimes, WorkerKill
from deploy.experiments.images import mnist
from deploy.experiments.jobs import SimulatedJob
from deploy.experiments.logistic import Proximal
from deploy.experiments.real_runs import RealRun, replay_run
from deploy.experiments.timing_simulation import TimingSimulation
from deploy.experiments.training_simulation import Course, TrainingSimulation
from deploy.experiments.trials import Trial, run_trial
from deploy.experiments.workloads import workload_of
from ps.transport.link_model import LinkStream
from shards import rules, updates
from shards.errors import BadInput
from shards.gate import Gate
from shards.messages import Push
from shards.rules import Decay
from worker.strategies import strategy_of

SLOW = "rtt=300ms,jitter=30ms,rate=1Mbit,loss=10%"


def job(
    text: str, bound: int | None = None, *, seed: int = 1, rate: float = 0.01, **cluster: Any
) -> SimulatedJob:
    """A job of six workers, of which one is slow."""
    given: dict[str, Any] = {"workers": 6, "stragglers": {"worker-3": 2.5}} | cluster
    model = ClusterModel(**given)
    strategy = strategy_of("strategy", text).for_workers(model.workers)
    return SimulatedJob(strategy=strategy, cluster=model, rate=rate, seed=seed, bound=bound)


def trained(one: SimulatedJob, gradients: int = 300) -> tuple[Course, bytes]:
    """A run on the quadratic problem, and the weights it ends with."""
    simulation = TrainingSimulation(one, workload_of("quad"))
    return simulation.run(gradients), simulation.weights().tobytes()


def test_one_seed_gives_the_same_bytes() -> None:
    """Weights and records repeat to the bit, and another seed gives others."""
    runs = [trained(job("ssp", 2, seed=seed, link=SLOW)) for seed in (1, 1, 2)]
    ends = [(course.records.tobytes(), weights) for course, weights in runs]
    assert ends[0] == ends[1]
    assert ends[0] != ends[2]


@pytest.mark.parametrize("link", ["", SLOW])
@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("asp", None),
        ("ssp", 1),
        ("bsp", 0),
        ("bsp:b=2", 0),
        ("easgd:tau=4", None),
        ("softsync:n=4", None),
        ("downpour:n_push=3,n_fetch=2", 8),
        ("downpour:n_push=2,n_fetch=6", 9),
        ("sparknet:tau=3", 0),
        ("fedbuff:k=3,window=4", None),
    ],
)
def test_both_simulators_agree(text: str, bound: int | None, link: str) -> None:
    """The timing simulator makes the records of real sessions and shards: who, when, how stale."""
    one, problem = job(text, bound, link=link), workload_of("quad")
    real = TrainingSimulation(one, problem).run(200).records
    timed = TimingSimulation(one, payload_bytes=4 * problem.table.size).run(len(real)).records
    numbers = [int(name.removeprefix(b"worker-")) for name in real["worker"]]
    assert numbers == timed["worker"].tolist()
    for column in set(timed.dtype.names or ()) - {"worker"}:
        assert np.array_equal(real[column], timed[column]), column


def test_the_time_of_workers_is_split() -> None:
    """With steps of a second and a round trip of one, half of the time is computing; in rounds the
    slow worker computes, and the others wait; without a link all that is left is waits."""
    times = StepTimes(mean_s=1.0, law=Law.FIXED)
    cluster = ClusterModel(workers=2, times=times, link="rtt=1s")
    trial = Trial(workload="quad", gradients=200, cluster=cluster)
    assert run_trial(trial).compute_share == pytest.approx(0.5, abs=0.01)
    uneven = ClusterModel(workers=2, times=times, stragglers={"worker-1": 3.0})
    found = run_trial(structs.replace(trial, strategy="bsp", cluster=uneven))
    assert found.compute_share == pytest.approx(2 / 3, abs=0.01)
    assert found.compute_share + found.wait_share == pytest.approx(1.0, abs=0.01)


def test_a_partition_holds_back_what_is_sent_in_it() -> None:
    """Nothing of the cut worker arrives from its beginning to its end, and the others, which do not
    wait, make it as stale as its absence was long. Both simulators agree."""
    cut = LinkPartition(at_s=10.0, for_s=8.0, worker=2)
    one = job("asp", workers=4, stragglers={}, partitions=(cut,))
    real = TrainingSimulation(one, workload_of("quad")).run(160).records
    timed = TimingSimulation(one).run(len(real)).records
    assert np.array_equal(real["time"], timed["time"])
    assert np.array_equal(real["staleness"], timed["staleness"])
    times = real["time"][real["worker"] == b"worker-2"]
    assert not ((times > 10.0) & (times < 18.0)).any()
    assert (times >= 18.0).any()
    mine = real["staleness"][real["worker"] == b"worker-2"]
    assert mine.max() > 15
    everyone = job("asp", workers=4, partitions=(LinkPartition(at_s=10.0, for_s=8.0),))
    rows = TimingSimulation(everyone).run(160).records
    assert np.diff(rows["time"]).max() >= 7.0


@pytest.mark.parametrize(("on_stale", "dropped"), [("drop:2", True), ("scale:2", False)])
def test_a_limit_of_staleness_is_the_shards(on_stale: str, dropped: bool) -> None:
    """As in downpour train: what is staler is dropped, or its rate is scaled down."""
    trial = Trial(workload="quad", on_stale=on_stale, cluster=ClusterModel(workers=6))
    rows = TrainingSimulation(trial.job(), workload_of("quad")).run(120).records
    late = rows["staleness"] > 2
    assert late.any()
    assert (rows["dropped"].astype(bool) == (late & dropped)).all()
    assert (rows["scale"][late] < rows["scale"][~late].min()).all()
    with pytest.raises(BadInput, match="on_stale: expected wait for a strategy in rounds"):
        structs.replace(trial, strategy="bsp").check()
    with pytest.raises(BadInput, match="timing: on_stale: expected wait, got scale or drop"):
        TimingSimulation(trial.job())


@drawn(
    some.integers(1, 9), some.integers(0, 6), some.sampled_from(Law), some.integers(0, 2**32 - 1)
)
@settings(max_examples=30, deadline=None)
def test_every_cluster_keeps_the_promises(workers: int, bound: int, law: Law, seed: int) -> None:
    """No update is lost, time does not run backwards, staleness is what the records say, and the
    clock gap is at most the bound plus 1."""
    cluster: dict[str, Any] = {"workers": workers, "stragglers": {}, "times": StepTimes(law=law)}
    rows = TimingSimulation(job("ssp", bound, seed=seed, **cluster)).run(120).records
    assert rows["apply_version"].tolist() == list(range(1, 121))
    assert (np.diff(rows["time"]) >= 0).all()
    assert (rows["staleness"] == rows["apply_version"] - 1 - rows["read_version"]).all()
    assert rows["clock_gap"].max() <= bound + 1


@pytest.mark.parametrize("workers", [1, 4, 30])
def test_equal_workers_have_staleness_workers_minus_one(workers: int) -> None:
    """W equal workers without a bound: between a read and its push, every other pushes once."""
    rows = TimingSimulation(job("asp", workers=workers, stragglers={})).run(6000).records
    assert rows["staleness"].mean() == pytest.approx(workers - 1, rel=0.01, abs=0.01)


def late_gate(gate: Gate, clock: int, slowest: int | None) -> bool:
    return gate.bound is None or slowest is None or clock - gate.bound - 1 <= slowest


def heavier(_: rules.Momentum) -> tuple[np.float32, ...]:
    return (np.float32(0.91),)


def no_delay(stream: LinkStream) -> float:
    return 0.0


def fresh(_: updates.Updates, message: Push) -> int:
    """The staleness at the push: its worker has just read."""
    return 0


def unscaled(_: updates.Updates, message: Push) -> float:
    return 1.0


TIMES: dict[str, tuple[Any, str, Any, SimulatedJob]] = {
    "the gate lets one step more pass": (
        Gate,
        "passes",
        late_gate,
        job("ssp", 0, stragglers={}, times=StepTimes(cv=0.45)),
    ),
    "a link without its delay": (LinkStream, "_delay_s", no_delay, job("asp", link=SLOW)),
    "a straggler is ignored": (
        ClusterModel,
        "step_times",
        lambda model, seed, worker: model.times.draws(seed, worker),
        job("asp"),
    ),
}


@pytest.mark.parametrize("name", TIMES)
def test_a_planted_defect_breaks_the_agreement(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator runs the shipped code: with a defect in it, its records no longer agree with
    those of a run without, by the design's limit of .05 for staleness, throughput and waits."""
    home, attribute, wrong, one = TIMES[name]
    right, _ = trained(one, 1200)
    for again in (False, True):
        found = agreement(right.records, trained(one, 1200)[0].records)
        off = max(found.distance, abs(found.throughput), abs(found.wait_share))
        assert off > 0.05 if again else off == 0
        monkeypatch.setattr(home, attribute, wrong)


WEIGHTS: dict[str, tuple[Any, str, Any, SimulatedJob]] = {
    "a rule has another momentum": (
        rules.Momentum,
        "constants",
        heavier,
        structs.replace(job("asp"), rule=rules.Momentum(0.9)),
    ),
    "staleness is counted at the push": (updates.Updates, "_staleness", fresh, job("stale_rate")),
    "a rate is not scaled by its staleness": (
        updates.Updates,
        "_scale",
        unscaled,
        job("stale_rate"),
    ),
    "softsync's rate is not scaled": (updates.Updates, "_scale", unscaled, job("softsync:n=4")),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_planted_defect_breaks_the_replay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The turns of a run lead to its weights, and with a defect in shards or rules to others."""
    home, attribute, wrong, one = WEIGHTS[name]
    course, weights = trained(one)
    run = RealRun(one, course.records, np.frombuffer(weights, np.float32), course.seconds, 0.0)
    assert replay_run(run, workload_of("quad")).tobytes() == weights
    monkeypatch.setattr(home, attribute, wrong)
    assert replay_run(run, workload_of("quad")).tobytes() != weights


def test_a_diverging_run_is_a_result() -> None:
    """A rate that is far too high ends the run with the error of a guess and the update."""
    course, _ = trained(job("asp", rate=1e6), 3000)
    assert course.diverged_at is not None
    assert course.final.error == 100.0


def test_delays_are_measured_as_staleness() -> None:
    """One worker whose weights are 0 to 8 pulls old: each age as often as another, and no older."""
    course, _ = trained(job("asp:scale=1", workers=1, stragglers={}, delays=8), 3000)
    counts = np.bincount(course.records["staleness"])
    assert len(counts) == 9
    assert counts.min() > 270
    assert trained(job("asp", delays=8))[1] != trained(job("asp"))[1]


def test_a_killed_worker_returns_where_its_last_push_was() -> None:
    """The gate waits for a dead worker until its lease ends; its next incarnation continues with
    the push after the last one that was applied, and none is lost or applied twice."""
    kills = (WorkerKill(at_s=20.0, worker=2, back_s=30.0), WorkerKill(at_s=80.0, worker=4))
    course, _ = trained(job("ssp", 3, kill=kills, lease_s=25.0), 600)
    rows = course.records
    back = rows[rows["worker"] == b"worker-2"]
    assert back["seq"].tolist() == list(range(back["seq"][0], back["seq"][0] + len(back)))
    assert set(back["incarnation"]) == {0, 1}
    gap = np.diff(back["time"]).max()
    assert 30 < gap < 33
    gone = rows[rows["worker"] == b"worker-4"]
    assert 76 < gone["time"].max() < 80
    others = rows[rows["worker"] == b"worker-0"]["time"]
    assert 12 < np.diff(others).max() < 25, "they wait at the bound for one lease at most"
    assert others.max() > 90
    assert len(rows) == rows["apply_version"][-1]


@pytest.mark.parametrize("text", ["bsp:b=1", "asp", "softsync:n=4"])
def test_a_worker_at_the_end_of_its_plan_leaves(text: str) -> None:
    """The others continue without it, in rounds with backup workers, too; none waits for it."""
    one = structs.replace(job(text, 0 if "bsp" in text else None), steps=20)
    simulation = TrainingSimulation(one, workload_of("quad"))
    course = simulation.run(6 * 20)
    assert course.gradients == 6 * 20
    simulation.clock.run(lambda: True, math.inf)
    assert simulation.shards[0].metrics.pushes == 6 * 20
    assert not simulation.shards[0].ledger.active


def test_a_late_worker_joins_at_its_time() -> None:
    rows = trained(job("ssp", 3, joins={"worker-5": 30.0}, links={"worker-1": "rtt=4s"}))[0].records
    assert 30 < rows[rows["worker"] == b"worker-5"]["time"].min() < 32
    first = rows[rows["worker"] == b"worker-1"]["time"].min()
    assert 14 < first < 16, "its own link: three round trips to the first step, half of one after"


def test_a_proximal_step_ends_at_zero() -> None:
    """Soft thresholding: a weight moves by rate times l1 towards 0, and not beyond it."""
    weights = np.array([1.0, -1.0, 0.001, 0.0], np.float32)
    gradient = np.array([0.5, 0.5, 0.0, 0.2], np.float32)
    out = np.empty_like(weights)
    Proximal(l1=0.1).apply(weights, gradient, (), out, (), rate=0.1, decay=Decay(), count=1)
    assert out == pytest.approx([0.94, -1.04, 0.0, -0.01], abs=1e-6)


def test_data_are_part_of_a_trial_s_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another text gives another id."""
    before = Trial(workload="charlm").id
    monkeypatch.setattr(trials, "data_digest", lambda _: "another text")
    assert Trial(workload="charlm").id != before


def test_the_simulator_is_part_of_a_trial_s_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another source of a workload gives another id; and every source that a result depends on is
    among those that count: all that the module of trials imports from here, and what a user's
    module does."""
    before = Trial(workload="quad").id
    monkeypatch.setattr(trials, "simulator_id", lambda: "other")
    assert Trial(workload="quad").id != before
    folder = Path(trials.__file__).parent
    reached, left = set[str](), ["trials", "torch_problem"]
    while left:
        name = left.pop()
        reached.add(name)
        found = re.findall(
            r"from deploy\.experiments\.(\w+) import", (folder / f"{name}.py").read_text()
        )
        left += [one for one in found if one not in reached]
    assert set(trials._SOURCES) == reached


def test_a_target_that_is_missed_is_none() -> None:
    course, _ = trained(job("asp"), 12)
    assert course.first_below(0.0) is None
    assert course.first_below(100.0) == course.curve[0]


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        (ClusterModel, {"workers": 0}, "workers"),
        (ClusterModel, {"workers": 2, "stragglers": {"worker-7": 2.0}}, "got 'worker-7'"),
        (ClusterModel, {"link": "rtt=1parsec"}, "link"),
        (ClusterModel, {"links": {"worker-1": "rtt=1parsec"}}, "links: worker-1: .*link"),
        (ClusterModel, {"links": {"worker-9": "rtt=1s"}}, "links: expected .* got 'worker-9'"),
        (ClusterModel, {"joins": {"worker-1": -1.0}}, "joins: worker-1: expected 0 or more"),
        (ClusterModel, {"kill": (WorkerKill(at_s=1.0, worker=8),)}, "kill: worker: .*got 8"),
        (ClusterModel, {"partitions": (LinkPartition(at_s=1.0, for_s=10.0),)}, "less than lease_s"),
        (
            ClusterModel,
            {"partitions": (LinkPartition(at_s=1.0, for_s=1.0, worker=8),)},
            "partitions: worker: .*got 8",
        ),
        (LinkPartition, {"at_s": 1.0, "for_s": -1.0}, "partitions: for_s: expected 0 or more"),
        (WorkerKill, {"at_s": -1.0, "worker": 0}, "kill: at_s: expected 0 or more"),
        (ClusterModel, {"delays": -1}, "delays"),
        (StepTimes, {"slow_share": 2.0}, "slow_share"),
        (StepTimes, {"cv": -1.0}, "cv"),
    ],
)
def test_a_wrong_cluster_is_one_sentence(kind: Any, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        kind(**wrong)


@pytest.mark.parametrize(
    "name", ["l2", "mlp:two", "mlp:0", "mlp:9-", "lenet:2", "charlm:8", "deep:3", "quad:2"]
)
def test_an_unknown_workload_is_named(name: str) -> None:
    with pytest.raises(BadInput, match=name):
        workload_of(name)


def test_a_worker_may_have_digits_of_its_own() -> None:
    """Two each, and together all ten; otherwise every worker has all of them."""
    digits = {
        name: [
            set(mnist().labels[next(workload_of(name, 64).batches(3, worker))].tolist())
            for worker in range(5)
        ]
        for name in ("mlp", "mlp:digits")
    }
    assert digits["mlp"] == [set(range(10))] * 5
    assert digits["mlp:digits"] == [{worker, worker + 5} for worker in range(5)]


def test_lenet_learns_in_the_simulator() -> None:
    """Through the Caffe layers: weights, test error and loss of the demo's network."""
    one = Trial(workload="lenet", batch=8, tested=200, gradients=20, rate=0.05, strategy="asp")
    first, last = run_trial(structs.replace(one, cluster=ClusterModel(workers=2))).curve
    assert 80 < first.error < 100
    assert last.error < 75
    assert last.loss < first.loss < 3


def test_gradients_are_those_of_the_loss() -> None:
    """A gradient equals the finite differences of its loss, in each layer."""
    for name in ("l1", "mlp", "deep:2", "lenet", "charlm"):
        problem = workload_of(name, 8, 100)
        weights, batch = problem.start(1), next(problem.batches(1, 0))
        out = np.full_like(weights, 7.0)
        problem.gradient(weights, batch, out)
        along = np.zeros_like(weights)
        for place in problem.table.views(along).values():
            place[...] = 1.0
        assert not out[along == 0].any(), "the padding has no gradient"
        along = np.where(along > 0, np.random.default_rng(1).standard_normal(along.shape), 0)
        step = (1e-2 * along / np.linalg.norm(along)).astype(np.float32)
        scrap = np.empty_like(weights)
        above = problem.gradient(weights + step, batch, scrap)
        below = problem.gradient(weights - step, batch, scrap)
        assert (above - below) / 2 == pytest.approx(float(out @ step), rel=0.05)
