"""The context of a function of `worker.run` in its Spark task: its worker, rows and paths.

    def train(args, ctx):
        for batch in ctx.batches(64, epochs=3):
            with ctx.worker.step(samples=len(batch["label"])) as step:
                params = step.pull()
                step.loss, gradients = value_and_grad(params, batch)
                step.push(gradients)

A retried task takes over the worker's name and begins after its last applied push, at the batch
that comes next; the function need do nothing for that.
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

import ps
from ps import path_checks
from ps.logs import Logger, logger
from ps.session.compression import Compression
from shards import argument_checks
from shards.errors import BadInput
from worker.data.batches import Batches
from worker.data.column_spool import ColumnSpool, select_columns
from worker.data.feed import RowFeed
from worker.data.parameters_file import refuse_rows, write_parameters
from worker.training.own_loop import FunctionModel, Gradient, layout_for
from worker.training.step_machine import Plan
from worker.training.training_loop import WorkerReport, train_worker
from worker.training.worker_state import Continued, restore_state

STOP = "stop"
"""The name under which a worker that stops the run registers, for the driver to see it."""

Batch = dict[str, Any]
"""Arrays by column, rows first; `Ragged` and `SparseVectors` for columns that are asked as such."""

Train = Callable[[Any, "Context"], object]
"""A function of `worker.run`: its arguments and its context."""


class Context:
    """One worker of `worker.run`, in its task.

    `worker` is registered with the shards of `job`. `rank` is its number among all `workers`,
    counted from 0; the worker of rank 0 is the `chief`. `partition` is the number of the partition,
    or of the part of a path, that the worker reads; `rank` is the same number. `batch` is the
    number of the micro-batch of `worker.stream`, None in `worker.run`. `attempt` is higher for each
    later attempt of Spark's at the task. `gpus` are the addresses of the GPUs that Spark assigned
    to it. `log` is a logger that names job and worker in its records.
    """

    def __init__(
        self,
        job: ps.Job,
        me: ps.Worker,
        rows: Iterator[pa.RecordBatch],
        plan: Plan,
        *,
        task: "FunctionTask",
        task_attempt: "TaskAttempt",
        shuffle: bool,
        restart_state: Continued,
    ) -> None:
        self.job = job
        self.worker = me
        self.rank = self.partition = task_attempt.partition
        self.workers = task.workers
        self.attempt = task_attempt.attempt
        self.gpus = task_attempt.gpus
        self.log: Logger = logger("worker.run", job=job.cluster.job, worker=me.name)
        self.plan = plan
        self._rows: Iterator[pa.RecordBatch] | None = rows
        self._shuffle = shuffle
        self.restart_state = restart_state
        self.batch = task.batch
        self._folder = task.folder
        self._first_step = task.first_steps.get(me.name, 0)
        self.stopped = False
        self._ends: list[Callable[[], object]] = []
        self._open = ExitStack()
        self._feed: RowFeed | None = None
        self.samples = 0
        self.data_s = 0.0
        self.lost = ""

    @property
    def chief(self) -> bool:
        """True for the worker that may export; there is exactly one."""
        return self.rank == 0

    @property
    def role(self) -> str:
        """`chief` or `worker`. The evaluation has no role, because it runs in the driver."""
        return "chief" if self.chief else "worker"

    @property
    def feed(self) -> RowFeed:
        """The rows one after another, each once: `next_batch(n)` until `should_stop()`."""
        if self._feed is None:
            self._feed = RowFeed(self._take_rows("feed"), f"worker {self.worker.name}'s rows")
        return self._feed

    def batches(
        self,
        size: int,
        *,
        epochs: int | None = None,
        columns: Collection[str] | None = None,
        ragged: Collection[str] = (),
    ) -> Iterator[Batch]:
        """Minibatches of `size` rows from this worker's next step on, an array a column.

        Each epoch has every row once, shuffled by the seed unless the job's `shuffle` is off.
        `epochs` None is without end; otherwise the last batch may be shorter. `columns` None is all
        of them. Numbers are arrays of their type, (size,); vectors and lists of numbers of one
        length (size, length); text and bytes are arrays of objects. Lists in the columns `ragged`,
        and lists of text, are a `worker.Ragged`: the values of all rows as one array, and where
        each row begins; vectors there are `worker.SparseVectors`. Structs and maps are refused;
        worker/data/column_values.py has all types.
        A batch is taken for one step: a retried task begins with the batch of the first step that
        was not applied. The rows can be read once in each task. Raises BadInput for a row that does
        not fit, naming column and row.
        """
        return self._batches(
            self.worker.client.step - self._first_step, size, epochs, columns, ragged
        )

    def _batches(
        self,
        first: int,
        size: int,
        epochs: int | None,
        columns: Collection[str] | None,
        ragged: Collection[str],
    ) -> Iterator[Batch]:
        """The batches from that of step `first` on."""
        argument_checks.whole("batches: size", size, 1)
        if epochs is not None:
            argument_checks.whole("batches: epochs", epochs, 1)
        for label, names in (("columns", columns), ("ragged", ragged)):
            if isinstance(names, str):
                raise argument_checks.wrong(
                    f"batches: {label}", "a list of names of columns", names
                )
        me = self.worker
        batches = Batches(
            self._take_rows("batches"),
            ColumnSpool(f"worker {me.name}'s rows", columns, ragged=ragged),
            size,
            self.plan.seed,
            me.name,
            start_step=first,
            shuffle=self._shuffle,
            epochs=epochs,
        )
        self._open.callback(batches.close)
        return self._count_batches(batches)

    def rows(self, columns: Collection[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The rows as the Arrow record batches in which Spark sends them, from the first row on."""
        for batch in self._take_rows("rows"):
            self.samples += batch.num_rows
            yield select_columns(batch, columns, f"worker {self.worker.name}'s rows")

    def loop(
        self,
        gradient: Gradient,
        batch_size: int,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        columns: Collection[str] | None = None,
        ragged: Collection[str] = (),
    ) -> WorkerReport:
        """Train with the job's strategy until `epochs` or `steps` are over, whichever is first.

        `gradient(params, batch)` returns the loss and the gradient, in the structure of the
        parameters. `steps` counts over all attempts; None is the job's `max_iter`. Rows are read as
        by `batches`. Raises BadInput for a job with several tables, unless the strategy exchanges
        each by itself.
        """
        plan = self.plan
        if steps is not None:
            plan = msgspec.structs.replace(
                plan, steps=argument_checks.whole("loop: steps", steps, 1)
            )
        layout, _ = layout_for("loop", self.job, plan.strategy)
        model = FunctionModel(layout, self.job, gradient)
        client, self.lost = self.worker.client, self.restart_state.lost
        first = client.step - self._first_step + self.restart_state.steps
        batches = self._batches(first, batch_size, epochs, columns, ragged)
        return train_worker(client, model, batches, plan, restart_state=self.restart_state)

    def path(self, path: str | Path) -> str:
        """A place as the caller of `worker.run` means it: a URI or an absolute path.

        A task runs in a folder of Spark's. So a relative path begins at the caller's working
        directory, which must be on a disk that this machine sees, too.
        """
        text = str(path_checks.place("path", path))
        return text if "://" in text else str(Path(self._folder) / text)

    def save(self, path: str | Path) -> str:
        """Write the present parameters to a .safetensors file at `path(place)`; only the chief may.

        The pushes of this worker are in it; those of others are as far as the shards have them.
        """
        if not self.chief:
            raise BadInput(
                "save",
                expected="the chief to export",
                got=f"worker {self.worker.name}: call it only where ctx.chief is true",
            )
        refuse_rows(self.job.tables)
        self.worker.flush()
        target = self.path(path)
        write_parameters(target, self.job.tables, self.job.read())
        return target

    def stop(self) -> None:
        """End the run: `batches` and `loop` end here now, and the feed has no more rows.

        Return from the function after it. The driver then cancels all other workers, in later waves
        too, and the weights of that moment are the result.
        """
        self.stopped = True
        if self._feed is not None:
            self._feed.terminate()

    def at_end(self, function: Callable[[], object]) -> None:
        """Call `function` when the function of the run has returned, but not if it raises."""
        self._ends.append(function)

    def end(self) -> None:
        """The function of the run has returned."""
        for function in self._ends:
            function()

    def close(self) -> None:
        """Drop the copy of the rows."""
        self._open.close()

    def _take_rows(self, use: str) -> Iterator[pa.RecordBatch]:
        if self._rows is None:
            raise BadInput(
                use,
                expected=(
                    "the rows to be read once in a task, by one of batches, feed, rows and loop"
                ),
                hint="they are already being read",
            )
        rows, self._rows = self._rows, None
        return rows

    def _count_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches, with their rows and the time that they take counted for the report."""
        while True:
            if self.stopped or self.worker.client.step >= self.plan.steps:
                return
            started = time.monotonic()
            batch = next(batches, None)
            took = time.monotonic() - started
            self.data_s += took
            self.worker.client.times.data_s += took
            if batch is None:
                return
            self.samples += len(next(iter(batch.values())))
            yield batch


class FunctionTask(msgspec.Struct, frozen=True, kw_only=True):
    """A function that each worker runs in place of the worker loop, and what it is given.

    `tables` describe the job's, without their first values. The function and its arguments reach
    the tasks as Spark sends any function. `folder` is the working directory of the caller.
    In a stream `batch` numbers the micro-batch, and `first_steps` are the steps that each worker
    had taken before it.
    """

    train: Train
    args: Any
    tables: ps.Tables
    workers: int
    folder: str
    batch: int | None = None
    first_steps: dict[str, int] = {}


class TaskAttempt(msgspec.Struct, frozen=True):
    """Which task this is: its partition, Spark's attempt at it, and the GPUs that it was assigned.

    `incarnation` is the worker's, and `first_incarnation` that of the job's first tasks.
    """

    partition: int
    attempt: int
    incarnation: int
    first_incarnation: int
    gpus: tuple[str, ...] = ()


def run_function(
    task: FunctionTask,
    plan: Plan,
    rows: Iterator[pa.RecordBatch],
    cluster: ps.Cluster,
    *,
    task_attempt: TaskAttempt,
    shuffle: bool,
    compression: Compression | dict[str, Compression],
    resumed: str | None,
    **options: Any,
) -> WorkerReport:
    """Run the function as worker `w<partition>` until it returns, and report on it.

    `options` are those of the worker's client.
    """
    started = time.monotonic()
    job = ps.connect(cluster, tables=task.tables)
    name = f"w{task_attempt.partition}"
    with job.worker(
        name, incarnation=task_attempt.incarnation, compression=compression, **options
    ) as me:
        first_step = me.client.step
        restart_state = restore_state(
            me.client,
            plan.strategy,
            resumed=resumed,
            snapshots=options.get("keep"),
            first_incarnation=task_attempt.first_incarnation,
        )
        ctx = Context(
            job,
            me,
            rows,
            plan,
            task=task,
            task_attempt=task_attempt,
            shuffle=shuffle,
            restart_state=restart_state,
        )
        with ExitStack() as stack:
            stack.callback(ctx.close)
            task.train(task.args, ctx)
            ctx.end()
        me.flush()
        if ctx.stopped:
            with job.worker(STOP, incarnation=task_attempt.incarnation):
                pass
        times, seconds = me.client.times, time.monotonic() - started
        return WorkerReport(
            worker=name,
            incarnation=task_attempt.incarnation,
            steps=me.client.step - first_step,
            samples=ctx.samples,
            seconds=seconds,
            compute_s=max(0.0, seconds - ctx.data_s - times.waited_s - times.network_s),
            data_s=ctx.data_s,
            waited_s=times.waited_s,
            network_s=times.network_s,
            serialise_s=times.serialise_s,
            duplicates=me.client.duplicates,
            dropped=me.client.dropped,
            transports=me.client.transports,
            lost=ctx.lost,
        )
