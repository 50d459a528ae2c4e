"""`worker.run`: a function of the user's own on every partition of a Spark DataFrame.

    def train(args, ctx):
        ctx.loop(gradient, 64, epochs=3)

    trained = worker.run(df, train, params=params, workers=4, strategy="easgd:tau=10", shards=2)
    trained.params

Spark hosts the workers as ordinary tasks, without a barrier: there may be more workers than slots,
and a task that fails is retried alone.
"""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

import ps
from ps import paths
from ps.tables import tables_of
from shards import arguments
from shards.errors import BadInput
from shards.tables import DenseTable
from worker import spark
from worker.context import FunctionTask, Train
from worker.evaluation import Evaluation, EvaluationPlan
from worker.job import Job
from worker.job_runner import Observer, Outcome, check_frame, run_job
from worker.model import Batch
from worker.option_fields import option
from worker.options import (
    DEFAULT_SEED,
    MOST,
    LinkOptions,
    ShardRuntime,
    SnapshotPolicy,
    TrainOptions,
)
from worker.tensor_file import save_tensors
from worker.training_loop import Plan

Floats = NDArray[np.float32]
Figures = dict[str, float]


class Evaluate(msgspec.Struct, frozen=True):
    """A test of the parameters in this process while the workers train; it takes no slot of Spark.

    `figures(params)` returns numbers by name, such as {"accuracy": 0.97}. It is called every
    `every` iterations, and with the final parameters; an iteration is one step of every worker.
    Training ends early once `until(figures)` is true.
    """

    figures: Callable[[Any], Figures]
    every: int = 100
    until: Callable[[Figures], bool] | None = None

    def __post_init__(self) -> None:
        arguments.function("evaluate: figures", self.figures, "a function of the parameters")
        arguments.whole("evaluate: every", self.every, 1)
        if self.until is not None:
            arguments.function("evaluate: until", self.until, "a function of the figures")


class RunOptions(TrainOptions):
    """The keyword arguments of `run`."""

    params: Any
    workers: int | None = option(
        "Workers; None: the partitions of the DataFrame.", default=None, least=1, most=MOST
    )
    evaluate: Evaluate | Callable[[Any], Figures] | None = None
    resume: str | Path | None = option("What to continue from.", default=None, check=paths.place)
    snapshots: str | Path | None = option("Where snapshots go.", default=None, check=paths.place)
    logs: str | Path | None = option("Where shards keep logs.", default=None, check=paths.place)
    observer: Observer | None = None

    @classmethod
    def named(cls, name: str) -> str:
        return f"run: {name}"


class RunResult(msgspec.Struct, frozen=True):
    """What `run` returns.

    `params` are the trained parameters, in the structure that was given. `evaluations` are the
    results of the tests, in order, that of the final parameters last.
    """

    params: Any
    outcome: Outcome
    evaluations: tuple[Evaluation, ...] = ()

    def save(self, path: str | Path) -> Path:
        """Write the arrays by name to a .safetensors file."""
        target = paths.path("save: path", path)
        dense = ps.Dense.like(self.params)
        table = dense.table("params")
        arena = table.empty()
        dense.structure.write(self.params, table.views(arena))
        save_tensors(target, table.views(arena))
        return target


def run(df: spark.DataFrame, train: Train, args: Any = None, /, **options: Any) -> RunResult:
    """Run `train(args, ctx)` as a worker on every partition of `df`; blocks until all are done.

    `ctx` is a `worker.Context`: the worker, registered with the shards, and its rows, of any
    columns. `params` are the parameters to train, which are also their first values: a dict, a
    pytree, a `state_dict`, or a `ps.Dense` with its rule, rate and decay. The function and `args`
    are sent to the tasks as Spark sends any function, so they may not hold what does not pickle.

    Each partition is one worker, unless `workers` gives the number to deal the rows to (required
    over Spark Connect). Every worker needs a row. `evaluate` is a function of the parameters, or a
    `worker.Evaluate`. `max_iter` ends `ctx.batches` after that many steps of a worker. The other
    options have the names, values and defaults of `downpour train` (docs/reference/cli.md);
    `ctx.loop` follows the strategy, and a loop with `ctx.worker` of one's own is plain Downpour.

    Ctrl-C ends the job early, with a snapshot where `snapshots` says where. Shards in Ray need
    `ray.init` first; `shards_in="processes"` needs none. Raises BadInput for an error that the
    caller can fix, GiveUp when a worker or a shard fails for good.
    """
    check_frame("run: df", df)
    arguments.function("run: train", train, "a function of args and ctx")
    chosen = RunOptions(**options)
    tables = tables_of(chosen.params)
    if len(tables) != 1:
        raise BadInput(f"run: params: expected one table, got {', '.join(tables)}")
    ((name, dense),) = tables.items()
    table = dense.table(name)
    start = table.empty()
    dense.structure.write(dense.start, table.views(start))
    evaluate = _evaluate(chosen.evaluate)
    workers = spark.partition_count(df) if chosen.workers is None else chosen.workers
    spark.check_sendable(train, args)
    job = _job(table, dense, chosen, workers)
    job = msgspec.structs.replace(
        job,
        function=FunctionTask(
            train=train, args=args, tables=ps.Tables({name: _without_start(dense)}), workers=workers
        ),
    )
    outcome = run_job(
        df,
        job,
        weights=start,
        resume=chosen.resume,
        snapshots=chosen.snapshots,
        logs=chosen.logs,
        evaluation=None if evaluate is None else _plan(evaluate, dense, table),
        observer=chosen.observer,
        even=chosen.workers is not None,
    )
    params = _params(dense, table, outcome.weights)
    evaluations = list(outcome.evaluations)
    if evaluate is not None and not outcome.interrupted:
        status = outcome.statuses[0]
        evaluations.append(
            Evaluation(
                status.steps // workers, status.samples, outcome.seconds, evaluate.figures(params)
            )
        )
        if chosen.observer is not None:
            chosen.observer.evaluated(evaluations[-1])
    return RunResult(params, outcome, tuple(evaluations))


class TableModel:
    """A table as a model of a job whose workers run a function: it has no gradient of its own."""

    def __init__(self, table: DenseTable) -> None:
        self.table = table

    def initial(self, seed: int) -> Floats:
        """An arena of zeros: a run gives the first values itself."""
        return self.table.empty()

    def gradient(
        self, weights: Floats, batch: Batch, out: Floats, *, step: int, seed: int
    ) -> float:
        """Never called: the function computes gradients."""
        raise NotImplementedError("the function of the run computes gradients")


def _job(table: DenseTable, dense: ps.Dense, options: RunOptions, workers: int) -> Job:
    return Job(
        model=partial(TableModel, table),
        plan=Plan(
            steps=MOST if options.max_iter is None else options.max_iter,
            seed=DEFAULT_SEED if options.seed is None else options.seed,
            strategy=options.build_strategy(),
            schedule=dense.rate,
            prefetch=options.prefetch,
        ),
        rule=dense.rule,
        schedule=dense.rate,
        decay=dense.decay,
        batch_size=1,
        workers=workers,
        bound=options.staleness,
        stale=options.on_stale,
        shuffle=options.shuffle,
        runtime=options.part(ShardRuntime),
        links=options.part(LinkOptions),
        snapshots=options.part(SnapshotPolicy),
        logs_apart=True,
    )


def _evaluate(value: object) -> Evaluate | None:
    if value is None or isinstance(value, Evaluate):
        return value
    arguments.function("run: evaluate", value, "a function of the parameters")
    return Evaluate(value)  # type: ignore[arg-type]  # it was checked that it is callable


def _plan(evaluate: Evaluate, dense: ps.Dense, table: DenseTable) -> EvaluationPlan:
    """The tests during training; each ends with its function."""

    def figures(weights: Floats, _stopped: Callable[[], bool]) -> Figures:
        return evaluate.figures(_params(dense, table, weights))

    return EvaluationPlan(figures, evaluate.every, at_start=False, until=evaluate.until)


def _params(dense: ps.Dense, table: DenseTable, weights: Floats) -> Any:
    """The weights in the structure that the user gave."""
    return dense.structure.build(table.views(weights))


def _without_start(dense: ps.Dense) -> ps.Dense:
    """The description of the table alone, which every task needs."""
    bare = copy.copy(dense)
    bare.start = None
    return bare
