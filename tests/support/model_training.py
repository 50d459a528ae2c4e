"""A network that a worker trains through shards of its own, wherever it computes."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.threads import local_shards
from shards.rules import Momentum
from shards.schedules import Fixed
from tests.support import tiny_job
from worker.caffe.net import Description
from worker.caffe.solver import read_solver
from worker.strategies import Downpour, Strategy
from worker.training.device_selection import allocator
from worker.training.model import Batch, Model
from worker.training.training_loop import Plan, WorkerReport, train_worker

DEMO = Path(__file__).parents[2] / "deploy" / "demo"
DROPOUT = """
layer { name: "drop" type: "Dropout" bottom: "ip1" top: "ip1"
        dropout_param { dropout_ratio: 0.4 } }
layer { name: "ip2" """
TINY = Description(tiny_job.NET.replace('layer { name: "ip2" ', DROPOUT), data_shape=(1, 8, 8))
LENET = read_solver(DEMO / "lenet_solver.prototxt").train
RATE = Fixed(base_rate=0.05)

Floats = NDArray[np.float32]


def small(rows: int, seed: int) -> Batch:
    """A batch for the tiny net."""
    dice = np.random.default_rng(seed)
    images = dice.integers(0, 256, (rows, 1, 8, 8), np.uint8)
    return {"data": images, "label": dice.integers(0, tiny_job.CLASSES, rows)}


def digits(rows: int, seed: int) -> Batch:
    """A batch for LeNet."""
    dice = np.random.default_rng(seed)
    images = dice.integers(0, 256, (rows, 1, 28, 28), np.uint8)
    return {"data": images, "label": dice.integers(0, 10, rows)}


class Trained:
    """What a worker left of a model that it trained through shards of its own."""

    def __init__(
        self, model: Model, batches: list[Batch], *, strategy: Strategy | None = None, **more: Any
    ) -> None:
        steps = len(batches) // more.get("iter_size", 1)
        strategy = strategy or Downpour()
        plan = Plan(steps=steps, seed=7, strategy=strategy, schedule=RATE, **more)
        # The least that the plan can do with: a wider one would let a prefetch be as early as the
        # link was slow, and the weights would depend on how busy the machine is.
        bound = strategy.least_bound() + plan.prefetch
        specs = shard_specs(model.table, shards=2, rule=Momentum(0.9), schedule=RATE, bound=bound)
        with (
            local_shards(specs, model.initial(3)) as cluster,
            Client(cluster, worker="w0", allocate=allocator(model)) as client,
        ):
            self.report: WorkerReport = train_worker(client, model, iter(batches), plan)
            self.weights = client.pull().weights.copy()


def same(got: Floats, expected: Floats, share: float) -> None:
    """Within a share of the largest weight."""
    apart = float(np.abs(got - expected).max())
    assert apart <= share * float(np.abs(expected).max())


PLANS = {
    "plain": {},
    "prefetch": {"prefetch": True},
    "n_push": {"strategy": Downpour(n_push=2)},
    "n_fetch": {"strategy": Downpour(n_fetch=3)},
    "iter_size and clip": {"iter_size": 2, "clip": 0.5},
}
