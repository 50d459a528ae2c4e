"""`worker.train`: a model of any kind, a Spark DataFrame, and trained weights back."""

from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from ps import path_checks
from ps.logs import logger
from shards.errors import BadInput
from worker import spark
from worker.callbacks.base import Parameters, WatchedRun, settings_of, watching
from worker.callbacks.progress_line import progress_of
from worker.job.model_kind import Fitted, ModelKind, TrainArguments
from worker.job.option_fields import keyword_options
from worker.job.outcome import Outcome, in_a_line
from worker.job.run_options import unless_interrupted
from worker.job.runner import check_frame, run_job
from worker.training.evaluation import Evaluation

_LOG = logger("worker", worker="driver")


class Trained(msgspec.Struct, frozen=True):
    """Trained weights, a flat float32 arena, with their model and the job's outcome.

    `evaluations` are the results of the tests during training and of the final weights, in order;
    empty for a model without test data.
    """

    model: ModelKind
    weights: NDArray[np.float32]
    outcome: Outcome
    evaluations: tuple[Evaluation, ...] = ()

    def __repr__(self) -> str:
        return f"Trained({self.model!r}: {in_a_line(self.outcome, self.evaluations)})"

    @property
    def params(self) -> dict[str, NDArray[np.float32]]:
        """The trained tensors by name, as views of `weights`."""
        return self.model.table().views(self.weights)

    def evaluation_table(self) -> pa.Table:
        """The `evaluations`, a row each: iteration, samples, seconds, and the figures by name.

        `spark.createDataFrame` makes a DataFrame of it.
        """
        figures = dict.fromkeys(
            name for evaluation in self.evaluations for name in evaluation.figures
        )
        counts = [("iteration", pa.int64()), ("samples", pa.int64())]
        reals = [(name, pa.float64()) for name in ("seconds", *figures)]
        rows = [
            msgspec.structs.asdict(evaluation) | evaluation.figures
            for evaluation in self.evaluations
        ]
        return pa.Table.from_pylist(rows, schema=pa.schema([*counts, *reals]))

    def save(self, path: str | Path) -> Path:
        """Write the weights as .safetensors, and those of Caffe also as .caffemodel or .h5."""
        target = path_checks.path("save: path", path)
        self.model.save(target, self.weights)
        return target


@keyword_options(TrainArguments)
def train(df: spark.DataFrame | spark.SparkSession, options: TrainArguments) -> Trained:
    """Train a `model` on a DataFrame; blocks until it is done.

    The options are keyword arguments:
    `worker.train(df, model=worker.Caffe("lenet_solver.prototxt"), shards=2)`. Those of `downpour
    train` have the same names, values and defaults here (docs/reference/cli.md); the ones below
    differ or are only here.

    Data: each kind of model says which columns of `df` it needs (`worker.Caffe`,
    `worker.CustomModel`). Each partition is one worker, unless `workers` gives the number to deal
    the rows to (required over Spark Connect). Every worker needs a row.

    Training: `staleness` is the bound in steps, None or inf for no bound; by default the one that
    suits the strategy. `strategy` may also be an object, such as `worker.Downpour(n_push=4)`.
    `seed`, `max_iter`, `device` and `snapshot_every` default to what a Caffe solver says. `resume`
    continues from a folder below an earlier run's `snapshots`, or from one below its `logs`, which
    a killed job left. `resume` and `snapshots` may be URIs that pyarrow supports, such as
    s3://bucket/run (docs/how-to/snapshots.md).

    Shards: durability "process" and "logged" need a folder `logs` of this job alone; each node with
    a shard may have its own, or several may share one. A folder with an earlier job's logs is
    refused, unless `resume` holds at least as many updates.

    Watching: `callbacks` are objects of subclasses of `worker.Callback`, such as
    `worker.EarlyStop`. Warnings, such as a failed snapshot, go to them and to the logger
    downpour.worker, and are listed in the outcome's `notices`.

    Call it after `ray.init` for shards in Ray. In the main thread Ctrl-C ends the training early,
    with a snapshot where `snapshots` says where, and raises `worker.Interrupted`, a
    KeyboardInterrupt whose `result` has the weights so far; with `on_interrupt="return"` that
    result is returned. Several threads may train at once, each on its own shards, and Ctrl-C
    reaches none of them. Raises BadInput for an error that the caller can fix, GiveUp when a worker
    or a shard fails for good.
    """
    if isinstance(df, spark.SparkSession):
        spark.check_running("train", df)
    else:
        check_frame("train: df", df)
    fitted = options.model.fit_to(df, options)
    views, save = fitted.model.table().views, fitted.model.save
    run = WatchedRun(fitted.job.workers, settings_of(options), tests=fitted.evaluation is not None)

    def parameters(weights: NDArray[np.float32]) -> Parameters:
        return Parameters(weights, views, lambda path, arena: save(Path(path), arena))

    steps = fitted.job.plan.steps
    callbacks = (*options.callbacks, *progress_of(fitted.df, steps, enabled=options.progress))
    with watching(callbacks, run, parameters) as watch:
        outcome = run_job(
            fitted.df,
            fitted.job,
            weights=fitted.start,
            resume=options.resume,
            snapshots=options.snapshots,
            logs=options.logs,
            evaluation=fitted.evaluation,
            observer=watch if callbacks else None,
            even=options.workers is not None,
            source=fitted.source,
        )
        last = [] if outcome.interrupted else _last(fitted, outcome)
        final = watch.finish(outcome.weights, last)
    trained = Trained(fitted.model, final.weights, outcome, (*outcome.evaluations, *last))
    return unless_interrupted(trained, options.on_interrupt)


def _last(fitted: Fitted, outcome: Outcome) -> list[Evaluation]:
    """The test of the final weights; empty without one, and, with a warning, if it fails."""
    if fitted.test is None:
        return []
    try:
        with threadpool_limits(1):
            figures = fitted.test(outcome.weights)
    except BadInput as error:  # a failed test must not lose the trained weights
        _LOG.warning("the test of the final weights failed: %s", error)
        return []
    return [outcome.last_evaluation(fitted.job.workers, figures)]
