"""Trains a function of the user's own with any strategy, on a job of the SDK, without Spark.

    with worker.start(params, strategy="easgd:tau=10", workers=2, shards=2) as job:
        worker.loop(job, "w0", gradient, batches, steps=1000)

`gradient(params, batch)` returns the loss and the gradient, in the structure of `params`: NumPy
arrays, or PyTorch tensors. `start` gives the shards their half of the strategy, `loop` is the
worker's half; both must be given the same.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Unpack

import msgspec
import numpy as np
from numpy.typing import NDArray

import ps
from ps.job import WorkerOptions
from ps.logs import logger
from ps.start_job import StartOptions
from ps.tables import tables_of
from shards import argument_checks
from shards.errors import BadInput
from shards.plurals import format_count
from shards.rules import Decay
from shards.tables import DenseTable, Layout
from worker.strategies import Strategy, strategy_of
from worker.strategies.base import USUAL
from worker.training.model import Batch, check_loss
from worker.training.training_loop import Plan, WorkerReport, train_worker
from worker.training.worker_state import restore_state

Floats = NDArray[np.float32]
Gradient = Callable[[Any, Batch], tuple[Any, Any]]
"""The loss and the gradient at some parameters, for a batch: a dict of arrays, rows first."""


def start(
    tables: object,
    *,
    strategy: Strategy | str = "downpour",
    workers: int = 1,
    staleness: float | str | None = USUAL,
    on: ps.On | str = ps.On.PROCESSES,
    shards: int = 1,
    start: Mapping[str, object] | None = None,
    resume: str | Path | None = None,
    name: str = "job",
    **options: Unpack[StartOptions],
) -> AbstractContextManager[ps.Job]:
    """Start shards as `ps.start` does, for a `strategy` with this many `workers`.

    `tables` is one table, or the parameters for one. Where the strategy brings an update rule or a
    rate of its own, it replaces the table's; a warning is logged. The `staleness` bound `usual` is
    the one that suits the strategy. The other options are those of `ps.start`. Raises BadInput for
    a bound at which workers would wait for each other for ever, and for options that diverge with
    this number of workers.
    """
    chosen = strategy_of("strategy", strategy).for_workers(
        argument_checks.whole("workers", workers, 1)
    )
    described = tables_of(tables)
    # A `loop` may prefetch; in a strategy that cannot, the smallest bound is the same.
    half = chosen.for_shards(workers, prefetch=chosen.plain)
    for table in described.sparse:
        half.check_rows(table)
    chosen.check_fragments(len(described.dense))
    notices = [text for dense in described.values() for text in chosen.notices(workers, dense.rule)]
    for notice in dict.fromkeys(notices):  # tables of one rule would all give the same
        logger("worker").warning("%s", notice)
    bound = argument_checks.staleness_bound(
        "staleness", chosen.suitable_bound() if staleness == USUAL else staleness
    )
    chosen.check(bound, prefetch=False)
    return ps.start(
        described,
        workers=workers,
        staleness=bound,
        server=half,
        strategy=_name_of(chosen),
        on=on,
        shards=shards,
        start=start,
        resume=resume,
        name=name,
        **options,
    )


def loop(
    job: ps.Job,
    name: str,
    gradient: Gradient,
    batches: Iterable[Batch],
    *,
    steps: int,
    strategy: Strategy | str = "downpour",
    workers: int = 1,
    incarnation: int = 0,
    seed: int = 0,
    prefetch: bool = False,
    patience_s: float = 30.0,
    **options: Unpack[WorkerOptions],
) -> WorkerReport:
    """Take `steps` steps as worker `name`, counted over all its incarnations, and report on them.

    `batches` must start at the worker's next step; the loop ends early, without error, with them.
    The rate and the weight decay of steps on the worker's own weights are those of the job's table.
    `prefetch` requests weights a step ahead. Further options are those of `ps.Job.worker`: with
    `keep`, the place of the job's snapshots, a restarted worker continues with what its strategy
    keeps between pushes, as the newest of them has it. With several tables `params` is a dict of
    them; raises BadInput for these unless the strategy exchanges each by itself.
    """
    argument_checks.instance("job", job, ps.Job, "a ps.Job")
    batch_iterator = _check_batches(
        argument_checks.iterable("batches", batches, "an iterable of batches")
    )
    layout, plan = plan_for(
        "loop", job, steps=steps, strategy=strategy, workers=workers, seed=seed, prefetch=prefetch
    )
    model = FunctionModel(layout, job, gradient)
    with job.worker(name, incarnation=incarnation, patience_s=patience_s, **options) as me:
        # The batches begin at the window that was under way.
        state = restore_state(me.client, plan.strategy, snapshots=options.get("keep"))
        state = state.between_windows(plan.strategy.keeps)
        return train_worker(
            me.client, model, batch_iterator, plan, incarnation=incarnation, restart_state=state
        )


def _check_batches(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches; raises BadInput for one that is no dict of rows."""
    for number, batch in enumerate(batches):
        try:
            len(next(iter(batch.values())))
        except (AttributeError, StopIteration, TypeError):
            expected = "a dict of arrays, a row for each sample"
            raise argument_checks.wrong(f"batches: batch {number}", expected, batch) from None
        yield batch


def only_table(label: str, job: ps.Job) -> tuple[str, ps.Dense]:
    """The table of a job with one dense one, and its name; else raises BadInput, naming `label`."""
    if len(job.tables) != 1 or job.tables.sparse:
        raise BadInput(label, expected="a job with one dense table", got=", ".join(job.tables))
    ((name, dense),) = job.tables.dense.items()
    return name, dense


def layout_for(label: str, job: ps.Job, strategy: Strategy) -> tuple[Layout, ps.Dense]:
    """The dense tables that the worker of a job trains, and one of them: all have its settings.

    Raises BadInput, naming `label`, for several where the strategy takes one, and for tables of
    different rates or decays, since a worker steps on all of them by one rule.
    """
    if not strategy.fragmented:
        name, dense = only_table(label, job)
        return Layout((dense.table(name),)), dense
    for table in job.tables.sparse:
        strategy.server(1).check_rows(table)
    strategy.check_fragments(len(job.tables.dense))
    first_name, first = next(iter(job.tables.dense.items()))
    for name, dense in job.tables.dense.items():
        if (dense.rate, dense.decay) != (first.rate, first.decay):
            raise BadInput(
                f"{label}: table {name}",
                expected=f"the rate and decay of table {first_name}: strategy {strategy.name} "
                "steps on all tables together",
                got="others",
            )
    tables = tuple(dense.table(name) for name, dense in job.tables.dense.items())
    return Layout(tables), first


def plan_for(
    label: str,
    job: ps.Job,
    *,
    steps: int,
    strategy: Strategy | str,
    workers: int,
    seed: int,
    prefetch: bool,
) -> tuple[Layout, Plan]:
    """The tables of a running job, and the plan of each of its workers.

    Raises BadInput, naming `label`, as `layout_for` does, and for another strategy or another
    number of workers than the job's.
    """
    chosen = strategy_of_job(label, job, strategy, workers)
    layout, dense = layout_for(label, job, chosen)
    plan = Plan(
        steps=steps,
        seed=seed,
        strategy=chosen,
        schedule=dense.rate,
        prefetch=prefetch,
        decay=dense.decay if chosen.server(workers).deltas else Decay(),
        workers=workers,
    )
    return layout, plan


def strategy_of_job(label: str, job: ps.Job, strategy: Strategy | str, workers: int) -> Strategy:
    """The strategy of each of the workers; raises BadInput, naming `label`, where the job was
    started with another, or for another number of workers.
    """
    chosen = strategy_of("strategy", strategy).for_workers(
        argument_checks.whole("workers", workers, 1)
    )
    expected, got = job.cluster.strategy, _name_of(chosen)
    if expected not in ("", got):
        raise BadInput(
            f"{label}: strategy", expected=f"{expected}, as the job was started with", got=got
        )
    if job.cluster.workers not in (0, workers):
        raise BadInput(
            f"{label}: workers",
            expected=f"{job.cluster.workers}, as the job was started for",
            got=workers,
        )
    return chosen


def check_row_strategy(job: ps.Job, strategy: Strategy, workers: int) -> None:
    """Raise BadInput if a strategy cannot work with the rows of the job, or its bound."""
    half = strategy.for_shards(workers, prefetch=False)
    for table in job.tables.sparse:
        half.check_rows(table)
    if strategy.push_period > 1:
        raise BadInput(
            f"strategy {strategy.name}",
            expected="a push at each step, because each step has ids of its own",
            got=f"one every {strategy.push_period} steps",
        )
    strategy.check(job.cluster.bound, prefetch=False)


def _name_of(strategy: Strategy) -> str:
    """The name by which the command line knows it; of a user's own, that of its class.

    One that exchanges fragments has its options as well, those without their default: its workers
    and shards reckon with each other's periods and overlaps.
    """
    name = str(strategy.__struct_config__.tag)
    if not strategy.fragmented:
        return name
    usual = msgspec.to_builtins(type(strategy)())
    options = [
        f"{option}={_write_option(value)}"
        for option, value in msgspec.to_builtins(strategy).items()
        if value != usual[option]
    ]
    return ":".join([name, ",".join(options)] if options else [name])


def _write_option(value: object) -> str:
    """The value of an option, as a text such as diloco:h=50 has it."""
    if isinstance(value, Mapping):
        return "+".join(f"{worker}/{speed:g}" for worker, speed in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


class TableModel:
    """A table as a model, for workers that run a function: it has no gradient of its own."""

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


class FunctionModel:
    """A function of the user's as a model of the worker loop (worker/training/model.py)."""

    def __init__(self, layout: Layout, job: ps.Job, gradient: Gradient) -> None:
        self.layout = layout
        self._views = job.views
        self._gradient = argument_checks.function(
            "gradient", gradient, "a function of params and batch"
        )

    def initial(self, seed: int) -> Floats:
        """An arena of zeros: the job's shards hold the weights already."""
        return self.layout.empty()

    def gradient(
        self, weights: Floats, batch: Batch, out: Floats, *, step: int, seed: int
    ) -> float:
        """The loss of a batch; its gradient is written into `out`, padding included."""
        returned = self._gradient(self._views.build(None, weights), batch)
        loss, gradient = _loss_and_gradient(returned)
        if len(self.layout.tables) == 1:
            self._views.write(None, gradient, out)
        else:
            self._write_all(gradient, out)
        return check_loss(self, loss)

    def _write_all(self, gradient: Any, out: Floats) -> None:
        """Write the gradients of several tables."""
        names = self.layout.names
        if not isinstance(gradient, Mapping) or set(gradient) != set(names):
            raise argument_checks.wrong("gradient", f"a dict of {', '.join(names)}", gradient)
        for name in names:
            self._views.write(name, gradient[name], out)


def _loss_and_gradient(returned: object) -> tuple[Any, Any]:
    """Return the two values of the user's function if they come in this order; raises BadInput."""
    if isinstance(returned, tuple | list) and len(returned) == 2:
        loss, gradient = returned
        if not _has_parts(loss) or _has_parts(gradient):
            return loss, gradient
        got = "(gradients, loss)"
    elif isinstance(returned, tuple | list):
        got = format_count(len(returned), "value")
    elif isinstance(returned, Mapping):
        got = f"a dict of {', '.join(map(str, returned))}"
    else:
        got = argument_checks.describe_value(returned)
    raise BadInput("gradient", expected="it to return (loss, gradients)", got=got)


def _has_parts(value: object) -> bool:
    """Return whether a value holds several others, as parameters do and a loss does not."""
    return isinstance(value, Mapping | list | tuple) or bool(getattr(value, "ndim", 0))
