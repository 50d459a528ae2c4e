"""SSP through a worker's cache: when it pulls, how old a copy may be, and what it includes."""

from typing import Any

import numpy as np
import pytest

from deploy.experiments.cached_ssp import WorkerCache
from deploy.experiments.cluster import ClusterModel, Law, StepTimes
from deploy.experiments.real_runs import check_real
from deploy.experiments.training_simulation import TrainingSimulation
from deploy.experiments.trials import Trial
from shards.errors import BadInput
from worker.training.step_machine import WeightsPulled

WORKERS = 4


def trained(strategy: str, bound: int, **cluster: Any) -> TrainingSimulation:
    """Four workers on the quadratic problem, after 2,000 gradients."""
    model = ClusterModel(workers=WORKERS, **cluster)
    trial = Trial(
        workload="quad", strategy=strategy, staleness=bound, rate=0.01, cluster=model, seed=3
    )
    simulation = TrainingSimulation(trial.job(), trial.problem())
    simulation.advance(2000)
    return simulation


def test_bound_0_is_ssp() -> None:
    """Each step pulls, so the weights are the same, bit for bit."""
    cached, plain = trained("cached_ssp", 0), trained("ssp", 0)
    assert cached.weights().tobytes() == plain.weights().tobytes()


@pytest.mark.parametrize("bound", [1, 4, 16])
def test_even_workers_pull_once_in_s_or_one_step_more(bound: int) -> None:
    """Their copies are as new as their own clocks, or a step older where another one has still to
    push. Staleness grows with the bound, as it does not where each step pulls."""
    even = {"times": StepTimes(law=Law.FIXED)}
    cached, plain = (trained(name, bound, **even) for name in ("cached_ssp", "ssp"))
    pulls = [simulation.shards[0].metrics.pulls for simulation in (cached, plain)]
    assert pulls[1] / (bound + 1) * 0.99 < pulls[0] < pulls[1] / bound * 1.01 + WORKERS
    means = [
        simulation.shards[0].metrics.since(0)[1]["staleness"].mean()
        for simulation in (cached, plain)
    ]
    assert means[1] <= WORKERS - 1
    assert means[0] > means[1] + WORKERS * (bound - 1) / 2


def test_a_read_has_all_updates_older_than_the_bound() -> None:
    """A step at clock c sees a copy that was pulled when the slowest worker was at c - s or later,
    also where a worker is four times slower."""
    bound, steps = 3, list[tuple[int, int]]()
    original = WorkerCache.read

    def noting(cache: WorkerCache, clock: int) -> WeightsPulled | None:
        copy = original(cache, clock)
        if copy is not None:
            steps.append((clock, cache._slowest))
        return copy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerCache, "read", noting)
        simulation = trained("cached_ssp", bound, stragglers={"worker-1": 4.0})
    assert steps
    assert max(clock - slowest for clock, slowest in steps) == bound
    assert simulation.shards[0].metrics.since(0)[1]["clock_gap"].max() == bound + 1


def test_a_worker_sees_its_own_updates() -> None:
    """The copy moves by them; the array that a step is computed from does not."""
    cache = WorkerCache(2)
    cache.keep(WeightsPulled(np.ones(2, np.float32), (5,)), slowest=4)
    before = cache.read(6)
    cache.apply_own(np.ones(2, np.float32), 0.25)
    after = cache.read(6)
    assert before is not None
    assert after is not None
    assert (before.weights.tolist(), after.weights.tolist()) == ([1, 1], [0.75, 0.75])
    assert (after.versions, cache.read(7)) == ((5,), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster": ClusterModel(link="rtt=1ms")}, "cached_ssp: expected one shard without links"),
        ({"rule": "adam"}, "cached_ssp: expected rule sgd or proximal, got adam"),
        ({"staleness": None}, "expected a staleness bound, got no bound"),
    ],
)
def test_what_it_cannot_do_is_one_sentence(changes: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"strategy": "cached_ssp", "staleness": 4, **changes}
    with pytest.raises(BadInput, match=message):
        Trial(**settings).check()


def test_only_a_simulator_runs_it() -> None:
    """No message of a real run has the slowest clock."""
    trial = Trial(strategy="cached_ssp", staleness=4)
    with pytest.raises(BadInput, match="a real run: expected a strategy without a cache"):
        check_real(trial)
