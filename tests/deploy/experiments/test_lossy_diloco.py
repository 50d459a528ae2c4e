"""DiLoCo that loses exchanges: its rounds are the mean of what arrived, the others keep theirs."""

import numpy as np
import pytest

from deploy.experiments.cluster import ClusterModel
from deploy.experiments.lossy_diloco import LossyDiLoCo
from deploy.experiments.training_simulation import TrainingSimulation
from deploy.experiments.trials import Trial
from deploy.experiments.workloads import workload_of
from shards.errors import BadInput
from worker.strategies.base import Local

WORKERS = 4


def trained(strategy: str, gradients: int = 400) -> TrainingSimulation:
    """Four workers on the quadratic problem."""
    cluster = ClusterModel(workers=WORKERS)
    trial = Trial(workload="quad", strategy=strategy, rate=0.01, cluster=cluster)
    simulation = TrainingSimulation(trial.job(), workload_of("quad"))
    simulation.advance(gradients)
    return simulation


def test_without_losses_it_is_diloco() -> None:
    """The same weights, bit for bit."""
    lossless, plain = trained("lossy_diloco:h=5,drop=0"), trained("diloco:h=5")
    assert lossless.weights().tobytes() == plain.weights().tobytes()


def test_a_round_is_the_mean_of_the_deltas_that_arrive() -> None:
    """The mean of what all workers push is that of the deltas of those that lost nothing; a worker
    that lost its exchange keeps its weights, and the others take the new ones."""
    whole = LossyDiLoCo(h=3, drop=0.5, seed=7).for_workers(WORKERS)
    lost = whole.draw_losses(0)
    assert 0 < lost.count(True) < WORKERS, "a seed with both"
    pulled, arrived, pushed = np.zeros(2, np.float32), [], []
    for number in range(WORKERS):
        worker = whole.for_worker(f"worker-{number}")
        own = np.full(2, number + 1, np.float32)
        local = Local(own, pulled, (0,), gradient=np.empty(2, np.float32), count=3)
        pushed.append(worker.contribution(local).copy())
        new = np.full(2, 9, np.float32)
        worker.on_pull(local, new)
        assert local.weights is (own if lost[number] else new)
        if not lost[number]:
            arrived.append(-own)
    assert np.allclose(np.mean(pushed, 0), np.mean(arrived, 0))


def test_losses_are_drawn_evenly_from_the_trial_s_seed() -> None:
    """About half of the exchanges are lost, others in another trial."""
    first, second = (
        Trial(strategy="lossy_diloco:drop=0.5", seed=seed).job().strategy for seed in (1, 2)
    )
    assert isinstance(first, LossyDiLoCo)
    assert isinstance(second, LossyDiLoCo)
    drawn = [first.draw_losses(window) for window in range(500)]
    assert 0.45 < np.mean(drawn) < 0.55
    assert drawn != [second.draw_losses(window) for window in range(500)]


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("lossy_diloco:drop=2", r"drop: expected \[0, 1\), got 2"),
        ("lossy_diloco:drop=0.5,b=1", "b: expected 0 with drop, got 1"),
        ("lossy_diloco:lost=1", "unknown option 'lost'"),
    ],
)
def test_wrong_losses_are_one_sentence(strategy: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Trial(strategy=strategy).job()
