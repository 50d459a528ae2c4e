"""A training job, from fresh shards to final weights: what `worker.train` and the command line run.

The caller provides a Spark DataFrame and, for shards in Ray, a process that is connected to Ray.
`run_job` starts the shards, submits one Spark job with the workers as its tasks, watches both,
takes snapshots, and returns the final weights. A job that is interrupted, or that loses a worker
for good, leaves a snapshot of its weights at that moment.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Event
from typing import Protocol

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ps import Cluster, ShardState
from ps.admin_client import UNCHANGED
from ps.durability import Durability
from ps.launch.launch_plan import LaunchPlan, recovery_s
from ps.launch.launcher import start_shards
from ps.logs import Logger, logger
from ps.process_owner import Opener
from ps.session.events import Unreachable
from ps.snapshot_scheduler import SnapshotScheduler
from ps.snapshots.catalog import LoadedSnapshot, SnapshotCatalog
from ps.wal.job_logs import drop_logs
from shards import argument_checks
from shards.errors import DownpourError
from shards.messages import LiveSettings
from shards.repartition import whole_weights
from shards.shard_status import ShardStatus
from shards.spec import ShardSpec, TableSpec
from worker import spark
from worker.data.source import Source
from worker.job import initial_state
from worker.job.inputs import JobInputs, prepare
from worker.job.shards import JobShards, ReshardRequest, SettingsRequest, Start
from worker.job.training_job import Job, apply_strategy
from worker.spark.dataframe_checks import check_columns, check_pythons, deal_rows
from worker.spark.signals import record_interrupt
from worker.spark.worker_task import PATIENCE_S, REPORT, TaskSpec, decode_reports, run_task
from worker.training.context import STOP
from worker.training.evaluation import BackgroundEvaluator, Evaluation, EvaluationPlan, in_words
from worker.training.loss_line import LossLine
from worker.training.training_loop import WorkerReport

_POLL_S = 0.5
_ANSWER_S = 10.0
_BACK_S = 30.0  # for a shard to restart from its last autosave
_CANCELS, _CANCEL_S = 15, 1.0
_STATES_S = 5.0  # for workers to write their own state before they are cancelled


class Observer(Protocol):
    """Receives a running job's events, in the thread that called `train` or `run`."""

    def started(self, cluster: Cluster, restored: list[int] | None) -> None:
        """The shards hold their weights; `restored` are their versions in a resumed snapshot."""
        ...

    def progressed(
        self, statuses: list[ShardStatus], records: list[NDArray[np.void]]
    ) -> bool | None:
        """The current counters, and the records since the last call, one array a shard.

        True ends the training.
        """
        ...

    def evaluated(self, result: Evaluation, weights: NDArray[np.float32]) -> None:
        """The result of a test of weights, an arena to keep, made while the job trains."""
        ...

    def resharded(self, cluster: Cluster) -> None:
        """The job has been resharded to `cluster`; later reports come from its shards."""
        ...

    def settings_changed(self, settings: LiveSettings) -> None:
        """An operator has changed settings of the job, which trains with these from now on."""
        ...

    def notice(self, text: str) -> None:
        """A message for the operator, such as a failed snapshot."""
        ...


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a job: the final weights as a flat float32 arena, and how the run went.

    `former_statuses` are the last statuses of the former shards of a resharded job. `snapshot` is
    that of the final weights; None if none was wanted or it could not be written, even if earlier
    snapshots exist. `evaluations` are the results of the tests during training. `notices` are the
    messages for the operator that the observer received, such as why a snapshot is missing and
    which updates the death of a shard has lost.
    """

    cluster: Cluster
    weights: NDArray[np.float32]
    statuses: list[ShardStatus]
    former_statuses: list[ShardStatus]
    reports: list[WorkerReport]
    snapshot: str | None
    seconds: float
    interrupted: bool
    evaluations: list[Evaluation] = []
    notices: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Outcome({in_a_line(self, self.evaluations)})"

    def last_evaluation(self, workers: int, figures: dict[str, float]) -> Evaluation:
        """The result of a test of the final weights, of a job with this many workers."""
        status = self.statuses[0]
        return Evaluation(status.steps // workers, status.samples, self.seconds, figures)


def in_a_line(outcome: Outcome, evaluations: Sequence[Evaluation]) -> str:
    """The steps of a job and its last test in a line, for a `repr`."""
    steps = outcome.statuses[0].steps if outcome.statuses else 0
    return ", ".join(
        [
            f"{steps:,} steps of all workers in {outcome.seconds:.1f} s",
            *([in_words(evaluations[-1].figures)] if evaluations else []),
            *(["interrupted"] if outcome.interrupted else []),
        ]
    )


def run_job(
    df: spark.DataFrame,
    job: Job,
    *,
    weights: NDArray[np.float32] | None = None,
    resume: str | Path | LoadedSnapshot | None = None,
    snapshots: str | Path | None = None,
    logs: str | Path | None = None,
    snapshot_requested: Event | None = None,
    next_request: Callable[[], ReshardRequest | SettingsRequest | None] = lambda: None,
    evaluation: EvaluationPlan | None = None,
    observer: Observer | None = None,
    even: bool = False,
    source: Source | None = None,
) -> Outcome:
    """Train on `df` as `job` says; blocks until every worker is done.

    If exactly `job.workers` partitions of `df` have rows, each of these is one worker's; otherwise
    the rows are dealt evenly to `job.workers` partitions. With `even`, the rows are also dealt
    where one partition has more than twice the rows of another. A small Spark job counts the rows
    first. With a `source` each task reads its own part of it, from files that every machine must
    have at the same path; `df` must then be `spark.number_partitions(session, job.workers)`, one
    row for each worker.

    The job starts from `weights` (a flat arena; default: the model's initial weights for the seed),
    or continues from the snapshot `resume`, given by its path or URI, or as it was read. A job's
    folder below `logs` serves as a snapshot, too. Snapshots go into folders below `snapshots`, a
    path or URI, named by iteration; setting `snapshot_requested` requests one now. `next_request`
    is polled for the next request to reshard the job, or to change its settings. If the durability
    needs logs, they are stored below `logs`, in folders named after the job. They are deleted when
    the job has written its final snapshot, or has completed and no final snapshot was requested.
    Logs of an earlier job there must not hold more updates than the snapshot that is resumed.
    `evaluation` says when and how the weights are tested while the job trains
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
    argument_checks.function("next_request", next_request, "a function without arguments")
    argument_checks.flag("even", even)
    if source is not None:
        expected = "a worker.Source"
        argument_checks.instance("source", source, Source, expected)  # type: ignore[type-abstract]
    if snapshot_requested is not None:
        argument_checks.instance(
            "snapshot_requested", snapshot_requested, Event, "a threading.Event"
        )
    job, changes = apply_strategy(job)
    inputs = prepare(df, job, weights, resume, snapshots, logs)
    specs = job.specs(inputs.tables)
    notify = _Notices(observer, logger("worker", job=specs[0].job))
    for change in changes:
        notify(change)
    if source is None:
        columns = check_columns(df, job.columns) if job.function is None else []
        df = deal_rows(df, job.workers, even=even, columns=columns)
    else:
        check_pythons(df)
    if line := _too_few_slots(job, spark.task_slots(df)):
        notify(line)
    with shards_of(specs, job, inputs, notify) as job_shards:
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
            outcome = _Run(
                df,
                job,
                task_of(inputs, job, cluster, source),
                job_shards,
                snapshotter,
                evaluator,
                snapshot_requested,
                next_request,
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
    specs: Sequence[ShardSpec], job: Job, inputs: JobInputs, notify: Callable[[str], None]
) -> Iterator[JobShards]:
    """The shards of a job that is `settled`, in their initial state; they end with the context."""
    with JobShards(
        specs,
        _starting(job),
        logs=inputs.logs,
        patience_s=_patience_s(job, inputs.tables),
        notify=notify,
    ) as job_shards:
        _install(inputs, job, job_shards)
        yield job_shards


def _install(inputs: JobInputs, job: Job, job_shards: JobShards) -> None:
    """Give the shards their initial state, and delete the logs that it replaces."""
    initial_state.install(job_shards.admin, inputs.beginning)
    if inputs.logs is not None and job.runtime.durability.keeps_log:
        drop_logs(inputs.logs, but=job_shards.cluster.job)  # its logs now hold the resumed state


def task_of(
    inputs: JobInputs, job: Job, cluster: Cluster, source: Source | None = None
) -> TaskSpec:
    """The specification of every worker's task."""
    snapshot = inputs.snapshot if job.keeps_own_state else None
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
        keep=_make_absolute(inputs.snapshots) if job.keeps_own_state else None,
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
    if isinstance(df, spark.DataFrame):
        spark.check_running(label, df)
        return
    expected = "a Spark DataFrame"
    if type(df).__module__.startswith("pandas"):
        expected += " (spark.createDataFrame makes one)"
    raise argument_checks.wrong(label, expected, df)


class _Notices:
    """Keeps the messages for the operator, and passes each to the observer, or else to the log."""

    def __init__(self, observer: Observer | None, log: Logger) -> None:
        self._observer = observer
        self._logger = log
        self.texts: list[str] = []

    def __call__(self, text: str) -> None:
        self.texts.append(text)
        if self._observer is not None:
            self._observer.notice(text)
        else:
            self._logger.warning("%s", text)


class _Run:
    """The state of one running job."""

    def __init__(
        self,
        df: spark.DataFrame,
        job: Job,
        task: TaskSpec,
        job_shards: JobShards,
        snapshotter: SnapshotScheduler | None,
        evaluator: BackgroundEvaluator | None,
        snapshot_requested: Event | None,
        next_request: Callable[[], ReshardRequest | SettingsRequest | None],
        observer: Observer | None,
        notify: _Notices,
    ) -> None:
        self.df = df
        self.job = job
        self.task = task
        self.job_shards = job_shards
        self.snapshotter = snapshotter
        self.evaluator = evaluator
        self.snapshot_requested = snapshot_requested or Event()
        self.next_request = next_request
        self.observer = observer
        self.notify = notify
        self._last: list[ShardState] | None = None
        self._former_statuses: list[ShardStatus] = []
        self._snapshot: str | None = None  # of the final weights
        self._stopped = False  # whether a worker's function or the observer has ended the run
        self._request: ReshardRequest | None = None
        self._settings: LiveSettings | None = None  # the newest that a shard trains with
        self._loss_line = LossLine(job.display, job.average_loss, job.workers)
        self._tag = f"downpour-{secrets.token_hex(8)}"
        self._opener = Opener()  # a callback may fork: the child's errors must end nothing
        self._logger = logger(__name__, job=task.cluster.job)
        self._troubles: dict[int, str] = {}  # what the shards' statuses have said last

    def run(self) -> Outcome:
        started = time.monotonic()
        with record_interrupt() as pressed:
            reports = self._train(pressed)
            self._follow(waits=True)
            states = self._last or self.job_shards.admin.export()
            if self._last is None and self.job.snapshot_at_end:
                self._save(states)
            if self.evaluator is not None:
                self.evaluator.finish(pressed.is_set)
            interrupted = pressed.is_set()
            if self._last is None and interrupted and not self.job.snapshot_at_end:
                self._save(states)
            # The observer may raise, so it is called only after the weights are saved.
            statuses = self._look()
            self.job_shards.report_losses()
            wants_last = self.job.snapshot_at_end or interrupted
            early = interrupted or self._target_reached or self._stopped
            self._report_workers(reports, wants_last, early=early)
            return Outcome(
                cluster=self.job_shards.cluster,
                weights=_assemble(self.job_shards.cluster, states),
                statuses=statuses,
                former_statuses=self._former_statuses,
                reports=reports,
                snapshot=self._snapshot,
                seconds=time.monotonic() - started,
                interrupted=pressed.is_set(),  # also while the end was being reported
                evaluations=self.evaluator.results if self.evaluator is not None else [],
                notices=tuple(self.notify.texts),
            )

    def _train(self, pressed: Event) -> list[WorkerReport]:
        """Run the Spark job in its own thread and watch it; no reports if it is cancelled."""
        pool = ThreadPoolExecutor(1, "spark-job")
        future = pool.submit(self._spark_job)
        pool.shutdown(wait=False)  # A job that cannot be cancelled is not waited for.
        try:
            self._watch(future, pressed)
            if future.done():
                return future.result()
            self._save_with_workers()
            self._cancel(future)
            return []
        except DownpourError as error:
            self._cancel(future)
            if pressed.is_set():  # a terminal sends Ctrl-C to Spark's processes, too
                return []
            if hint := self._end_with_snapshot():
                raise _with_more(error, hint) from None
            raise
        except Exception as error:
            self._cancel(future)
            self.observer = None  # It most likely raised this error, and would raise another.
            if hint := self._end_with_snapshot():
                error.add_note(hint)
            raise
        except BaseException:  # a second Ctrl-C: stop without waiting
            if self._opener.is_this_process:
                spark.interrupt(self.df, self._tag)
            raise

    def _spark_job(self) -> list[WorkerReport]:
        task, model = self.task, self.job.model

        def host(
            rows: Iterator[pa.RecordBatch], partition: int, attempt: int, gpus: Sequence[str]
        ) -> Iterator[pa.RecordBatch]:
            return run_task(rows, task, model, partition, attempt, gpus)

        job = task.cluster.job
        return decode_reports(spark.run_tasks(self.df, host, REPORT, self._tag, job))

    def _watch(self, future: "Future[list[WorkerReport]]", pressed: Event) -> None:
        while not wait([future], _POLL_S).done and not pressed.is_set():
            statuses = self._check_shards()
            if (failure := spark.final_failure(self.df, self._tag)) is not None:
                raise failure
            self._follow()
            self._test(statuses[0])
            self._stopped |= stop_requested(statuses[0], self.task.first_incarnation)
            if self._target_reached or self._stopped:
                return
            if not self._reshard_pending() and self.snapshotter is not None:
                requested = self.snapshot_requested.is_set()
                self.snapshot_requested.clear()
                iteration = statuses[0].steps // self.job.workers
                self.snapshotter.snapshot_if_due(iteration, requested=requested)

    @property
    def _target_reached(self) -> bool:
        """True if a test has reached the target, which ends the training."""
        return self.evaluator is not None and self.evaluator.has_reached_target

    def _test(self, status: ShardStatus) -> None:
        """Have the weights tested if that is due; not while the job reshards."""
        if self.evaluator is not None and not self.job_shards.moving:
            self.evaluator.evaluate_if_due(status.steps // self.job.workers, status.samples)

    def _reshard_pending(self) -> bool:
        """True if the job reshards or is about to, so that no snapshot may begin.

        A request waits until a snapshot under way has ended; then the reshard begins here.
        """
        if self.job_shards.moving:
            return True
        self._take_requests()
        if self._request is None:
            return False
        if self.snapshotter is None or self.snapshotter.idle:
            request, self._request = self._request, None
            self.job_shards.begin(request)
        return True

    def _take_requests(self) -> None:
        """Change the settings as requested, up to a request to reshard, which is kept."""
        while self._request is None and (request := self.next_request()) is not None:
            if isinstance(request, SettingsRequest):
                self._change_settings(request)
            else:
                self._request = request

    def _change_settings(self, request: SettingsRequest) -> None:
        plan, change, admin = self.job.plan, request.change, self.job_shards.admin
        try:
            if change.sets_bound:
                plan.strategy.check(change.bound, plan.prefetch)
            bound = change.bound if change.sets_bound else UNCHANGED
            self._note_settings(admin.set(staleness=bound, rate_factor=change.rate_factor))
        except DownpourError as error:
            request.answer(error)
        else:
            request.answer(None)

    def _note_settings(self, settings: LiveSettings) -> None:
        """Report settings that are newer than those known so far."""
        known, self._settings = self._settings, settings
        if self.observer is not None and settings.revision > (known.revision if known else 0):
            self.observer.settings_changed(settings)

    def _watch_settings(self, statuses: Sequence[ShardStatus]) -> None:
        """Report what an operator has changed, and give it to shards that lack it."""
        latest = max(
            (status.settings for status in statuses), key=lambda settings: settings.revision
        )
        if self._settings is None or latest.revision > self._settings.revision:
            self._note_settings(latest)
        newest = self._settings
        assert newest is not None
        if any(status.settings.revision < newest.revision for status in statuses):
            with suppress(DownpourError):  # the next look tries again
                self.job_shards.admin.spread(newest)

    def _follow(self, *, waits: bool = False) -> None:
        """Switch to the new shards if a reshard has ended."""
        moved = self.job_shards.collect_reshard(waits=waits)
        if moved is None:
            return
        with suppress(DownpourError):  # a former shard that has died has no last status
            self._former_statuses += self._look()
        self.job_shards.enter(moved)
        if self.snapshotter is not None:
            self.snapshotter.follow(self.job_shards.cluster)
        if self.evaluator is not None:
            self.evaluator.follow(self.job_shards.cluster)
        if self.observer is not None:
            self.observer.resharded(self.job_shards.cluster)
        self.job_shards.report_success()
        if moved.unconfirmed is not None:
            raise moved.unconfirmed

    def _check_shards(self) -> list[ShardStatus]:
        """The shards' status; raises the cause of a shard's death rather than its silence."""
        self.job_shards.check()
        try:
            return self._look()
        except Unreachable:
            self.job_shards.check()
            raise

    def _look(self) -> list[ShardStatus]:
        admin = self.job_shards.admin
        statuses, records = admin.status(), admin.records()
        if self.observer is not None:
            self._stopped |= bool(self.observer.progressed(statuses, records))
        if (line := self._loss_line.line(statuses, records)) is not None:
            self._logger.info("%s", line)
        for status in statuses:
            if status.trouble and status.trouble != self._troubles.get(status.shard):
                self.notify(f"shard {status.shard}: {status.trouble}; training continues")
            self._troubles[status.shard] = status.trouble
        if not self.job_shards.moving:
            self._watch_settings(statuses)
        return statuses

    def _cancel(self, future: "Future[list[WorkerReport]]") -> None:
        """Cancel the Spark job, repeatedly: Spark ignores a cancel before the job has begun."""
        for _ in range(_CANCELS if self._opener.is_this_process else 0):
            spark.interrupt(self.df, self._tag)
            if wait([future], _CANCEL_S).done:
                return

    def _save_with_workers(self) -> None:
        """Take the last snapshot before the workers are cancelled, if it needs their states."""
        if self.snapshotter is not None and self.job.keeps_own_state:
            self._last = self.job_shards.admin.export()
            self._save(self._last, _STATES_S)

    def _save(self, states: Sequence[ShardState], patience_s: float = 0.0) -> None:
        if self.snapshotter is not None:
            self._snapshot = self.snapshotter.save(states, patience_s)

    def _end_with_snapshot(self) -> str:
        """Where to resume from after an error, in words: a new snapshot if the shards are alive."""
        if not self._opener.is_this_process:
            return ""
        try:
            self._follow(waits=True)
            self.job_shards.check()
            self._save(self.job_shards.admin.export())
        except DownpourError:
            pass  # The shards themselves failed, so the last snapshot is the one to name.
        latest = self.snapshotter.latest if self.snapshotter is not None else None
        sources = [*([latest] if latest is not None else []), *self._logs()]
        return f"resume from {' or '.join(sources)}" if sources else ""

    def _report_workers(
        self, reports: Sequence[WorkerReport], wants_last: bool, *, early: bool
    ) -> None:
        """Report lost states, idle workers, and the logs that replace a missing snapshot."""
        for report in reports:
            if report.lost:
                self.notify(report.lost)
        if len(reports) < self.job.workers and not early:
            # The rows were counted, but a query may return different rows each time.
            self.notify(
                f"{len(reports)} of {self.job.workers} workers had rows to train on: the schedule"
                " advanced more slowly than with all"
            )
        if self._snapshot is None and self.snapshotter is not None and wants_last:
            for logs in self._logs():
                self.notify(f"{logs} are kept: they hold the updates since the last snapshot")

    def _logs(self) -> list[str]:
        """The folder of the job's logs, in words, as a list; empty if it keeps none."""
        where = " on the shards' nodes" if self.job.logs_apart else ""
        logs = f"the logs in {self.job_shards.logs}{where}"
        return [logs] if self.job.runtime.durability.keeps_log else []


def _with_more(error: DownpourError, hint: str) -> DownpourError:
    """The error with `hint` to resume from added; its notes, such as a traceback, are kept."""
    more = type(error)(f"{error}; {hint}")
    for note in getattr(error, "__notes__", ()):
        more.add_note(note)
    return more


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
        worker_states=job.keeps_own_state,
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


def _starting(job: Job) -> Start:
    """A function that starts shards for this job."""
    runtime = job.runtime
    return lambda specs, ports, logs: start_shards(
        runtime.shards_in,
        LaunchPlan(
            specs=specs,
            host=runtime.bind,
            port=runtime.port + ports if runtime.port else 0,
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
    return recovery_s(sum(spec.table.size for spec in tables), [one.rule for one in tables])


def _make_absolute(path: str | Path | None) -> str | None:
    """An absolute path, valid in any process of this machine; a URI is returned unchanged."""
    if path is None or "://" in str(path):
        return None if path is None else str(path)
    return str(Path(path).absolute())


def stop_requested(status: ShardStatus, first_incarnation: int) -> bool:
    """Return whether a worker of this job, not of one that it resumes, has stopped the run."""
    return any(
        worker.worker == STOP and worker.incarnation >= first_incarnation
        for worker in status.workers
    )


def _assemble(cluster: Cluster, states: Sequence[ShardState]) -> NDArray[np.float32]:
    return whole_weights(states, cluster.layout, cluster.map)
