"""`worker.train`: a Caffe solver, a Spark DataFrame, and trained weights back."""

from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from ps import paths
from ps.logs import logger
from shards import arguments
from shards.errors import BadInput
from worker import spark
from worker.caffe.evaluator import Evaluator, classes_of, needs_test_net
from worker.caffe.job import caffe_job
from worker.caffe.model import CaffeModel
from worker.caffe.net_data import data_of
from worker.caffe.solver import Solver, read_solver
from worker.caffe.weight_files import write_weights
from worker.caffe.weights import Copied, starting_weights
from worker.data.source import Source
from worker.dataframes import check_columns, first_shape, named_shapes
from worker.evaluation import Evaluation, EvaluationPlan
from worker.job import Job
from worker.job_runner import Observer, Outcome, check_frame, run_job
from worker.option_fields import Parsed, keyword_options, option
from worker.options import MOST, TrainOptions

_LOG = logger("worker", worker="driver")


class Trained(msgspec.Struct, frozen=True):
    """Trained weights, a flat float32 arena, with their solver and the job's outcome.

    `evaluations` are the results of the tests during training and of the final weights, in order;
    empty without test data. `copied` says for each file of starting weights which layers matched.
    """

    solver: Solver
    weights: NDArray[np.float32]
    outcome: Outcome
    evaluations: tuple[Evaluation, ...] = ()
    copied: tuple[Copied, ...] = ()

    def save(self, path: str | Path) -> Path:
        """Write the weights as .caffemodel, .h5 or .safetensors, by the path's suffix."""
        target = paths.path("save: path", path)
        write_weights(target, CaffeModel(self.solver.train).net, self.weights)
        return target


def _solver(what: str, value: object) -> Solver | Path:
    return value if isinstance(value, Solver) else paths.path(what, value)


class TrainArguments(TrainOptions):
    """The keyword arguments of `train`."""

    solver: Parsed[Path | Solver, str] = option(
        "The solver: a Caffe prototxt, or what `worker.caffe.nets.load_solver` returns.",
        check=_solver,
    )
    workers: int | None = option(
        "Workers; None: the partitions of the DataFrame.", default=None, least=1, most=MOST
    )
    test_data: spark.DataFrame | str | Path | None = None
    weights: Parsed[Path | None, str] = option(
        "Weights to start from.", default=None, check=paths.path
    )
    resume: str | Path | None = option("What to continue from.", default=None, check=paths.place)
    snapshots: str | Path | None = option("Where snapshots go.", default=None, check=paths.place)
    logs: str | Path | None = option("Where shards keep logs.", default=None, check=paths.place)
    observer: Observer | None = None

    @classmethod
    def named(cls, name: str) -> str:
        return f"train: {name}"


@keyword_options(TrainArguments)
def train(df: spark.DataFrame | spark.SparkSession, options: TrainArguments) -> Trained:
    """Train the network of a Caffe `solver` on a DataFrame; blocks until it is done.

    With a Spark session in place of a DataFrame, the tasks read the source that the net's data
    layer names, each its own part; every machine must have it at the same path.

    The options are keyword arguments: `worker.train(df, solver="lenet_solver.prototxt", shards=2)`.
    Those of `downpour train` have the same names, values and defaults here
    (docs/reference/cli.md); the ones below differ or are only here.

    Data: `df` needs a column `label` (whole numbers) and one named `image` or `data` (binary uint8
    pixels, or a list of numbers). Bytes are a square image and a list is a vector, unless columns
    channels, height, width or the net give a shape; a net with convolutions takes a list as a
    square image. Each partition is one worker, unless `workers` gives the number to deal the rows
    to (required over Spark Connect). Every worker needs a row. `test_data` is a DataFrame with the
    same columns, or the path of such files. The weights are tested on it every `test_interval`
    iterations of the solver and at the end; of a DataFrame this process reads the first `test_iter`
    batches.

    Training: `solver` is a file, or a `Solver` with a net of your own (`worker.caffe.nets`).
    `staleness` is the bound in steps, None or inf for no bound; strategy "bsp" needs 0.
    `strategy` may also be an object, such as `worker.Downpour(n_push=4)`. `seed`, `max_iter`,
    `device` and `snapshot_every` default to what the solver says. `weights` starts from a file
    (fine-tuning). `resume` continues from a folder below an earlier run's `snapshots`, or from one
    below its `logs`, which a killed job left. `resume` and `snapshots` may be URIs that pyarrow
    supports, such as s3://bucket/run (docs/how-to/snapshots.md).

    Shards: durability "process" and "logged" need a folder `logs` of this job alone; each node with
    a shard may have its own, or several may share one. A folder with an earlier job's logs is
    refused, unless `resume` holds at least as many updates.

    Warnings, such as a failed snapshot, go to the `observer`, or else to the logger
    downpour.worker, and are listed in the outcome's `notices`.

    Call it from the main thread, and after `ray.init` for shards in Ray. Raises BadInput for an
    error that the caller can fix, GiveUp when a worker or a shard fails for good.
    """
    given = options.solver
    read = given if isinstance(given, Solver) else read_solver(given)
    source = None
    if isinstance(df, spark.SparkSession):
        source = _named_source(read, options)
        solver = read.with_data_shape(source.shape, source.row_shapes)
        assert options.workers is not None, "checked with the source"
        df = spark.numbered(df, options.workers)
    else:
        check_frame("train: df", df)
        solver = _fitted(read, df)
    for notice in solver.notices:
        _LOG.warning(notice)
    workers = spark.partition_count(df) if options.workers is None else options.workers
    job = caffe_job(solver, options, workers=workers, logs_apart=True)
    start, copied = _start(solver, options.weights, options.resume, job.plan.seed)
    evaluator = _evaluator(solver, options.test_data, start)
    outcome = run_job(
        df,
        job,
        weights=start,
        resume=options.resume,
        snapshots=options.snapshots,
        logs=options.logs,
        evaluation=_plan(solver, evaluator),
        observer=options.observer,
        even=options.workers is not None,
        source=source,
    )
    evaluations = list(outcome.evaluations)
    if evaluator is not None and not outcome.interrupted:
        evaluations += _last(evaluator, job, outcome)
    if options.observer is not None:
        for last in evaluations[len(outcome.evaluations) :]:
            options.observer.evaluated(last)
    return Trained(solver, outcome.weights, outcome, tuple(evaluations), tuple(copied))


def _named_source(solver: Solver, options: TrainArguments) -> Source:
    """The source that the net names, which tasks can read themselves; raises BadInput."""
    from worker.sources import open_net_data

    source = open_net_data(data_of(solver.train), seed=options.seed)
    if not isinstance(source, Source):
        raise BadInput(
            "train: df: expected a DataFrame for IDX files and Parquet files of raw images"
            " (spark.read.parquet), got a Spark session"
        )
    if options.workers is None or options.workers > source.rows:
        raise BadInput(
            f"train: workers: expected the number of workers, at most {source.rows}, as the source"
            f" has {source.rows} rows, got {options.workers}"
        )
    return source


def _fitted(solver: Solver, df: spark.DataFrame) -> Solver:
    """The solver for the rows of `df`; a net with columns by name reads no images by default."""
    wanted = data_of(solver.train).wanted
    if wanted.tops:
        return solver.with_data_shape(wanted.shape, named_shapes(df, wanted.tops))
    check_columns(df)
    return solver.with_data_shape(first_shape(df, wanted.shape, image=wanted.image))


def _start(
    solver: Solver, path: Path | None, resume: str | Path | None, seed: int
) -> tuple[NDArray[np.float32] | None, list[Copied]]:
    """The weights of the file at `path`, else of the solver's files; None if there are none.

    A resumed job does not read the solver's files. A report says what each file was used for.
    """
    files = () if resume is not None else tuple(solver.weights)
    weights, reports = starting_weights(
        CaffeModel(solver.train), files if path is None else (path,), seed
    )
    for report in reports:
        _LOG.info(str(report))
    return weights, reports


def _evaluator(
    solver: Solver,
    data: "spark.DataFrame | str | Path | None",
    start: NDArray[np.float32] | None,
) -> Evaluator | None:
    """The solver's test nets on `data`, tested on one row first; None without data."""
    if data is None:
        if solver.test_interval and solver.tests:
            _LOG.warning("%s: test_interval has no effect: no test_data was given", solver.file)
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
        from worker.sources import open_net_data, part_to_test

        wanted = data_of(solver.tests[0].net)
        source = open_net_data(wanted, data, part_to_test(data), classes_of(model.net))
        evaluator = Evaluator(solver, model, source.batches)
    else:
        evaluator = Evaluator(solver, model, lambda: batches)
        evaluator.check_names(data.columns, "train: test_data")
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
