"""`worker.train`: a Caffe solver, a Spark DataFrame, and trained weights back."""

import logging
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from cupy_kernels.types import Precision
from ps import paths
from ps.durability import Durability
from ps.launch.launch_plan import ShardDevice, check_rollback
from ps.launch.launcher import Placement
from ps.replication.coordinator_server import SILENCE_S
from ps.session.compression import NONE, Compression
from ps.transport.link_model import link_of
from ps.transport.local_sockets import Transport
from ps.wal.autosave import ROLLBACK_S
from shards import arguments
from shards.errors import BadInput
from worker import spark
from worker.arrow_images import pixel_column
from worker.caffe.evaluator import Evaluator, classes_of, needs_test_net
from worker.caffe.job import caffe_job
from worker.caffe.model import CaffeModel
from worker.caffe.row_shape import rows_of
from worker.caffe.solver import Solver, read_solver
from worker.caffe.weights import write_caffemodel
from worker.dataframes import check_columns, first_shape
from worker.device_selection import parse_device
from worker.evaluation import Evaluation, EvaluationPlan
from worker.inference import starting_weights, write_safetensors
from worker.job import Job
from worker.job_runner import Observer, Outcome, check_frame, run_job
from worker.strategies import Strategy, strategy_of
from worker.training_loop import SEEDS

_LOG = logging.getLogger("downpour.worker")

Choice = TypeVar("Choice", bound=StrEnum)


class Trained(msgspec.Struct, frozen=True):
    """Trained weights, a flat float32 arena, with their solver and the job's outcome.

    `evaluations` are the results of the tests during training and of the final weights, in order;
    empty without test data.
    """

    solver: Solver
    weights: NDArray[np.float32]
    outcome: Outcome
    evaluations: tuple[Evaluation, ...] = ()

    def save(self, path: str | Path) -> Path:
        """Write the weights as .caffemodel or .safetensors, by the path's suffix."""
        target = paths.path("save: path", path)
        if target.suffix not in (".caffemodel", ".safetensors"):
            raise BadInput(f"{target}: expected .caffemodel or .safetensors, got {target.suffix!r}")
        net = CaffeModel(self.solver.train).net
        if target.suffix == ".caffemodel":
            write_caffemodel(target, net, self.weights)
        else:
            write_safetensors(target, net.table, self.weights)
        return target


def train(
    df: spark.DataFrame,
    *,
    solver: str | Path,
    shards: int = 1,
    workers: int | None = None,
    staleness: float | None = 4,
    strategy: Strategy | str | None = None,
    seed: int | None = None,
    max_iter: int | None = None,
    test_data: "spark.DataFrame | str | Path | None" = None,
    weights: str | Path | None = None,
    resume: str | Path | None = None,
    snapshots: str | Path | None = None,
    prefetch: bool = False,
    shuffle: bool = True,
    lease_s: float = 10.0,
    shards_in: str = Placement.RAY,
    shard_device: str = ShardDevice.CPU,
    link: str | None = None,
    transport: str = Transport.AUTO,
    compress: str = NONE,
    compress_pull: str = NONE,
    device: str | None = None,
    precision: str = Precision.FP32,
    durability: str = Durability.MEMORY,
    silence_s: float = SILENCE_S,
    rollback_s: float = ROLLBACK_S,
    logs: str | Path | None = None,
    observer: Observer | None = None,
) -> Trained:
    """Train the network of a Caffe `solver` on a DataFrame; blocks until it is done.

    Data: `df` needs a column `label` (whole numbers) and one named `image` or `data` (binary uint8
    pixels, or a list of numbers). Bytes are a square image and a list is a vector, unless columns
    channels, height, width or the net give a shape; a net with convolutions takes a list as a
    square image. Each partition is one worker, unless `workers` gives the number to deal the rows
    to (required over Spark Connect). Every worker needs a row. `test_data` is a DataFrame with the
    same columns, or the path of such files. The weights are tested on it every `test_interval`
    iterations of the solver and at the end; of a DataFrame this process reads the first `test_iter`
    batches.

    Training: `staleness` is the bound in steps, None or inf for no bound; strategy "bsp" needs 0.
    `seed` and `max_iter` default to the solver's own. `weights` starts from a file (fine-tuning).
    `resume` continues from a folder below an earlier run's `snapshots`, or from one below its
    `logs`, which a killed job left. `resume` and `snapshots` may be URIs that pyarrow supports,
    such as s3://bucket/run (docs/how-to/snapshots.md). `device` is what each worker computes on:
    "cpu", "gpu" (one of its own), "gpu:N", "auto" (a GPU if one is available), or None, for the
    solver's `solver_mode`. `precision` is what a GPU rounds the factors of products to: "fp32" (no
    rounding), "tf32" or "bf16"; sums are in float32, and so is everything on the CPU.

    Shards: `shards_in` is where they run: "ray", in actors, or "processes" of this machine.
    `shard_device` is the memory that holds their weights: "cpu" or "gpu". `durability` is what
    survives the death of a shard: "memory" (its last autosave), "process", "logged" or "replicated"
    (docs/explanation/durability.md). "process" and "logged" need a folder `logs` of this job alone;
    each node with a shard may have its own, or several may share one. A folder with an earlier
    job's logs is refused, unless `resume` holds at least as many updates. A copy of a replicated
    shard that is silent for `silence_s` counts as dead. At "memory" a shard that dies loses at most
    the updates of the last `rollback_s` seconds, and training continues; with 0 its death ends the
    job.

    Network: `link`, such as "rtt=100ms,rate=100Mbit", emulates such a link for each worker, to try
    out training on it (ps/transport/link_model.py). `transport` carries weights and gradients:
    "shm" is memory shared on one host, "ipc" is a Unix socket there, "tcp" works everywhere, and
    "auto" is the best that each worker has. `compress` is the encoding of pushes: "fp16", "bf16",
    "int8", "4bit", "1bit", "topk:SHARE" or "threshold:TAU", with ",zstd" if wanted. `compress_pull`
    is the encoding of weights: "fp16" or "bf16", or as differences, "int8", "4bit" or "topk:SHARE"
    (docs/how-to/compression.md).

    Warnings, such as a failed snapshot, go to the `observer`, or else to the logger
    downpour.worker, and are listed in the outcome's `notices`.

    Call it from the main thread, and after `ray.init` for shards in Ray. Raises BadInput for an
    error that the caller can fix, GiveUp when a worker or a shard fails for good.
    """
    check_frame("train: df", df)
    check_columns(df)
    check_rollback(rollback_s, Durability.MEMORY, "train: rollback_s")
    for argument, value in (("prefetch", prefetch), ("shuffle", shuffle)):
        arguments.flag(f"train: {argument}", value)
    for argument, where in (
        ("weights", weights),
        ("resume", resume),
        ("snapshots", snapshots),
        ("logs", logs),
    ):
        if where is not None:
            paths.place(f"train: {argument}", where)
    file = paths.path("train: solver", solver)
    rows = rows_of(read_solver(file).train)
    read = read_solver(file, first_shape(df, rows.shape, image=rows.image))
    for notice in read.notices:
        _LOG.warning(notice)
    count = spark.partition_count(df) if workers is None else _whole("workers", workers, 1)
    job = caffe_job(
        read,
        strategy=strategy_of("train: strategy", "downpour" if strategy is None else strategy),
        workers=count,
        shards=_whole("shards", shards, 1),
        bound=arguments.bound("train: staleness", staleness),
        seed=None if seed is None else arguments.whole("train: seed", seed, *SEEDS),
        max_iter=None if max_iter is None else _whole("max_iter", max_iter, 1),
        prefetch=prefetch,
        shuffle=shuffle,
        lease_s=arguments.seconds("train: lease_s", lease_s),
        shards_in=_named("shards_in", shards_in, Placement),
        shard_device=_named("shard_device", shard_device, ShardDevice),
        link=link_of(link),
        transport=_named("transport", transport, Transport),
        compression=Compression.parse(compress, compress_pull),
        device=parse_device(read.device if device is None else device),
        precision=_named("precision", precision, Precision),
        durability=_named("durability", durability, Durability),
        silence_s=arguments.seconds("train: silence_s", silence_s),
        rollback_s=rollback_s,
        logs_apart=True,
    )
    start = _start(read, weights, resume, job.plan.seed)
    evaluator = _evaluator(read, solver, test_data, start)
    outcome = run_job(
        df,
        job,
        weights=start,
        resume=resume,
        snapshots=snapshots,
        logs=logs,
        evaluation=_plan(read, evaluator),
        observer=observer,
        even=workers is not None,
    )
    evaluations = list(outcome.evaluations)
    if evaluator is not None and not outcome.interrupted:
        evaluations += _last(evaluator, job, outcome)
    if observer is not None:
        for last in evaluations[len(outcome.evaluations) :]:
            observer.evaluated(last)
    return Trained(read, outcome.weights, outcome, tuple(evaluations))


def _whole(argument: str, number: int, least: int | None = None) -> int:
    """The argument, which may be a NumPy integer, as a plain int."""
    return arguments.whole(f"train: {argument}", number, least)


def _named(argument: str, name: str, kind: type[Choice]) -> Choice:
    return arguments.choice(f"train: {argument}", name, kind)


def _start(
    solver: Solver, path: str | Path | None, resume: str | Path | None, seed: int
) -> NDArray[np.float32] | None:
    """The weights of the file at `path`, else of the solver's files; None if there are none.

    A resumed job does not read the solver's files.
    """
    if path is not None:
        files: tuple[str | Path, ...] = (paths.path("train: weights", path),)
    else:
        files = () if resume is not None else tuple(solver.weights)
    return starting_weights(CaffeModel(solver.train), files, seed)


def _evaluator(
    solver: Solver,
    file: str | Path,
    data: "spark.DataFrame | str | Path | None",
    start: NDArray[np.float32] | None,
) -> Evaluator | None:
    """The solver's test nets on `data`, tested on one row first; None without data."""
    if data is None:
        if solver.test_interval and solver.tests:
            _LOG.warning("%s: test_interval has no effect: no test_data was given", file)
        return None
    if not isinstance(data, spark.DataFrame | str | Path):
        raise arguments.wrong("train: test_data", "a Spark DataFrame or a path", data)
    if not isinstance(data, spark.DataFrame):
        data = paths.path("train: test_data", data)
    named = data if isinstance(data, Path) else "the DataFrame"
    needs_test_net(solver, "train: test_data", named)
    model = CaffeModel(solver.train)
    batches: list[pa.RecordBatch] = []
    if isinstance(data, Path):
        # Loaded on first use: PyArrow's readers are needed for files only.
        from worker.sources import open_source, part_to_test

        rows = rows_of(solver.tests[0].net)
        source = open_source(
            data,
            part_to_test(data),
            classes=classes_of(model.net),
            shape=rows.shape,
            image=rows.image,
        )
        evaluator = Evaluator(solver, model, source.batches)
    else:
        pixel_column(data.columns, "train: test_data")
        evaluator = Evaluator(solver, model, lambda: batches)
        batches += spark.first_rows(data, evaluator.most_rows)
    try:
        evaluator.check(start if start is not None else model.initial(1))
    except BadInput as error:
        raise BadInput(f"train: test_data {named}: {error}") from None
    return evaluator


def _plan(solver: Solver, evaluator: Evaluator | None) -> EvaluationPlan | None:
    """The tests during training, as the solver wants them."""
    if evaluator is None or not solver.test_interval:
        return None
    return EvaluationPlan(evaluator.sample, solver.test_interval, solver.test_initialization)


def _last(evaluator: Evaluator, job: Job, outcome: Outcome) -> list[Evaluation]:
    """The test of the final weights; an empty list, and a warning, if it fails."""
    try:
        with threadpool_limits(1):
            figures = evaluator.sample(outcome.weights)
    except BadInput as error:  # a failed test must not lose the trained weights
        _LOG.warning("the test of the final weights failed: %s", error)
        return []
    status = outcome.statuses[0]
    return [Evaluation(status.steps // job.workers, status.samples, outcome.seconds, figures)]
