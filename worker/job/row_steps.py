"""The steps of a loop that another library runs over rows by id, beside dense arrays or alone.

The loop gives the ids of its batch to `begin`, which waits at the staleness bound and brings the
dense weights and the rows in one round trip, of one version at each shard. `take` pushes the
gradients of both as one. No step machine is needed: strategies that work with rows push a gradient
at each step, to which the shards apply the rules of the tables.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import ps
from ps.client import Client
from ps.shared_memory.client_buffers import PulledWeights
from ps.step_rows import RequestedRows, RowsOfStep
from shards import argument_checks
from shards.errors import BadInput
from shards.messages import MAX_SAMPLES
from shards.tables import DenseTable
from worker.job.framework_loop import Adapter
from worker.job.options import MAX_COUNT
from worker.strategies import Strategy
from worker.training.context import Context
from worker.training.own_loop import check_row_strategy, strategy_of_job
from worker.training.worker_state import restore_state

Floats = NDArray[np.float32]


class RowWorker(NamedTuple):
    """A worker of a job with sparse tables, and what the adapter of a loop needs to know of it.

    It takes `steps` steps, counted over all its incarnations. `lost` says what a restarted worker
    continues without, empty if nothing. `rows` returns the number of rows read for the loop so far.
    """

    job: ps.Job
    client: Client
    strategy: Strategy
    workers: int
    steps: int
    lost: str
    rows: Callable[[], int]


def make_row_adapter(make: Callable[[RowWorker], Adapter], ctx: Context) -> Adapter:
    """Build the adapter for the worker of `ctx`; it finishes when the user's function returns."""
    argument_checks.instance("wrap: ctx", ctx, Context, "a worker.Context")
    plan, client = ctx.plan, ctx.worker.client
    lost = ctx.restart_state.lost
    adapter = make(
        RowWorker(
            ctx.job, client, plan.strategy, plan.workers, plan.steps, lost, lambda: ctx.samples
        )
    )
    ctx.lost = lost
    ctx.at_end(adapter.finish)
    return adapter


@contextmanager
def join_rows(
    make: Callable[[RowWorker], Adapter],
    job: ps.Job,
    name: str,
    *,
    steps: int = MAX_COUNT,
    strategy: Strategy | str = "downpour",
    workers: int = 1,
    incarnation: int = 0,
    **options: Any,
) -> Iterator[Adapter]:
    """Build the adapter for worker `name` of a job without Spark; see `framework_loop.join_job`."""
    argument_checks.instance("job", job, ps.Job, "a ps.Job")
    steps = argument_checks.whole("join: steps", steps, 0)
    chosen = strategy_of_job("join", job, strategy, workers)
    check_row_strategy(job, chosen, workers)
    with job.worker(name, incarnation=incarnation, **options) as me:
        lost = restore_state(me.client, chosen, snapshots=options.get("keep")).lost
        adapter = make(RowWorker(job, me.client, chosen, workers, steps, lost, lambda: 0))
        yield adapter
        adapter.finish()


class RowSteps:
    """One worker's steps over rows and at most one dense table. Not for two threads."""

    def __init__(self, me: RowWorker) -> None:
        check_row_strategy(me.job, me.strategy, me.workers)
        self.client = me.client
        self.lost = me.lost
        self.name, self.table = _dense_table(me.job)
        self._views = me.job.views
        self._steps = me.steps
        self._rows_read = me.rows
        self._rows_before = me.rows()
        self._requested = RequestedRows(self._views.sparse)
        self._rows: RowsOfStep | None = None
        self._pulled: PulledWeights | None = None

    def pull(self) -> Floats:
        """The dense weights before the first step, read-only; waits at the staleness bound."""
        return self.client.pull().weights

    def begin(self, ids: Mapping[str, Any]) -> Floats:
        """Bring the rows of these ids by table, and return the dense weights, which are read-only.

        Raises BadInput for an unknown table, for what is no id, and after the last step.
        """
        worker = self.client.worker
        if self._rows is not None:
            raise BadInput(
                f"gather: worker {worker}: the step of the last gather has not ended; expected a"
                " call of step() first"
            )
        if self.client.step >= self._steps:
            raise BadInput(f"gather: worker {worker} has taken its last step already")
        rows = RowsOfStep(self._views.sparse, ids, self._requested.find(self.client.clock))
        self._pulled = self.client.pull(gather=rows.gather)
        self._rows = rows
        return self._pulled.weights

    def prefetch(self, ids: Mapping[str, Any]) -> None:
        """Request what a coming step of these ids will read, as `ps.Worker.prefetch`."""
        client, is_open = self.client, self._rows is not None
        self._requested.request(
            client.clock + is_open, ids, lambda clock, rows: client.prefetch(clock, gather=rows)
        )

    def rows(self, table: str) -> Floats:
        """The rows of the ids of a table, in their order; a copy."""
        assert self._rows is not None, "rows of a step"
        assert self._pulled is not None, "a step has its weights"
        return self._pulled.rows[table].rows[self._rows.find(table).inverse]

    def take(
        self,
        gradients: Mapping[str, Any],
        rows: Mapping[str, Any],
        *,
        loss: Any,
        samples: int | None,
    ) -> None:
        """Push the gradients of the dense table's arrays by name, and of the rows by table.

        `samples` None are the rows that have been read since the last step. If the gradients are
        refused, the step stays open.
        """
        if self._rows is None:
            raise BadInput(
                f"step: worker {self.client.worker}: the step has no ids; expected a call of"
                " gather({...}) before the forward pass"
            )
        read = self._rows_read()
        count = read - self._rows_before
        if samples is not None:
            count = argument_checks.whole("step: samples", samples, 0, MAX_SAMPLES)
        mean_loss = argument_checks.loss_of("step: loss", loss)
        pushed: dict[str, Any] = {}
        if self.name is not None:
            arena = self.client.new_gradient(zeroed=False)
            self._views.write(self.name, gradients, arena)
            self._views.check_finite({self.name}, arena)
            pushed[self.name] = arena
        self._rows.gradients.clear()
        for table, gradient in rows.items():
            self._rows.scatter(table, gradient)
        self.client.push({**pushed, **self._rows.gradients}, samples=count, loss=mean_loss)
        self._rows_before = read
        self._rows = self._pulled = None

    def finish(self) -> None:
        """Wait until all pushes are applied; a step that is open pushes nothing."""
        self._rows = self._pulled = None
        self.client.flush()


def _dense_table(job: ps.Job) -> tuple[str | None, DenseTable | None]:
    """The only dense table of a job and its name; None if all its tables are sparse."""
    dense = job.tables.dense
    if len(dense) > 1:
        expected = "a job with one dense table beside its sparse ones"
        raise BadInput("wrap", expected=expected, got=", ".join(dense))
    for name, table in dense.items():
        return name, table.table(name)
    return None, None
