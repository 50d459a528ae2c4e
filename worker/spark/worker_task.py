"""A worker that runs inside one Spark task.

A partition's rows come in as Arrow batches, one row goes out: the worker's report. The worker's
name is its partition and its incarnation is the attempt, so a retried task takes over the name and
continues after the last push that was applied. A worker with an empty partition never registers.
Executors run no Ray: the shards' addresses are part of the spec.
"""

import os
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pyarrow as pa
from threadpoolctl import threadpool_limits

from ps import Cluster, Compression
from ps.client import Client
from ps.transport.link_model import LinkModel
from ps.transport.transports import Transport
from shards.errors import DownpourError, GiveUp
from worker.data.batches import Batches
from worker.data.columns import DATA, LABEL, ColumnSpec
from worker.data.encoded import decode_images
from worker.data.image_spool import ImageSpool
from worker.data.read_options import MAX_SKIPPED
from worker.data.source import Source, part_rows
from worker.data.stored_table import StoredTable
from worker.spark.code_archive import PACKAGES
from worker.training.context import FunctionTask, TaskAttempt, run_function
from worker.training.device_selection import ANY, DeviceRequest, allocator, check_here, place_model
from worker.training.model import Model
from worker.training.training_loop import Plan, WorkerReport, train_worker
from worker.training.worker_state import restore_state

_OURS = tuple(f"{Path(__file__).parents[2] / package}{os.sep}" for package in PACKAGES)
_LIBRARY = re.compile(r"[/\\](lib[/\\]python[\d.]+|site-packages|dist-packages)[/\\]")

PATIENCE_S = 60.0
"""The shortest time, in seconds, that a worker waits for a silent shard."""

REPORT = pa.schema([("report", pa.binary())])


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of every task of a job.

    With a `source` a task reads its own of `parts` parts of it, in place of the partition's rows;
    a table that is stored has these parts.
    `first_incarnation` numbers the workers of a resumed job above all earlier ones. `link` emulates
    a network link for each worker, to try one out. `compression` is the encoding of each worker's
    pushes and pulls. The worker's own state is written for the snapshots at `keep`, and restored:
    when the task is retried from the newest of these, else from the snapshot `resumed`; both are
    paths or URIs. A `function`, if there is one, runs in place of the loop over the worker's
    batches.
    """

    cluster: Cluster
    plan: Plan
    batch_size: int
    columns: tuple[ColumnSpec, ...] = ()
    source: Source | StoredTable | None = None
    parts: int = 0
    shuffle: bool = True
    skip_images: int = MAX_SKIPPED
    first_incarnation: int = 0
    patience_s: float = PATIENCE_S
    device: DeviceRequest = ANY
    link: LinkModel | None = None
    transport: Transport = Transport.AUTO
    compression: Compression | dict[str, Compression] = Compression()
    keep: str | None = None
    resumed: str | None = None
    function: FunctionTask | None = None


def run_task(
    rows: Iterator[pa.RecordBatch],
    spec: TaskSpec,
    model: Callable[[], Model],
    partition: int,
    attempt: int,
    gpus: Sequence[str] = (),
) -> Iterator[pa.RecordBatch]:
    """Train on a partition's rows, or on a part of a source.

    Yields one batch of schema REPORT, or nothing without rows.
    `gpus` are the addresses of the GPUs that Spark assigned to this task.
    """
    if isinstance(spec.source, StoredTable):
        rows = spec.source.batches(partition)
    if isinstance(spec.source, Source):
        rows = part_rows(spec.source, spec.parts, partition)
    elif spec.function is None:
        where = f"worker w{partition}'s rows"
        columns = spec.columns or (DATA, LABEL)
        rows = decode_images(rows, columns, where, max_skipped=spec.skip_images)
    first = next(rows, None)
    while first is not None and first.num_rows == 0:
        first = next(rows, None)
    if first is None:
        return
    # One BLAS thread a worker: more threads on the same cores only slow each other down.
    with threadpool_limits(1):
        try:
            report = _live(first, rows, spec, model, partition, attempt, gpus)
        except DownpourError:
            raise
        except Exception as error:
            # Spark's report is long and leaves out the cause; this line is what the user reads.
            failure = GiveUp(f"{_line(error)} ({_place(error)})")
            failure.add_note("".join(traceback.format_exception(error)))
            raise failure from error
    yield pa.record_batch([pa.array([msgspec.json.encode(report)], pa.binary())], schema=REPORT)


def _live(
    first: pa.RecordBatch,
    rows: Iterator[pa.RecordBatch],
    spec: TaskSpec,
    model: Callable[[], Model],
    partition: int,
    attempt: int,
    gpus: Sequence[str],
) -> WorkerReport:
    def stream() -> Iterator[pa.RecordBatch]:
        yield first
        yield from rows

    name, incarnation = f"w{partition}", spec.first_incarnation + attempt
    if spec.function is not None:
        check_here(spec.device)
        return run_function(
            spec.function,
            spec.plan,
            stream(),
            spec.cluster,
            task_attempt=TaskAttempt(
                partition, attempt, incarnation, spec.first_incarnation, tuple(gpus)
            ),
            shuffle=spec.shuffle,
            compression=spec.compression,
            patience_s=spec.patience_s,
            resumed=spec.resumed,
            keep=spec.keep,
            link=spec.link,
            transport=spec.transport,
        )
    built = place_model(model(), spec.device, partition=partition, assigned=gpus)
    with ExitStack() as stack:
        client = stack.enter_context(
            Client(
                spec.cluster,
                worker=name,
                incarnation=incarnation,
                patience_s=spec.patience_s,
                compression=spec.compression,
                keep=spec.keep,
                link=spec.link,
                transport=spec.transport,
                allocate=allocator(built),
            )
        )
        restart_state = restore_state(
            client,
            spec.plan.strategy,
            resumed=spec.resumed,
            snapshots=spec.keep,
            first_incarnation=spec.first_incarnation,
        )
        batches = stack.enter_context(
            Batches(
                stream(),
                ImageSpool(f"worker {name}'s rows", spec.columns),
                batch_size=spec.batch_size,
                seed=spec.plan.seed,
                worker=name,
                shuffle=spec.shuffle,
                start_step=(client.step + restart_state.steps) * spec.plan.iter_size,
            )
        )
        return train_worker(
            client, built, batches, spec.plan, incarnation=incarnation, restart_state=restart_state
        )


def _line(error: Exception) -> str:
    """An error's class and the first line of its text."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _place(error: Exception) -> str:
    """Where an error was raised, in the innermost file that is neither ours nor a library's.

    If there is no such file, the innermost that is not ours.
    """
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    user_frames = [frame for frame in foreign if not _LIBRARY.search(frame.filename)]
    frame = (user_frames or foreign or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"


def decode_reports(rows: Sequence[Sequence[bytes]]) -> list[WorkerReport]:
    """The reports in the rows that a job's tasks returned."""
    return [msgspec.json.decode(row[0], type=WorkerReport) for row in rows]
