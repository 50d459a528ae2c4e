"""A solver's job."""

from pathlib import Path
from typing import Any

import pytest

from cupy_kernels.types import Precision
from ps.durability import Durability
from shards.tables import DenseTable, TensorSpec
from worker.caffe.job import caffe_job
from worker.caffe.model import CaffeModel
from worker.caffe.solver import read_solver
from worker.job.options import TrainOptions
from worker.job.runner import _patience_s
from worker.job.training_job import Job


def lenet_job(**more: Any) -> Job:
    """The demo's network, for one worker and one shard."""
    solver = read_solver(Path("deploy/demo/lenet_solver.prototxt"), (1, 28, 28))
    options = TrainOptions(staleness=0, seed=1, lease_s=60.0, **more)
    return caffe_job(solver, options, workers=1)


def test_the_precision_reaches_the_workers() -> None:
    """It is in what the model is built from, wherever that is; the CPU's numbers do not change."""
    models = {}
    for precision in Precision:
        model = lenet_job(precision=precision).model()
        assert isinstance(model, CaffeModel)
        assert model.net.description.precision is precision
        models[precision] = model.initial(1).tobytes()
    assert len(set(models.values())) == 1


@pytest.mark.parametrize(
    ("durability", "silence_s", "rollback_s", "patience_s"),
    [
        (Durability.MEMORY, 0.5, 0.0, 10.0),
        (Durability.MEMORY, 0.5, 10.0, 30.0),
        (Durability.LOGGED, 0.5, 10.0, 130.24),
        (Durability.REPLICATED, 0.5, 10.0, 10.5),
        (Durability.REPLICATED, 30.0, 10.0, 40.0),
    ],
)
def test_the_driver_waits_until_a_copy_is_suspected(
    durability: Durability, silence_s: float, rollback_s: float, patience_s: float
) -> None:
    """The wait for a silent shard exceeds the time to promote its backup, to read its log, or to
    restart from its autosave, by durability."""
    table = DenseTable("net", (TensorSpec("w", (25_600_000,)),))
    job = lenet_job(durability=durability, silence_s=silence_s, rollback_s=rollback_s)
    assert (job.runtime.silence_s, _patience_s(job, job.tables_of(table))) == (
        silence_s,
        patience_s,
    )
