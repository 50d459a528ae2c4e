"""The job that is killed every few seconds: LeNet on MNIST, as the demo has it, in plain processes.

A worker is what a Spark task runs (worker/spark_task.py), in a process of its own. Its rows are its
share of the training set, and a life that takes over goes on behind the last push that was applied.
"""

from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ps import Cluster
from worker.caffe.job import caffe_job
from worker.caffe.model import CaffeModel
from worker.caffe.solver import Solver, read_solver
from worker.caffe.weights import moved
from worker.inference import evaluate
from worker.job import Job
from worker.options import TrainOptions
from worker.sources import open_source
from worker.spark_task import TaskSpec, run_task

WORKERS, SHARDS, BOUND = 4, 2, 4
PATIENCE_S = 120.0
TESTED = 500
_DEMO = Path("deploy/demo")
_DATA = _DEMO / "mnist"
_ROWS = "rows.arrow"


@cache
def _solver() -> Solver:
    return read_solver(_DEMO / "lenet_solver.prototxt", open_source(_DATA).shape)


def job(steps: int) -> Job:
    """The demo's, with so many steps of each worker."""
    return caffe_job(
        _solver(),
        TrainOptions(shards=SHARDS, staleness=BOUND, seed=1, max_iter=steps),
        workers=WORKERS,
    )


def lay_out(folder: Path) -> None:
    """Write the training set to where a life can look at it without reading it."""
    table = pa.Table.from_batches(open_source(_DATA).batches())
    with pa.OSFile(str(folder / _ROWS), "wb") as file, pa.ipc.new_file(file, table.schema) as rows:
        rows.write_table(table)


def work(number: int, incarnation: int, folder: Path, steps: int, cluster: Cluster) -> None:
    """One life of a worker: from the last step that was applied to the last of all."""
    told = job(steps)
    rows = pa.ipc.open_file(pa.memory_map(str(folder / _ROWS))).read_all()
    share = rows.num_rows // WORKERS
    spec = TaskSpec(
        cluster=cluster, plan=told.plan, batch_size=told.batch_size, patience_s=PATIENCE_S
    )
    own = iter(rows.slice(number * share, share).to_batches())
    for _ in run_task(own, spec, told.model, number, incarnation):
        pass


class Examiner:
    """Tests weights on images that nobody trains on."""

    def __init__(self, trained: CaffeModel) -> None:
        self._trained = trained
        self._net = CaffeModel(_solver().tests[0].net)
        table = pa.Table.from_batches(open_source(_DATA, "test").batches())
        self._rows = table.slice(0, TESTED).to_batches()

    def test(self, weights: NDArray[np.float32]) -> tuple[float, float]:
        """Mean loss and accuracy."""
        laid = moved(weights, self._trained.table, self._net.net)
        found = evaluate(self._net, laid, self._rows, TESTED)
        return found["loss"], found["accuracy"]
