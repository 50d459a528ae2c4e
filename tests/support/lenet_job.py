"""LeNet on MNIST, as the demo trains it, for experiments: its job, its workers, its accuracy.

A worker is what a Spark task runs (worker/spark/worker_task.py), here in any process; its rows
are its share of the training set.
"""

from concurrent.futures import Executor, wait
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ps import AdminClient, Cluster
from ps.job_spec import expect_compression, shard_specs
from ps.launch.threads import local_shards
from shards.shard_status import ShardStatus
from shards.spec import ShardSpec
from worker.caffe.inference import evaluate
from worker.caffe.job import caffe_job
from worker.caffe.model import CaffeModel
from worker.caffe.solver import Solver, read_solver
from worker.caffe.weights import lay_out
from worker.data.sources import open_source
from worker.job.options import TrainOptions
from worker.job.training_job import Job
from worker.spark.worker_task import TaskSpec, decode_reports, run_task
from worker.training.training_loop import WorkerReport

_DEMO = Path(__file__).parents[2] / "deploy" / "demo"
_ROWS = "rows.arrow"


@cache
def solver() -> Solver:
    return read_solver(_DEMO / "lenet_solver.prototxt", open_source(_DEMO / "mnist").shape)


def lenet_job(
    *, steps: int, workers: int, shards: int, bound: int | None, seed: int = 1, **options: Any
) -> Job:
    """The demo's job, with this number of steps of each worker and other options of training."""
    given = TrainOptions(shards=shards, staleness=bound, seed=seed, max_iter=steps, **options)
    return caffe_job(solver(), given, workers=workers)


def specs_of(job: Job) -> list[ShardSpec]:
    specs = shard_specs(
        job.model().table,
        shards=job.runtime.shards,
        rule=job.rule,
        schedule=job.schedule,
        decay=job.decay,
        bound=job.bound,
        workers=job.workers,
        lease_s=job.runtime.lease_s,
    )
    return expect_compression(specs, job.links.build_compression())


def rows(part: Literal["train", "test"] = "train") -> pa.Table:
    """The images and labels of a set."""
    return pa.Table.from_batches(open_source(_DEMO / "mnist", part).batches())


def write_rows(folder: Path) -> None:
    """Write the training set to where each worker maps it into memory."""
    table = rows()
    with pa.OSFile(str(folder / _ROWS), "wb") as file, pa.ipc.new_file(file, table.schema) as out:
        out.write_table(table)


def run_worker(
    number: int,
    incarnation: int,
    folder: Path,
    job: Job,
    cluster: Cluster,
    patience_s: float = 60.0,
) -> WorkerReport:
    """Train worker `number` to the end of the plan, from the last of its pushes that was applied.

    Its rows are in `folder`, from `write_rows`.
    """
    whole = pa.ipc.open_file(pa.memory_map(str(folder / _ROWS))).read_all()
    share = whole.num_rows // job.workers
    spec = TaskSpec(
        cluster=cluster,
        plan=job.plan,
        batch_size=job.batch_size,
        patience_s=patience_s,
        link=job.links.build_link(),
        transport=job.links.transport,
        compression=job.links.build_compression(),
    )
    own = iter(whole.slice(number * share, share).to_batches())
    (done,) = run_task(own, spec, job.model, number, incarnation)
    (report,) = decode_reports([[cell.as_py() for cell in done.column(0)]])
    return report


class Training(NamedTuple):
    """What a training left: the workers' reports, the shards' statuses, the weights."""

    reports: list[WorkerReport]
    statuses: list[ShardStatus]
    weights: NDArray[np.float32]


def train_in(
    pool: Executor, folder: Path, job: Job, *, seed: int = 1, patience_s: float = 60.0
) -> Training:
    """Train a job to its end: its shards are threads of this process, its workers run in `pool`.

    The rows are in `folder`, from `write_rows`. Raises the error of a worker once all have ended.
    """
    with (
        local_shards(specs_of(job), job.model().initial(seed)) as cluster,
        AdminClient(cluster) as admin,
    ):
        tasks = [
            pool.submit(run_worker, number, 0, folder, job, cluster, patience_s)
            for number in range(job.workers)
        ]
        wait(tasks)
        reports = [task.result() for task in tasks]
        return Training(reports, admin.status(), admin.read())


@cache
def _tested() -> tuple[CaffeModel, CaffeModel, pa.Table]:
    return CaffeModel(solver().train), CaffeModel(solver().tests[0].net), rows("test")


def examine(weights: NDArray[np.float32], images: int | None = None) -> dict[str, float]:
    """Mean loss and accuracy over the first `images` of the test set, all unless given."""
    trained, tested, table = _tested()
    laid_out = lay_out(weights, trained.table, tested.net)
    return evaluate(tested, laid_out, table.slice(0, images).to_batches(), tested.net.batch_size)
