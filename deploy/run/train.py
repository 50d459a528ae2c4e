"""One training run from settings to run folder: the work of `downpour train`.

It has four parts: prepare (deploy/run/prepare.py), environment (deploy/run/ray_and_spark.py),
execute, which is here, and finish (deploy/run/finish.py). All checks of the input come before
anything is started. Everything that was started is stopped when the run ends, however it ends.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import pyarrow as pa

from cupy_kernels.ops.updates import compiles_first
from deploy.run import ray_and_spark
from deploy.run.finish import AlreadyFinished, complete, finish, summary_of_end
from deploy.run.folder import RunFolder
from deploy.run.observer import RunObserver
from deploy.run.prepare import Inputs, prepare
from deploy.run.progress import Progress
from deploy.run.requests import FolderInbox
from deploy.run.settings import TrainSettings
from deploy.run.snapshot_ref import SnapshotRef, catalog_of
from deploy.run.start_times import StartTimes
from deploy.run.summary import Summary
from ps.shared_memory.shm_files import temporary_folder
from ps.snapshots.catalog import LoadedSnapshot
from worker import spark
from worker.callbacks.progress_line import COMPILES_FIRST
from worker.data.source import Source
from worker.data.stored_table import StoredTable
from worker.job.compile_ahead import compile_ahead
from worker.job.run_control import RunControl, SnapshotOrder
from worker.job.runner import run_job
from worker.spark import settings as spark_settings
from worker.spark.signals import (
    SafeExitStack,
    defer_interrupt,
    hangup_spares_children,
    on_signal,
)

__all__ = ["AlreadyFinished", "run"]


def run(
    settings: TrainSettings,
    *,
    origin: SnapshotRef | None = None,
    display: Callable[..., Progress] = Progress,
    control: RunControl | None = None,
    may_be_past_end: bool = False,
) -> Summary | None:
    """Train with `settings` and write a run folder; `display` makes the display of the progress.

    Returns the summary, or None if Ctrl-C ended the run early. With an `origin`, the run continues
    from it. If `origin` names no snapshot, the run continues in its own folder from the newest
    snapshot, or from the logs of shards that were killed if those hold more steps; otherwise it
    starts in a new folder. Orders come by `control`, from files in the folder, and by SIGUSR1, for
    a snapshot. A run in its own folder that has taken more steps than max_iter is an error, unless
    it `may_be_past_end`.

    Raises a DownpourError if anything goes wrong, after saving the progress in a snapshot if it
    can; KeyboardInterrupt if Ctrl-C left no snapshot; AlreadyFinished if nothing is left to do.
    """
    prepared = prepare(settings, origin, may_be_past_end=may_be_past_end)
    inputs, snapshot = prepared.inputs, prepared.snapshot
    if snapshot is not None and prepared.is_over:
        summary = summary_of_end(settings.out, snapshot)
        if summary is not None:
            return complete(
                inputs, snapshot, summary, partial(_progress, inputs, snapshot, display)
            )
    snapshots = catalog_of(settings, settings.out)
    ray_and_spark.check(inputs, snapshots)
    control = RunControl() if control is None else control
    start = StartTimes()
    open_folder = RunFolder.resume if prepared.in_place else RunFolder.create
    with (
        open_folder(settings.out, settings.plain()) as folder,
        control,
        on_signal(signal.SIGUSR1, partial(control.submit, SnapshotOrder())),
        SafeExitStack() as stack,
    ):
        start.note("inputs")
        control.read_inbox(FolderInbox(folder.path))
        progress = stack.enter_context(_progress(inputs, snapshot, display))
        observer = stack.enter_context(_observer(inputs, snapshot, folder, progress, start))
        source = inputs.train if isinstance(inputs.train, Source) else None
        # Small data is read before Ray and Spark start: only reading finds faults such as a NaN.
        table = pa.Table.from_batches(inputs.train.batches()) if source is None else None
        local = spark_settings.parse_local_master(settings.spark, 1) is not None
        await_compiler = compile_ahead(inputs.job, workers_here=local)
        with hangup_spares_children():
            session = ray_and_spark.start(settings, progress, stack, start.note)
        progress.starting("the shards and workers")
        with defer_interrupt():
            df, rows = _rows(session, settings.workers, table, source, stack, local=local)
        await_compiler()
        outcome = run_job(
            df,
            inputs.job,
            weights=None if snapshot is not None else inputs.weights,
            resume=snapshot,
            snapshots=snapshots,
            control=control,
            logs=settings.logs or folder.logs,
            evaluation=inputs.evaluation,
            observer=observer,
            even=True,
            source=rows,
        )
        if inputs.test is not None and not outcome.interrupted:
            progress.starting("the test")
        try:
            summary = finish(inputs, outcome, folder, observer)
        except KeyboardInterrupt:  # During the test: everything but its figures is written.
            summary = None
        if summary is None and outcome.snapshot is None:
            raise KeyboardInterrupt  # The reason and what remains to resume from are reported.
        return summary


def _rows(
    session: spark.SparkSession,
    workers: int,
    table: pa.Table | None,
    source: Source | None,
    stack: ExitStack,
    *,
    local: bool,
) -> tuple[spark.TaskInput, Source | StoredTable | None]:
    """The tasks of the workers, and what each reads its rows from if not from a DataFrame.

    The rows of a table are the same by either way. An embedded Spark needs none of its SQL where
    tasks read the rows themselves, so its first job comes sooner.
    """
    stored = None
    if local and table is not None:
        folder = stack.enter_context(temporary_folder("rows"))
        stored = spark.store_rows(table, workers, folder)
    if table is not None and stored is None:
        return session.createDataFrame(table), None
    if local:
        return spark.NumberedTasks(session, workers), stored or source
    return spark.number_partitions(session, workers), source


@contextmanager
def _progress(
    inputs: Inputs, snapshot: LoadedSnapshot | None, display: Callable[..., Progress]
) -> Iterator[Progress]:
    """The display of the run, with what the user should know before it begins."""
    with display(
        steps=inputs.job.plan.steps,
        workers=inputs.settings.workers,
        bound=inputs.settings.staleness,
        rows=inputs.train.rows,
        display=inputs.job.display,
        average_loss=inputs.job.average_loss,
    ) as progress:
        for notice in inputs.notices:
            progress.note(notice)
        if compiles_first(net=True):
            progress.note(COMPILES_FIRST)
        if snapshot is not None:
            for complaint in snapshot.passed_over:
                progress.note(f"{complaint}; continuing from {snapshot.place}")
        yield progress


def _observer(
    inputs: Inputs,
    snapshot: LoadedSnapshot | None,
    folder: RunFolder,
    progress: Progress,
    start: StartTimes,
) -> RunObserver:
    settings = inputs.settings
    begins_at = snapshot.manifest.steps // settings.workers if snapshot is not None else None
    seed = inputs.job.plan.seed
    check = partial(ray_and_spark.check_head, settings)
    return RunObserver(
        folder, progress, settings, seed=seed, begins_at=begins_at, check=check, start=start
    )
