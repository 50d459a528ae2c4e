"""The state of one training job while it runs: watches its Spark job, its shards and its orders.

Spark hosts the workers in a thread of its own. The thread that called `run_job` looks twice a
second at the shards, passes what it sees to the observer, has snapshots and tests begun that are
due, and carries out the orders of an operator (worker/job/run_control.py), one after another.
"""

import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from threading import Event

import pyarrow as pa

from ps import ShardState
from ps.admin_client import UNCHANGED
from ps.logs import logger
from ps.process_owner import Opener
from ps.session.events import Unreachable
from ps.snapshot_scheduler import SnapshotScheduler
from shards.errors import BadInput, DownpourError
from shards.messages import LiveSettings
from shards.repartition import whole_weights
from shards.shard_status import ShardStatus, Standing
from worker import spark
from worker.job.outcome import Notices, Observer, Outcome
from worker.job.run_control import (
    PendingOrder,
    ReshardOrder,
    RunControl,
    SettingsOrder,
    SnapshotOrder,
)
from worker.job.shards import JobShards
from worker.job.stored_rows import StoredRows
from worker.job.training_job import Job
from worker.spark.signals import record_interrupt
from worker.spark.worker_task import REPORT, TaskSpec, decode_reports, run_task
from worker.training.context import STOP
from worker.training.evaluation import BackgroundEvaluator
from worker.training.loss_line import LossLine
from worker.training.training_loop import WorkerReport

_POLL_S = 0.5
_CANCELS, _CANCEL_S = 15, 1.0
_HELD_S = 300.0  # longer than what follows takes
_STATES_S = 5.0  # for workers to write their own state before they are cancelled


class RunningJob:
    """The state of one running job."""

    def __init__(
        self,
        df: spark.TaskInput,
        job: Job,
        task: TaskSpec,
        job_shards: JobShards,
        snapshotter: SnapshotScheduler | None,
        evaluator: BackgroundEvaluator | None,
        control: RunControl,
        observer: Observer | None,
        notify: Notices,
    ) -> None:
        self.df = df
        self.job = job
        self.task = task
        self.job_shards = job_shards
        self.snapshotter = snapshotter
        self.evaluator = evaluator
        self.control = control
        self.observer = observer
        self.notify = notify
        self._former_statuses: list[ShardStatus] = []
        self._snapshot: str | None = None  # of the final weights
        self._stopped = False  # whether a worker's function or the observer has ended the run
        self._reshard: tuple[int, PendingOrder] | None = None  # waits until it may begin
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
            states = self.job_shards.admin.export()
            if self.job.snapshot_at_end:
                self._save(states)
            if self.evaluator is not None:
                self.evaluator.finish(pressed.is_set)
            interrupted = pressed.is_set()
            if interrupted and not self.job.snapshot_at_end:
                self._save(states)
            # The observer may raise, so it is called only after the weights are saved.
            statuses = self._look()
            self.job_shards.report_losses()
            wants_last = self.job.snapshot_at_end or interrupted
            early = interrupted or self._target_reached or self._stopped
            self._report_workers(reports, wants_last, early=early)
            cluster = self.job_shards.cluster
            return Outcome(
                cluster=cluster,
                weights=whole_weights(states, cluster.layout, cluster.map),
                rows=StoredRows(states, cluster.layout, cluster.map),
                statuses=statuses,
                former_statuses=self._former_statuses,
                reports=reports,
                snapshot=self._snapshot,
                seconds=time.monotonic() - started,
                interrupted=pressed.is_set(),  # also while the end was being reported
                evaluations=self.evaluator.results if self.evaluator is not None else [],
                notices=tuple(self.notify.texts),
                tests_cpu_s=self.evaluator.cpu_s if self.evaluator is not None else 0.0,
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
            self._hold_pushes()
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
        executors = spark.ExecutorWatch(self.df)
        while not wait([future], _POLL_S).done and not pressed.is_set():
            statuses = self._check_shards()
            if (failure := spark.final_failure(self.df, self._tag)) is not None:
                raise failure
            executors.check(time.monotonic())
            self._follow()
            self._test(statuses[0])
            self._stopped |= stop_requested(statuses[0], self.task.first_incarnation)
            if self._target_reached or self._stopped:
                return
            if not self._reshard_pending() and self.snapshotter is not None:
                self.snapshotter.snapshot_if_due(statuses[0].steps // self.job.workers)

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

        An order to reshard waits for the snapshot under way, and for those ordered before it.
        """
        if self.job_shards.moving:
            return True
        self._take_orders()
        if self._reshard is None:
            return False
        if self.snapshotter is not None and self.snapshotter.is_requested:
            return False
        if self.snapshotter is None or self.snapshotter.idle:
            reshard, self._reshard = self._reshard, None
            self.job_shards.begin(*reshard)
        return True

    def _take_orders(self) -> None:
        """Carry out the orders that have come, up to one to reshard, which is kept."""
        while self._reshard is None and (pending := self.control.take()) is not None:
            match pending.order:
                case SnapshotOrder():
                    self._request_snapshot(pending)
                case SettingsOrder() as order:
                    self._change_settings(order, pending)
                case ReshardOrder(shards=shards):
                    self._reshard = shards, pending

    def _request_snapshot(self, pending: PendingOrder) -> None:
        if self.snapshotter is None:
            expected = "a run with a folder for snapshots"
            pending.answer(BadInput("snapshot", expected=expected, got="one without"))
        else:
            self.snapshotter.request(pending.answer)

    def _change_settings(self, order: SettingsOrder, pending: PendingOrder) -> None:
        plan, admin = self.job.plan, self.job_shards.admin
        try:
            change = order.check()
            if change.sets_bound:
                plan.strategy.check(change.bound, plan.prefetch)
            bound = change.bound if change.sets_bound else UNCHANGED
            self._note_settings(admin.set(staleness=bound, rate_factor=change.rate_factor))
        except DownpourError as error:
            pending.answer(error)
        else:
            pending.answer(None, "the job trains on with these settings")

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

    def _hold_pushes(self) -> None:
        """Have the shards hold what is pushed from now on, until they end.

        The last snapshot then has every push that a worker was answered for, although workers push
        until they are cancelled. If the shards do not come together, it is taken without. Workers
        that keep states first write them and stop, because none writes while its push is held. A
        reshard under way ends first: only shards that stay can hold pushes.
        """
        with suppress(DownpourError):
            self._follow(waits=True)
        with suppress(DownpourError):
            if self.snapshotter is not None and self.job.saves_worker_states:
                trains = {
                    worker.worker: (worker.incarnation, worker.seq)
                    for worker in self.job_shards.admin.status()[0].workers
                    if worker.standing is Standing.ACTIVE and worker.worker != STOP
                }
                self.snapshotter.stop_workers(trains, _STATES_S)
            self.job_shards.admin.quiesce(_HELD_S)

    def _save(self, states: Sequence[ShardState]) -> None:
        if self.snapshotter is not None:
            self._snapshot = self.snapshotter.save(states)

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


def stop_requested(status: ShardStatus, first_incarnation: int) -> bool:
    """Return whether a worker of this job, not of one that it resumes, has stopped the run."""
    return any(
        worker.worker == STOP and worker.incarnation >= first_incarnation
        for worker in status.workers
    )
