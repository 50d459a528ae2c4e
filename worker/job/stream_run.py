"""`worker.stream`: a function of the user's own on every micro-batch of a Spark stream.

    with worker.stream(sdf, train, params=params, checkpoint="clicks", workers=4) as stream:
        stream.wait()
    stream.params

Spark gives `foreachBatch` a micro-batch at least once: it repeats one if it has no record of its
end. Each is applied exactly once all the same, because the checkpoint of the model and that of
Spark agree on what has been done:

- The shards live across micro-batches. When all workers of one are done, the state of all shards is
  written as a snapshot, which has the micro-batch's number and is there whole or not at all. Only
  then is the end reported to Spark, which records it in its own checkpoint.
- A stream that ends in the middle of a micro-batch leaves the snapshot of the one before. The next
  stream begins with that, and Spark repeats the micro-batch from its first row.
- A stream that ends between the snapshot and Spark's record has Spark repeat a micro-batch that the
  snapshot has; it is passed over.
- A task that is retried continues after its last applied push, as in `worker.run`: the shards know
  each worker's step, and the driver knows its step at the beginning of the micro-batch.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pyarrow as pa

from ps import path_checks
from ps.durability import Durability
from ps.logs import Logger, logger
from ps.snapshots.catalog import LoadedSnapshot, Retention, SnapshotCatalog
from ps.storage import open_store
from ps.tables import tables_of
from shards import argument_checks
from shards.errors import BadInput, DownpourError
from shards.repartition import whole_weights
from shards.shard_state import ShardState
from worker import spark
from worker.data.parameters_file import write_parameters
from worker.job.function_run import (
    FunctionOptions,
    builder_of,
    check_train,
    first_values,
    function_job,
)
from worker.job.inputs import prepare
from worker.job.option_fields import option, training_options
from worker.job.options import MAX_COUNT
from worker.job.runner import check_frame, shards_of, task_of
from worker.job.running_job import stop_requested
from worker.job.shards import JobShards
from worker.job.stored_rows import StoredRows
from worker.job.training_job import Job, apply_strategy
from worker.spark.dataframe_checks import check_pythons
from worker.spark.worker_task import REPORT, TaskSpec, run_task
from worker.training.context import Train

_POLL_S = 0.5
_KEPT = Retention(count=2)
_MODEL, _SPARK = "model", "spark"


class StreamOptions(FunctionOptions):
    """The keyword arguments of `stream`."""

    checkpoint: str | Path = option("Where the stream continues from.", check=path_checks.place)
    workers: int = option("Workers, to which each micro-batch is dealt.", least=1, most=MAX_COUNT)
    trigger: Mapping[str, Any] | None = None

    @classmethod
    def label_option(cls, name: str) -> str:
        return f"stream: {name}"

    def check(self) -> None:
        super().check()
        if self.durability not in (Durability.MEMORY, Durability.REPLICATED):
            raise BadInput(
                self.label_option("durability"),
                expected="memory or replicated",
                got=f"{self.durability.value}: a stream continues from its checkpoint",
            )


class Stream:
    """A running stream; made by `stream`. `batches` counts the micro-batches that are applied."""

    def __init__(self, batches: "_Batches", query: Any) -> None:
        self._batches = batches
        self._query = query

    @property
    def batches(self) -> int:
        """The micro-batches that are applied, those before this stream was started included."""
        return self._batches.applied

    @property
    def params(self) -> Any:
        """The parameters after the last micro-batch, in the structure that was given."""
        return self._batches.params()

    @property
    def rows(self) -> StoredRows:
        """The rows of the sparse tables after the last micro-batch."""
        return self._batches.rows()

    def save(self, path: str | Path) -> str | Path:
        """Write `params` and `rows` to a .safetensors file, a path or URI; returns the path."""
        write_parameters(path, self._batches.tables, self.params, self.rows.arrays())
        return path

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the stream ends by itself, or by `ctx.stop`; false after `timeout_s` seconds.

        Raises the error of a micro-batch that failed, and GiveUp for one of Spark's.
        """
        until = None
        if timeout_s is not None:
            until = time.monotonic() + argument_checks.seconds("wait: timeout_s", timeout_s)
        while not spark.await_query(self._query, _POLL_S) and not self._batches.stopped:
            if until is not None and time.monotonic() >= until:
                return False
        if self._batches.stopped:
            self.stop()
            return True
        self._batches.raise_error()
        if (error := spark.query_error(self._query)) is not None:
            raise error
        return True

    def stop(self) -> None:
        """End the stream after the micro-batch under way. Idempotent."""
        self._batches.end()
        spark.stop_query(self._query)


@training_options(StreamOptions)
@contextmanager
def stream(
    sdf: spark.DataFrame, train: Train, args: Any = None, /, *, options: StreamOptions
) -> Iterator[Stream]:
    """Run `train(args, ctx)` on every micro-batch of a streaming DataFrame; each counts once.

    Each of the `workers` is given its part of the micro-batch by `ctx`, as in `worker.run`;
    `ctx.batch` is its number. The shards live as long as the stream. `checkpoint` is a folder, as a
    path or URI, for the model's state and Spark's: a stream that is started again with the same
    continues there, without loss and without counting a row twice. `trigger` are the arguments of
    Spark's `trigger`, such as `{"availableNow": True}`. The other options are those of
    `worker.run`.

    Leaving the block ends the stream after the micro-batch under way. Raises BadInput for a
    DataFrame that does not stream, Spark Connect, a strategy or a compression with which workers
    keep values between pushes, and a checkpoint of another job.
    """
    check_frame("stream: df", sdf)
    if not sdf.isStreaming:
        raise BadInput(
            "stream: df", expected="a streaming DataFrame", got="another: use worker.run"
        )
    if not spark.runs_queries(sdf):
        raise BadInput("stream", expected="a classic Spark session", got="Spark Connect")
    check_train("stream: train", train)
    spark.check_sendable(train, args)
    tables = tables_of(options.params)
    described = function_job(train, args, tables, options, options.workers)
    job, changes = apply_strategy(_without_rollbacks(described))
    if job.keeps_own_state:
        raise BadInput(
            f"stream: strategy {job.plan.strategy.name}",
            expected=(
                "one without compressed pushes and without a state of its "
                "workers, which end with the micro-batch"
            ),
        )
    model_uri = _below(options.checkpoint, _MODEL)
    catalog = SnapshotCatalog(model_uri, _KEPT)
    catalog.check_writable()
    snapshot = catalog.newest_good() if catalog.entries() else None
    single_row = spark.number_partitions(sdf.sparkSession, 1)
    weights = first_values(tables) if snapshot is None else None
    inputs = prepare(single_row, job, weights, snapshot, None, None)
    check_pythons(single_row, loopback=job.on_loopback)
    specs = job.specs(inputs.tables)
    log = logger("worker", job=specs[0].job)
    for change in changes:
        log.warning("%s", change)
    notify: Callable[[str], None] = partial(log.warning, "%s")
    with shards_of(specs, job, inputs, notify, spark.master_host(single_row)) as job_shards:
        task = task_of(inputs, job, job_shards.cluster)
        batches = _Batches(tables, job, task, job_shards, catalog, snapshot, log)
        query = spark.start_query(
            sdf, batches, _below(options.checkpoint, _SPARK), dict(options.trigger or {})
        )
        running = Stream(batches, query)
        try:
            yield running
        finally:
            running.stop()


class _Batches:
    """Applies micro-batches; Spark calls it, with one at a time, in a thread of its own."""

    def __init__(
        self,
        tables: Any,
        job: Job,
        task: TaskSpec,
        job_shards: JobShards,
        catalog: SnapshotCatalog,
        snapshot: LoadedSnapshot | None,
        log: Logger,
    ) -> None:
        self.tables = tables
        self.applied = 0 if snapshot is None else int(snapshot.name)
        self.stopped = False
        self._job = job
        self._task = task
        self._shards = job_shards
        self._catalog = catalog
        self._log = log
        self._states = job_shards.admin.export()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._ended = False

    def __call__(self, df: spark.DataFrame, batch: int) -> None:
        """Apply a micro-batch, unless an earlier call has; the end of the call reports its end.

        A call after the stream's end must not return, because Spark would record the micro-batch as
        applied. It waits for the end of the query, without the lock, which `end` takes.
        """
        with self._lock:
            over = self._ended or self.stopped
            if not over:
                try:
                    if self._is_new(batch):
                        self._apply(df, batch)
                except BaseException as error:
                    self._error = error
                    raise
        if over:
            spark.await_stop(df)

    def end(self) -> None:
        """Wait until no micro-batch is under way; none begins afterwards."""
        with self._lock:
            self._ended = True

    def params(self) -> Any:
        """The parameters after the last micro-batch."""
        cluster = self._shards.cluster
        weights = whole_weights(self._states, cluster.layout, cluster.map)
        return builder_of(self.tables)(weights)

    def rows(self) -> StoredRows:
        """The rows after the last micro-batch."""
        cluster = self._shards.cluster
        return StoredRows(self._states, cluster.layout, cluster.map)

    def raise_error(self) -> None:
        """Raise the error of the micro-batch that failed, if one did."""
        if self._error is not None:
            raise self._error

    def _is_new(self, batch: int) -> bool:
        """Return whether a micro-batch is the next, not a repetition of the last one applied."""
        if batch == self.applied - 1:
            self._log.info("micro-batch %d is repeated by Spark; it is applied already", batch)
            return False
        if batch != self.applied:
            raise BadInput(
                f"stream: checkpoint {self._catalog.store.place}",
                expected=f"micro-batch {self.applied}",
                got=f"{batch}: the model and Spark's checkpoint are of two streams",
            )
        return True

    def _apply(self, df: spark.DataFrame, batch: int) -> None:
        function = self._task.function
        assert function is not None
        first_steps = _steps(self._states)
        task = msgspec.structs.replace(
            self._task,
            function=msgspec.structs.replace(function, batch=batch, first_steps=first_steps),
        )
        self._train(spark.repartition_rows(df, self._job.workers), task)
        admin, cluster = self._shards.admin, self._shards.cluster
        states = admin.export()
        stops = stop_requested(admin.status()[0], task.first_incarnation)
        self._catalog.save(
            batch + 1,
            states,
            layout=cluster.layout,
            shard_map=cluster.map,
            rules=self._job.rule_names,
            workers=self._job.workers,
        )
        self._states, self.applied, self.stopped = states, batch + 1, stops

    def _train(self, df: spark.DataFrame, task: TaskSpec) -> None:
        """Run the workers of a micro-batch; raises the error of a shard that has died."""
        model, tag = self._job.model, f"downpour-{uuid4().hex}"

        def host(rows: Iterator[pa.RecordBatch], *task_ids: Any) -> Iterator[pa.RecordBatch]:
            return run_task(rows, task, model, *task_ids)

        with ThreadPoolExecutor(1, "micro-batch") as pool:
            executors = spark.ExecutorWatch(df)
            future = pool.submit(spark.run_tasks, df, host, REPORT, tag, task.cluster.job)
            try:
                while not wait([future], _POLL_S).done:
                    self._shards.check()
                    executors.check(time.monotonic())
            except DownpourError:
                spark.interrupt(df, tag)
                raise
            future.result()


def _steps(states: list[ShardState]) -> dict[str, int]:
    """The steps that each worker has taken."""
    return {name: entry.step for name, entry in states[0].saved.ledger.entries.items()}


def _without_rollbacks(job: Job) -> Job:
    """The job; a shard's death ends it, as an autosave would count some pushes twice or not."""
    return msgspec.structs.replace(job, runtime=replace(job.runtime, rollback_s=0.0))


def _below(uri: str | Path, name: str) -> str:
    """A folder in a path or URI, absolute."""
    return open_store(uri).below(name).address
