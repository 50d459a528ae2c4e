"""A training job, from fresh shards to final weights: what `worker.train` and the command line run.

The caller provides a Spark DataFrame and, for shards in Ray, a process that is connected to Ray.
`run_job` starts the shards, submits one Spark job with the workers as its tasks, watches both,
takes snapshots, and returns the final weights. A job that is interrupted, or that loses a worker
for good, leaves a snapshot of its weights at that moment.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ps import Cluster
from ps.durability import Durability
from ps.launch.launch_plan import LaunchPlan, recovery_s
from ps.launch.launcher import start_shards
from ps.logs import logger
from ps.snapshot_scheduler import SnapshotScheduler
from ps.snapshots.catalog import LoadedSnapshot, SnapshotCatalog
from ps.wal.job_logs import drop_logs
from shards import argument_checks
from shards.spec import ShardSpec, TableSpec
from shards.tables import Layout
from worker import spark
from worker.data.source import Source
from worker.data.stored_table import StoredTable
from worker.job import initial_state
from worker.job.compile_ahead import compile_ahead
from worker.job.inputs import JobInputs, prepare
from worker.job.outcome import Notices, Observer, Outcome
from worker.job.run_control import RunControl
from worker.job.running_job import RunningJob
from worker.job.shards import JobShards, Start
from worker.job.training_job import Job, apply_strategy
from worker.spark.background import begin
from worker.spark.dataframe_checks import check_columns, check_pythons, deal_rows
from worker.spark.worker_task import PATIENCE_S, TaskSpec
from worker.training.evaluation import BackgroundEvaluator, Evaluation, EvaluationPlan

_ANSWER_S = 10.0
_BACK_S = 30.0  # for a shard to restart from its last autosave


def run_job(
    df: spark.TaskInput,
    job: Job,
    *,
    weights: NDArray[np.float32] | None = None,
    resume: str | Path | LoadedSnapshot | None = None,
    snapshots: str | Path | None = None,
    logs: str | Path | None = None,
    control: RunControl | None = None,
    evaluation: EvaluationPlan | None = None,
    observer: Observer | None = None,
    even: bool = False,
    source: Source | StoredTable | None = None,
) -> Outcome:
    """Train on `df` as `job` says; blocks until every worker is done.

    If exactly `job.workers` partitions of `df` have rows, each of these is one worker's; otherwise
    the rows are dealt evenly to `job.workers` partitions. With `even`, the rows are also dealt
    where one partition has more than twice the rows of another. A small Spark job counts the rows
    first. With a `source` each task reads its own part of it, from files that every machine must
    have at the same path; `df` must then be `spark.number_partitions(session, job.workers)`, one
    row for each worker, or, with an embedded Spark, `spark.NumberedTasks(session, job.workers)`.

    The job starts from `weights` (a flat arena; default: the model's initial weights for the seed),
    or continues from the snapshot `resume`, given by its path or URI, or as it was read. A job's
    folder below `logs` serves as a snapshot, too. Snapshots go into folders below `snapshots`, a
    path or URI, named by iteration. `control` passes on the orders of an operator, such as to take
    a snapshot, to reshard or to change settings. If the durability needs logs, they are stored
    below `logs`, in folders named after the job. They are deleted when the job has written its
    final snapshot, or has completed and no final snapshot was requested. Logs of an earlier job
    there must not hold more updates than the snapshot that is resumed. `evaluation` says when and
    how the weights are tested while the job trains
    (worker/training/evaluation.py).

    Ctrl-C ends the job early, with a snapshot and `interrupted` set; a second Ctrl-C raises
    KeyboardInterrupt, without a snapshot. Call it from the main thread, in a process connected to
    Ray if the shards are to run there. Without an `observer`, notices are warnings of the logger
    downpour.worker. Raises BadInput for an error that the caller can fix, GiveUp when a worker or a
    shard fails for good, and any exception of the `observer`; a job that ends early for any reason
    while its shards are alive leaves a snapshot.
    """
    check_frame("df", df)
    job = argument_checks.instance("job", job, Job, "a worker.job.Job")
    argument_checks.flag("even", even)
    if source is not None and not isinstance(source, StoredTable):
        expected = "a worker.Source"
        argument_checks.instance("source", source, Source, expected)  # type: ignore[type-abstract]
    if control is not None:
        argument_checks.instance("control", control, RunControl, "a worker.job.RunControl")
    job, changes = apply_strategy(job)
    inputs = prepare(df, job, weights, resume, snapshots, logs)
    specs = job.specs(inputs.tables)
    notify = Notices(observer, logger("worker", job=specs[0].job))
    for change in changes:
        notify(change)
    columns: list[str] = []
    if source is None:
        df = df.frame if isinstance(df, spark.NumberedTasks) else df
        columns = check_columns(df, job.columns) if job.function is None else []
    elif isinstance(source, StoredTable):
        check_columns(source, job.columns)
    # A Spark job looks at the rows while the shards start.
    rows = begin(partial(_deal, df, job, source, columns, even=even), "spark-rows")
    if line := _too_few_slots(job, spark.task_slots(df)):
        notify(line)
    peer = spark.master_host(df)
    with shards_of(specs, job, inputs, notify, peer, ready=rows.result) as job_shards:
        cluster = job_shards.cluster
        if observer is not None:
            observer.started(cluster, initial_state.versions(inputs.beginning))
        begins_at = inputs.begins_at(job.workers)
        with (
            _snapshotter(job, cluster, inputs.catalog, begins_at, notify) as snapshotter,
            _evaluator(evaluation, job, cluster, begins_at, observer, notify) as evaluator,
        ):
            if evaluator is not None and isinstance(inputs.beginning, np.ndarray):
                evaluator.begin(inputs.beginning)
            outcome = RunningJob(
                rows.result(),
                job,
                task_of(inputs, job, cluster, source),
                job_shards,
                snapshotter,
                evaluator,
                control or RunControl(),
                observer,
                notify,
            ).run()
        # If the job completed and no final snapshot was requested, the outcome itself holds the
        # weights, so the logs are no longer needed.
        unsaved = inputs.catalog is None or not job.snapshot_at_end
        logs_obsolete = outcome.snapshot is not None or (unsaved and not outcome.interrupted)
        if logs_obsolete:
            job_shards.delete_logs()
    if inputs.logs is not None and logs_obsolete:
        drop_logs(inputs.logs)
    return outcome


@contextmanager
def shards_of(
    specs: Sequence[ShardSpec],
    job: Job,
    inputs: JobInputs,
    notify: Callable[[str], None],
    peer: str | None,
    ready: Callable[[], object] = lambda: None,
) -> Iterator[JobShards]:
    """The shards of a job that is `settled`, in their initial state; they end with the context.

    `peer` is a host that the workers are near: shards give out the address that reaches it. `ready`
    waits for what else the job needs: until it returns, nothing that is stored is changed.
    """
    await_compiler = compile_ahead(job, workers_here=inputs.workers_here)
    with JobShards(
        specs,
        _starting(job, peer),
        logs=inputs.logs,
        patience_s=_patience_s(job, inputs.tables),
        notify=notify,
    ) as job_shards:
        ready()
        _install(inputs, job, job_shards)
        await_compiler()
        yield job_shards


def _deal(
    df: spark.TaskInput,
    job: Job,
    source: Source | StoredTable | None,
    columns: Sequence[str],
    *,
    even: bool,
) -> spark.TaskInput:
    """The rows for the workers, or the tasks that read a source; raises BadInput."""
    if source is not None or isinstance(df, spark.NumberedTasks):
        check_pythons(df, loopback=job.on_loopback)
        return df
    return deal_rows(df, job.workers, even=even, columns=columns, loopback=job.on_loopback)


def _install(inputs: JobInputs, job: Job, job_shards: JobShards) -> None:
    """Give the shards their initial state, and delete the logs that it replaces."""
    initial_state.install(job_shards.admin, inputs.beginning)
    if inputs.logs is not None and job.runtime.durability.keeps_log:
        drop_logs(inputs.logs, but=job_shards.cluster.job)  # its logs now hold the resumed state


def task_of(
    inputs: JobInputs,
    job: Job,
    cluster: Cluster,
    source: Source | StoredTable | None = None,
) -> TaskSpec:
    """The specification of every worker's task."""
    snapshot = inputs.snapshot if job.saves_worker_states else None
    return TaskSpec(
        cluster=cluster.for_workers(),
        plan=job.plan,
        batch_size=job.batch_size,
        columns=job.columns,
        source=source,
        parts=job.workers,
        shuffle=job.shuffle,
        skip_images=job.skip_images,
        first_incarnation=initial_state.first_incarnation(inputs.beginning),
        link=job.links.build_link(),
        transport=job.links.transport,
        compression=job.compression,
        device=job.device,
        patience_s=max(PATIENCE_S, _patience_s(job, inputs.tables)),
        keep=_make_absolute(inputs.snapshots) if job.saves_worker_states else None,
        resumed=snapshot.store.address if snapshot is not None else None,
        function=job.function,
    )


def _too_few_slots(job: Job, slots: int | None) -> str:
    """The notice where Spark cannot run all workers of a strategy in rounds at once; or empty."""
    strategy = job.plan.strategy
    if not strategy.synchronous or slots is None or job.workers <= slots:
        return ""
    return (
        f"strategy {strategy.name}: expected a task slot of Spark for each of the {job.workers}"
        f" workers of a round, got {slots}: a round is the mean of at most {slots} pushes, and the"
        " other workers train after these"
    )


def check_frame(label: str, df: object) -> None:
    """Raise BadInput for anything but a Spark DataFrame of a session that runs."""
    if isinstance(df, spark.DataFrame | spark.NumberedTasks):
        spark.check_running(label, df)
        return
    expected = "a Spark DataFrame"
    if type(df).__module__.startswith("pandas"):
        expected += " (spark.createDataFrame makes one)"
    raise argument_checks.wrong(label, expected, df)


def _snapshotter(
    job: Job,
    cluster: Cluster,
    catalog: SnapshotCatalog | None,
    begins_at: int,
    notify: Callable[[str], None],
) -> AbstractContextManager[SnapshotScheduler | None]:
    if catalog is None:
        return nullcontext()
    every, every_s = job.snapshots.interval()
    return SnapshotScheduler(
        cluster,
        catalog,
        rules=job.rule_names,
        workers=job.workers,
        every=every,
        every_s=every_s,
        begins_at=begins_at,
        aligned=job.snapshots.snapshot_aligned,
        worker_states=job.saves_worker_states,
        report=notify,
    )


def _evaluator(
    plan: EvaluationPlan | None,
    job: Job,
    cluster: Cluster,
    begins_at: int,
    observer: Observer | None,
    notify: Callable[[str], None],
) -> AbstractContextManager[BackgroundEvaluator | None]:
    if plan is None:
        return nullcontext()

    log = logger(__name__, job=cluster.job)

    def report_result(result: Evaluation, weights: NDArray[np.float32]) -> None:
        log.info("%s", result)
        if observer is not None:
            observer.evaluated(result, weights)

    return BackgroundEvaluator(
        plan,
        cluster,
        begins_at=begins_at,
        last=job.plan.steps,
        on_result=report_result,
        notify=notify,
    )


def _starting(job: Job, peer: str | None) -> Start:
    """A function that starts shards for this job, with addresses that reach the host `peer`."""
    runtime = job.runtime
    return lambda specs, ports, logs: start_shards(
        runtime.shards_in,
        LaunchPlan(
            specs=specs,
            host=runtime.bind,
            port=runtime.port + ports if runtime.port else 0,
            advertise=runtime.shift_advertised(ports),
            peer=peer,
            coordinator_port=0 if ports else runtime.coordinator_port,
            copy_ports=runtime.copy_ports,
            transport=job.links.transport,
            device=runtime.shard_device,
            secure=False if runtime.plaintext else None,
            durability=runtime.durability,
            silence_s=runtime.silence_s,
            rollback_s=runtime.autosave_s,
            logs=logs,
            logs_apart=job.logs_apart,
        ),
    )


def _patience_s(job: Job, tables: Sequence[TableSpec]) -> float:
    """The seconds to wait for a silent shard.

    A shard that keeps a log needs time to recover; `recovery_s` assumes a single shard with all
    tables, to which the job may have been resharded by then. A replicated shard needs time for
    its other copy to take over.
    """
    runtime = job.runtime
    if runtime.durability is Durability.REPLICATED:
        return _ANSWER_S + runtime.silence_s
    if runtime.autosave_s:
        return _BACK_S
    if not runtime.durability.keeps_log:
        return _ANSWER_S
    return recovery_s(Layout.of(spec.table for spec in tables).size, [one.rule for one in tables])


def _make_absolute(path: str | Path | None) -> str | None:
    """An absolute path, valid in any process of this machine; a URI is returned unchanged."""
    if path is None or "://" in str(path):
        return None if path is None else str(path)
    return str(Path(path).absolute())
