"""`worker.run`: a function of the user's own on every partition of a Spark DataFrame.

    def train(args, ctx):
        ctx.loop(gradient, 64, epochs=3)

    trained = worker.run(df, train, params=params, workers=4, strategy="easgd:tau=10", shards=2)
    trained.params

Spark hosts the workers as ordinary tasks, without a barrier: there may be more workers than slots,
and a task that fails is retried alone.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

import ps
from ps import path_checks
from ps.job import views_of
from ps.logs import logger
from ps.storage import Store, open_store
from ps.tables import ONLY, tables_of
from shards import argument_checks
from shards.errors import BadInput
from shards.spec import TableSpec
from shards.tables import DenseTable
from worker import spark
from worker.callbacks.base import (
    Callback,
    KeepBest,
    Parameters,
    WatchedRun,
    settings_of,
    watching,
)
from worker.callbacks.progress_line import progress_of
from worker.data.parameters_file import read_parameters, write_parameters
from worker.data.source import Source
from worker.data.sources import TFRECORD_SUFFIXES, open_source
from worker.job.option_fields import option, training_options
from worker.job.options import (
    DEFAULT_SEED,
    MAX_COUNT,
    LinkOptions,
    ShardRuntime,
    SnapshotPolicy,
    TrainOptions,
)
from worker.job.outcome import Outcome, in_a_line
from worker.job.run_options import RunArguments, unless_interrupted
from worker.job.runner import check_frame, run_job
from worker.job.stored_rows import StoredRows
from worker.job.training_job import Job
from worker.tfrecord.files import is_tfrecord
from worker.tfrecord.partitions import partition_of
from worker.training.context import FunctionTask, Train
from worker.training.evaluation import Evaluation, EvaluationPlan
from worker.training.own_loop import TableModel
from worker.training.training_loop import Plan

Floats = NDArray[np.float32]
Figures = dict[str, float]

_LOG = logger("worker", worker="driver")

_TABLES = {".parquet": "parquet"} | {
    f"{suffix}{packing}": "tfrecord" for suffix in TFRECORD_SUFFIXES for packing in ("", ".gz")
}
"""The file name suffixes that Spark reads, each with its format."""


class Evaluate(msgspec.Struct, frozen=True):
    """A test of the parameters in this process while the workers train; it takes no slot of Spark.

    `figures(params)` returns numbers by name, such as {"accuracy": 0.97}; of a job with sparse
    tables it is `figures(params, rows)`, where `rows.gather("user", ids)` reads rows, those of the
    moment of the call. It is called every
    `every` iterations, and with the final parameters; an iteration is one step of every worker.
    Training ends early once `until(figures)` is true.
    """

    figures: Callable[..., Figures]
    every: int = 100
    until: Callable[[Figures], bool] | None = None

    def __post_init__(self) -> None:
        argument_checks.function("evaluate: figures", self.figures, "a function of the parameters")
        argument_checks.whole("evaluate: every", self.every, 1)
        if self.until is not None:
            argument_checks.function("evaluate: until", self.until, "a function of the figures")


class FunctionOptions(TrainOptions):
    """The keyword arguments that `run` and `stream` share."""

    params: Any


class RunOptions(FunctionOptions, RunArguments):
    """The keyword arguments of `run`."""

    evaluate: Evaluate | Callable[..., Figures] | None = None
    weights: str | Path | None = option(
        "What to start from.", default=None, check=path_checks.place
    )

    @classmethod
    def label_option(cls, name: str) -> str:
        return f"run: {name}"

    def check(self) -> None:
        super().check()
        if self.weights is not None and self.resume is not None:
            raise BadInput("run: weights", expected="these or a snapshot to resume", got="both")


class RunResult(msgspec.Struct, frozen=True):
    """The result of `run`, which `worker.Interrupted` holds, too.

    `params` are the trained parameters, in the structure that was given; of several dense tables, a
    dict by their names. `rows` are those of the sparse tables, by id: `rows.gather("user", ids)`.
    `evaluations` are the results of the tests, in order, that of the final
    parameters last; `worker.KeepBest` has `params` be those of the best test.
    """

    params: Any
    outcome: Outcome
    evaluations: tuple[Evaluation, ...]
    tables: ps.Tables

    def __repr__(self) -> str:
        names = ", ".join(self.tables)
        return f"RunResult({names}: {in_a_line(self.outcome, self.evaluations)})"

    @property
    def rows(self) -> StoredRows:
        """The rows of the sparse tables."""
        return self.outcome.rows

    def save(self, path: str | Path) -> str | Path:
        """Write the arrays by name to a .safetensors file, a path or URI; returns the path.

        A sparse table is written as TABLE/ids and TABLE/rows.
        """
        write_parameters(path, self.tables, self.params, self.rows.arrays())
        return path


@training_options(RunOptions)
def run(
    data: spark.DataFrame | str | Path, train: Train, args: Any = None, /, *, options: RunOptions
) -> RunResult:
    """Run `train(args, ctx)` as a worker on every partition of `data`; blocks until all are done.

    `ctx` is a `worker.Context`: the worker, registered with the shards, and its rows, of any
    columns. `data` is a Spark DataFrame; or the path of Parquet or TFRecord files, which the
    present Spark session reads; or any other path that `worker.open_source` takes, such as a folder
    of images, of which each worker reads its part. `params` are the parameters to train, which are
    also their first values: a dict, a pytree, a `state_dict`, a `ps.Dense` with its rule, rate and
    decay, or a `ps.Tables` of several, dense and sparse. `weights`, a .safetensors file at a path
    or URI, replaces the first values of the arrays that it has by name, for fine-tuning. The
    function and `args` are sent to the tasks as Spark sends any function, so they may not hold what
    does not pickle.

    Each partition is one worker, unless `workers` gives the number to deal the rows to (required
    over Spark Connect, and for a path that the workers read). Every worker needs a row. `evaluate`
    is a function of the parameters, or a `worker.Evaluate`. `callbacks` watch the run, as
    `worker.EarlyStop` and `worker.TensorBoard`. `max_iter` ends `ctx.batches` after that many steps
    of a worker. The other options have the names, values and defaults of `downpour
    train` (docs/reference/cli.md); `ctx.loop` follows the strategy, and a loop with `ctx.worker` of
    one's own is plain Downpour.

    Ctrl-C ends the job early, with a snapshot where `snapshots` says where, and raises
    `worker.Interrupted`, a KeyboardInterrupt whose `result` has the parameters so far; with
    `on_interrupt="return"` that result is returned. Shards in Ray need `ray.init` first;
    `shards_in="processes"` needs none. Raises BadInput for an error that the caller can fix, GiveUp
    when a worker or a shard fails for good.
    """
    check_train("run: train", train)
    tables = tables_of(options.params)
    evaluate = _evaluate(options.evaluate)
    if tables.sparse:
        _check_for_rows(evaluate, options.callbacks)
    spark.check_sendable(train, args)
    df, source = read("run: data", data, options.workers, options.skip_images)
    workers = spark.partition_count(df) if options.workers is None else options.workers
    if workers == 0:
        raise BadInput("run: data", expected="at least one row", got="none")
    build = builder_of(tables)

    start = first_values(tables)
    if options.weights is not None:
        _LOG.info("%s", read_parameters(options.weights, tables, start))

    def parameters(weights: Floats) -> Parameters:
        return Parameters(
            weights,
            build,
            lambda path, arena: write_parameters(path, tables, build(arena)),
        )

    run = WatchedRun(workers, settings_of(options, args), tests=evaluate is not None)
    callbacks = (*options.callbacks, *progress_of(df, options.max_iter, enabled=options.progress))
    with watching(callbacks, run, parameters) as watch:
        outcome = run_job(
            df,
            function_job(train, args, tables, options, workers),
            weights=None if options.resume is not None else start,
            resume=options.resume,
            snapshots=options.snapshots,
            logs=options.logs,
            evaluation=None if evaluate is None else _plan(evaluate, tables, run),
            observer=watch if callbacks or tables.sparse else None,
            even=options.workers is not None,
            source=source,
        )
        last = []
        if evaluate is not None and not outcome.interrupted:
            rows = (outcome.rows,) if tables.sparse else ()
            figures = evaluate.figures(build(outcome.weights), *rows)
            last = [outcome.last_evaluation(workers, figures)]
        final = watch.finish(outcome.weights, last)
    result = RunResult(final.params, outcome, (*outcome.evaluations, *last), tables)
    return unless_interrupted(result, options.on_interrupt)


def check_train(label: str, train: object) -> None:
    """Raise BadInput unless `train` can be called with `args` and `ctx`."""
    _check_pair(label, train, "a function of args and ctx")


def _check_pair(label: str, value: object, expected: str) -> None:
    """Raise BadInput unless `value` can be called with two arguments."""
    function = argument_checks.function(label, value, expected)
    try:
        inspect.signature(function).bind(None, None)  # type: ignore[arg-type]  # it is callable
    except TypeError as error:
        raise BadInput(
            label, expected=expected, got=f"one with other parameters: {error}"
        ) from None
    except ValueError:
        pass  # A compiled function may have no signature.


def read(
    label: str, data: object, workers: int | None, skip_images: int
) -> tuple[spark.DataFrame, Source | None]:
    """A DataFrame, and a source that its tasks read in place of its rows, if there is one.

    `data` is as in `run`. A task leaves out up to `skip_images` images of a source. Raises BadInput
    naming `label`.
    """
    if not isinstance(data, str | Path):
        check_frame(label, data)
        return cast(spark.DataFrame, data), None
    session = spark.active_session(label)
    text = str(data)
    if kind := table_format(text):
        return spark.read_table(session, kind, text), None
    if "://" in text:
        raise BadInput(f"{label}: {text}", expected="files that end in .parquet or .tfrecord there")
    # Tasks run in another folder.
    source = open_source(Path(text).absolute(), max_skipped=skip_images)
    if not isinstance(source, Source):
        raise BadInput(f"{label}: {text}", expected="data that workers can read in parts")
    if workers is None:
        raise BadInput(f"{label}: {text}", expected="a number of `workers` to divide it among")
    if workers > source.rows:
        raise BadInput("run: workers", expected=f"at most {source.rows}, one a row", got=workers)
    return spark.number_partitions(session, workers), source


def table_format(uri: str) -> str:
    """The name by which Spark reads the files at a path or URI; empty if it does not.

    Files of TFRecord are known by their content, too: Hadoop's writers give them no suffix.
    """
    name = uri.rstrip("/").rpartition("/")[2]
    names, content = [name], ""
    if not name.endswith(tuple(_TABLES)):
        with suppress(OSError, BadInput):
            store, names = _first_files(open_store(uri))
            content = "tfrecord" if names and is_tfrecord(store, names[0]) else ""
    formats = {
        kind for child in names for suffix, kind in _TABLES.items() if child.endswith(suffix)
    }
    if len(formats) > 1:
        raise BadInput(uri, expected="files of one format", got=" and ".join(sorted(formats)))
    return formats.pop() if formats else content


def _first_files(store: Store) -> tuple[Store, list[str]]:
    """The first folder of partitions that has data, or the folder itself; and the names in it."""
    names = [name for name in store.names() if name[0] not in "_."]
    for name in names:
        if partition_of(name) is not None:
            inner, found = _first_files(store.below(name))
            if found:
                return inner, found
    return store, [name for name in names if partition_of(name) is None]


def builder_of(tables: ps.Tables) -> Callable[[Floats], Any]:
    """The function that gives an arena the structure of the dense tables; {} without any."""
    views = views_of(tables)
    return partial(views.build, None) if tables.dense else lambda _weights: {}


def first_values(tables: ps.Tables) -> Floats:
    """The arena of all tables with the values that they were described with; raises BadInput."""
    arena = tables.layout.empty()
    views = views_of(tables)
    for name, dense in tables.dense.items():
        views.write(name, dense.start, arena)
    return arena


def function_job(
    train: Train, args: Any, tables: ps.Tables, options: FunctionOptions, workers: int
) -> Job:
    """The job in which workers run a function on these tables."""
    specs = tuple(
        TableSpec(table.table(name), table.rule, table.rate, table.decay, table.guard)
        for name, table in tables.items()
    )
    first = min(specs, key=lambda spec: spec.is_sparse)  # the first dense one, if there is one
    dense = first.table if isinstance(first.table, DenseTable) else DenseTable(ONLY, ())
    return Job(
        model=partial(TableModel, dense),
        plan=Plan(
            steps=MAX_COUNT if options.max_iter is None else options.max_iter,
            seed=DEFAULT_SEED if options.seed is None else options.seed,
            strategy=options.build_strategy(),
            schedule=first.schedule,
            prefetch=options.prefetch,
        ),
        rule=first.rule,
        schedule=first.schedule,
        decay=first.decay,
        batch_size=1,
        workers=workers,
        bound=options.staleness,
        rate_factor=options.rate_factor,
        stale=options.on_stale,
        shuffle=options.shuffle,
        device=options.build_device("auto"),
        runtime=options.part(ShardRuntime),
        links=options.part(LinkOptions),
        snapshots=options.part(SnapshotPolicy),
        logs_apart=True,
        function=FunctionTask(
            train=train,
            args=args,
            tables=ps.Tables({name: _without_start(table) for name, table in tables.items()}),
            workers=workers,
            folder=str(Path.cwd()),
        ),
        tables=specs,
    )


def _evaluate(value: object) -> Evaluate | None:
    if value is None or isinstance(value, Evaluate):
        return value
    argument_checks.function("run: evaluate", value, "a function of the parameters")
    return Evaluate(value)  # type: ignore[arg-type]  # it was checked that it is callable


def _check_for_rows(evaluate: Evaluate | None, callbacks: Sequence[Callback]) -> None:
    """Raise BadInput for a test that takes no rows, and for a callback that would leave them."""
    if evaluate is not None:
        expected = "a function of the parameters and the rows of the sparse tables"
        _check_pair("run: evaluate", evaluate.figures, expected)
    if any(isinstance(callback, KeepBest) for callback in callbacks):
        expected = "dense tables: the rows of an earlier test are not kept"
        raise BadInput("callbacks: KeepBest", expected=expected, got="sparse ones")


def _plan(evaluate: Evaluate, tables: ps.Tables, run: WatchedRun) -> EvaluationPlan:
    """The tests during training; each ends with its function. Rows are those of the shards."""
    build = builder_of(tables)

    def figures(weights: Floats, _stopped: Callable[[], bool]) -> Figures:
        if not tables.sparse:
            return evaluate.figures(build(weights))
        with ps.reader(run.cluster) as rows:
            return evaluate.figures(build(weights), rows)

    return EvaluationPlan(figures, evaluate.every, at_start=False, until=evaluate.until)


def _without_start(table: ps.Dense | ps.Sparse) -> ps.Dense | ps.Sparse:
    """The description of the table alone, which every task needs."""
    if isinstance(table, ps.Sparse):
        return table
    bare = copy.copy(table)
    bare.start = None
    return bare
