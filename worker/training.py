"""A training job, from fresh shards to final weights: what `worker.train` and the command line run.

The caller brings a Spark DataFrame and, for shards in Ray, a process that is connected to it; this
starts the shards, sends one Spark job whose tasks are the workers, watches both, takes snapshots,
and brings the weights home. A job that is interrupted, or whose workers fail for good, leaves a
snapshot of what was learned until then.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from threading import Event
from typing import Protocol

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ps import Cluster, ShardState, paths, shard_specs
from ps.durability import Durability
from ps.hosts.hosting import recovery_s, start_shards
from ps.logs.job_logs import drop_logs
from ps.protocol.events import Unreachable
from ps.snapshotter import Snapshotter
from ps.storage.shelf import Found, Shelf
from shards import arguments
from shards.errors import DownpourError
from shards.messages import ShardStatus
from shards.tables import DenseTable
from worker import resuming, spark
from worker.display import LossLine
from worker.evaluation import BackgroundEvaluator, Evaluation, EvaluationPlan
from worker.frames import dealt
from worker.interrupts import noted
from worker.job import Job
from worker.model import build_model
from worker.placement import check, check_here
from worker.replica import Report
from worker.residence import Residence, Start, Wish
from worker.task import PATIENCE_S, REPORT, TaskSpec, decode_reports, run_task

_LOG = logging.getLogger(__name__)

_LOOK_S = 0.5
_ANSWER_S = 10.0
_BACK_S = 30.0  # for a shard to be there again, with what it saved last
_CANCELS, _CANCEL_S = 15, 1.0
_RESIDUALS_S = 5.0  # that workers who are about to be cancelled are given

_log = logging.getLogger("downpour.worker")


class Observer(Protocol):
    """Who wants to see a job while it runs; called from the thread that called `run_job`."""

    def started(self, cluster: Cluster, restored: list[int] | None) -> None:
        """The shards hold their weights; `restored` are their versions in what is resumed."""
        ...

    def progressed(self, statuses: list[ShardStatus], records: list[NDArray[np.void]]) -> None:
        """Counters as they are now, and the records since the last call, one array a shard."""
        ...

    def evaluated(self, result: Evaluation) -> None:
        """What a test of the weights found while the job trains."""
        ...

    def moved(self, cluster: Cluster) -> None:
        """The job has moved to these shards; what is reported from now on is theirs."""
        ...

    def told(self, text: str) -> None:
        """Something that an operator should read, such as a snapshot that failed."""
        ...


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a job leaves: final weights as a flat arena, and what is known of how it went.

    `left` are the last statuses of shards that it has moved away from. `snapshot` is that of these
    weights; None if none was wanted or it could not be written, whatever earlier ones there are.
    `evaluations` are the results of the tests during training. `notices` are what an operator
    should read, as the observer got it: among them why a snapshot is missing, and what the death of
    a shard has cost.
    """

    cluster: Cluster
    weights: NDArray[np.float32]
    statuses: list[ShardStatus]
    left: list[ShardStatus]
    reports: list[Report]
    snapshot: str | None
    seconds: float
    interrupted: bool
    evaluations: list[Evaluation] = []
    notices: tuple[str, ...] = ()


def run_job(
    df: spark.DataFrame,
    job: Job,
    *,
    weights: NDArray[np.float32] | None = None,
    resume: str | Path | Found | None = None,
    snapshots: str | Path | None = None,
    asked: Event | None = None,
    wishes: Callable[[], Wish | None] = lambda: None,
    logs: str | Path | None = None,
    evaluation: EvaluationPlan | None = None,
    observer: Observer | None = None,
    even: bool = False,
) -> Outcome:
    """Train on `df` as `job` says; blocks until every worker is done.

    Each partition of `df` that has rows is one worker's, if there are as many as `job.workers`; if
    not, the rows are dealt evenly to so many. With `even` they are dealt as well where one
    partition has more than twice the rows of another. A small Spark job counts them first.

    Starts from `weights` (a flat arena; default: the model's own from the seed), or goes on from
    the snapshot `resume`, by its path or URI, or as it was read; a job's own folder below `logs` is
    as good. Snapshots go into folders below `snapshots`, a path or URI, named by iteration; setting
    `asked` asks for one now. `wishes` is asked now and then whether the job is to move to more or
    fewer shards. Where its durability asks for logs, they lie below `logs`, in folders named after
    the job, until it has ended with a snapshot of its last weights, or by itself where no such
    snapshot is wanted; what an earlier job left there must not tell more than what is resumed. The
    weights are tested while the job trains as `evaluation` says (worker/evaluation.py). Ctrl-C ends
    the job early, with a snapshot and `interrupted` set; a second one raises KeyboardInterrupt,
    without. Call it from the main thread, in a process connected to Ray if the shards are to live
    there. Without an `observer`, notices are warnings of the logger downpour.worker.
    Raises BadInput for what the caller can mend, GiveUp when a worker or a shard fails for good,
    and what the `observer` raises; whatever ends the job while its shards live leaves a snapshot.
    """
    check_frame("df", df)
    job = arguments.instance("job", job, Job, "a worker.job.Job")
    arguments.function("wishes", wishes, "a function without arguments")
    arguments.flag("even", even)
    if asked is not None:
        asked = arguments.instance("asked", asked, Event, "a threading.Event")
    if not isinstance(resume, Found | None):
        resume = paths.place("resume", resume)
    if snapshots is not None:
        snapshots = paths.place("snapshots", snapshots)
    logs = None if logs is None else paths.path("logs", logs)
    model = build_model(job.model)
    if weights is not None:
        weights = arguments.array("weights", weights, model.table.size)
    job.plan.strategy.check(job.bound, job.plan.prefetch)
    check(model, job.device)
    if spark.runs_here(df):
        check_here(job.device)
    if job.guarded:
        spark.check_guarded(df)
    found = resuming.read(resume)
    beginning = resuming.beginning(model, job, weights, found)
    if logs is not None:
        resuming.check_logs(logs, found)
    shelf = Shelf(snapshots, job.keep) if snapshots is not None else None
    if shelf is not None:
        shelf.check_writable()
    specs = shard_specs(
        model.table,
        shards=job.shards,
        rule=job.rule,
        schedule=job.schedule,
        decay=job.decay,
        bound=job.bound,
        workers=job.workers,
        merge=job.plan.strategy.merge,
        lease_s=job.lease_s,
        warm_steps=job.plan.strategy.warm_up,
        compression=job.compression,
    )
    told = _Notices(observer)
    df = dealt(df, job.workers, even=even)
    patience_s = _patience_s(job, model.table)
    with Residence(specs, _starting(job), logs=logs, patience_s=patience_s, told=told) as residence:
        cluster = residence.cluster
        resuming.install(residence.console, beginning)
        if logs is not None and job.durability.keeps_log:
            drop_logs(logs, but=cluster.job)  # what was resumed is in this job's logs now
        if observer is not None:
            observer.started(cluster, resuming.versions(beginning))
        task = TaskSpec(
            cluster=cluster.for_workers(),
            plan=job.plan,
            batch_size=job.batch_size,
            shape=job.shape,
            shuffle=job.shuffle,
            first_incarnation=resuming.first_incarnation(beginning),
            link=job.link,
            transport=job.transport,
            compression=job.compression,
            device=job.device,
            patience_s=max(PATIENCE_S, patience_s),
            keep=_seen_by_workers(snapshots) if job.keeps_residuals else None,
            residuals=found.store.address if found and job.keeps_residuals else None,
        )
        begins_at = found.manifest.steps // job.workers if found else 0
        with (
            _snapshotter(job, cluster, shelf, begins_at, told) as snapshotter,
            _evaluator(evaluation, job, cluster, begins_at, observer, told) as evaluator,
        ):
            if evaluator is not None and isinstance(beginning, np.ndarray):
                evaluator.begin(beginning)
            run = _Run(
                df, job, task, residence, snapshotter, evaluator, asked, wishes, observer, told
            )
            outcome = run.run()
        # A job that has ended by itself, without a last snapshot by wish, is all in its outcome.
        unsaved = shelf is None or not job.snapshot_at_end
        held = outcome.snapshot is not None or (unsaved and not outcome.interrupted)
        if held:
            residence.forget_logs()
    if logs is not None and held:
        drop_logs(logs)
    return outcome


def check_frame(what: str, df: object) -> None:
    """Raise BadInput for anything but a Spark DataFrame."""
    if isinstance(df, spark.DataFrame):
        return
    expected = "a Spark DataFrame"
    if type(df).__module__.startswith("pandas"):
        expected += " (spark.createDataFrame makes one)"
    raise arguments.wrong(what, expected, df)


class _Notices:
    """Keeps what an operator should read, and passes it to the observer, or else to the log."""

    def __init__(self, observer: Observer | None) -> None:
        self._observer = observer
        self.texts: list[str] = []

    def __call__(self, text: str) -> None:
        self.texts.append(text)
        if self._observer is not None:
            self._observer.told(text)
        else:
            _log.warning("%s", text)


class _Run:
    """One job under way."""

    def __init__(
        self,
        df: spark.DataFrame,
        job: Job,
        task: TaskSpec,
        residence: Residence,
        snapshotter: Snapshotter | None,
        evaluator: BackgroundEvaluator | None,
        asked: Event | None,
        wishes: Callable[[], Wish | None],
        observer: Observer | None,
        told: _Notices,
    ) -> None:
        self.df = df
        self.job = job
        self.task = task
        self.residence = residence
        self.snapshotter = snapshotter
        self.evaluator = evaluator
        self.asked = asked or Event()
        self.wishes = wishes
        self.observer = observer
        self.told = told
        self._last: list[ShardState] | None = None
        self._left: list[ShardStatus] = []
        self._snapshot: str | None = None  # of what the job ended with
        self._wish: Wish | None = None
        self._loss_line = LossLine(job.display, job.average_loss, job.workers)
        self._tag = f"downpour-{secrets.token_hex(8)}"

    def run(self) -> Outcome:
        started = time.monotonic()
        with noted() as pressed:
            reports = self._train(pressed)
            self._follow(waits=True)
            states = self._last or self.residence.console.export()
            if self._last is None and self.job.snapshot_at_end:
                self._save(states)
            if self.evaluator is not None:
                self.evaluator.finish(pressed.is_set)
            interrupted = pressed.is_set()
            if self._last is None and interrupted and not self.job.snapshot_at_end:
                self._save(states)
            # Whoever looks on may fail, but only once what was learned is safe.
            statuses = self._look()
            self.residence.tell_losses()
            wants_last = self.job.snapshot_at_end or interrupted
            self._tell_of(reports, wants_last, interrupted=interrupted)
            return Outcome(
                cluster=self.residence.cluster,
                weights=_assemble(self.residence.cluster, states),
                statuses=statuses,
                left=self._left,
                reports=reports,
                snapshot=self._snapshot,
                seconds=time.monotonic() - started,
                interrupted=interrupted,
                evaluations=self.evaluator.results if self.evaluator is not None else [],
                notices=tuple(self.told.texts),
            )

    def _train(self, pressed: Event) -> list[Report]:
        """Run the Spark job in a thread of its own, and watch it; no reports if it is cancelled."""
        pool = ThreadPoolExecutor(1, "spark-job")
        future = pool.submit(self._spark_job)
        pool.shutdown(wait=False)  # A job that cannot be cancelled is not waited for.
        try:
            self._watch(future, pressed)
            if future.done():
                return future.result()
            self._save_with_residuals()
            self._cancel(future)
            return []
        except DownpourError as error:
            self._cancel(future)
            if pressed.is_set():  # a terminal sends it to Spark's processes, too
                return []
            if places := self._end_with_snapshot():
                raise _with_more(error, places) from None
            raise
        except Exception as error:
            self._cancel(future)
            self.observer = None  # Its error, most likely: it would raise the next one.
            if places := self._end_with_snapshot():
                error.add_note(places)
            raise
        except BaseException:  # a second Ctrl-C: whoever presses it does not wait
            spark.interrupt(self.df, self._tag)
            raise

    def _spark_job(self) -> list[Report]:
        task, model = self.task, self.job.model

        def host(
            rows: Iterator[pa.RecordBatch], partition: int, attempt: int, gpus: Sequence[str]
        ) -> Iterator[pa.RecordBatch]:
            return run_task(rows, task, model, partition, attempt, gpus)

        return decode_reports(spark.run_tasks(self.df, host, REPORT, self._tag))

    def _watch(self, future: "Future[list[Report]]", pressed: Event) -> None:
        while not wait([future], _LOOK_S).done and not pressed.is_set():
            statuses = self._checked()
            if (failure := spark.final_failure(self.df, self._tag)) is not None:
                raise failure
            self._follow()
            self._test(statuses[0])
            if not self._busy_with_a_wish() and self.snapshotter is not None:
                asked = self.asked.is_set()
                self.asked.clear()
                self.snapshotter.look(statuses[0].steps // self.job.workers, asked=asked)

    def _test(self, status: ShardStatus) -> None:
        """Have the weights tested if that is due; not while the job moves."""
        if self.evaluator is not None and not self.residence.moving:
            self.evaluator.look(status.steps // self.job.workers, status.samples)

    def _busy_with_a_wish(self) -> bool:
        """Whether the job moves or is about to: then no snapshot is begun, and one is awaited."""
        if self.residence.moving:
            return True
        self._wish = self._wish or self.wishes()
        if self._wish is None:
            return False
        if self.snapshotter is None or self.snapshotter.idle:
            wish, self._wish = self._wish, None
            self.residence.begin(wish)
        return True

    def _follow(self, *, waits: bool = False) -> None:
        """Go over to where the job has moved, if it has."""
        moved = self.residence.ended(waits=waits)
        if moved is None:
            return
        with suppress(DownpourError):  # one that has died cannot say what it applied last
            self._left += self._look()
        self.residence.enter(moved)
        if self.snapshotter is not None:
            self.snapshotter.follow(self.residence.cluster)
        if self.evaluator is not None:
            self.evaluator.follow(self.residence.cluster)
        if self.observer is not None:
            self.observer.moved(self.residence.cluster)
        self.residence.entered()
        if moved.untold is not None:
            raise moved.untold

    def _checked(self) -> list[ShardStatus]:
        """How the shards stand; raises what one has died of rather than that it is silent."""
        self.residence.check()
        try:
            return self._look()
        except Unreachable:
            self.residence.check()
            raise

    def _look(self) -> list[ShardStatus]:
        console = self.residence.console
        statuses, records = console.status(), console.records()
        if self.observer is not None:
            self.observer.progressed(statuses, records)
        if (line := self._loss_line.line(statuses, records)) is not None:
            _LOG.info(line)
        return statuses

    def _cancel(self, future: "Future[list[Report]]") -> None:
        """End the Spark job: again and again, as one that Spark has not begun yet hears nothing."""
        for _ in range(_CANCELS):
            spark.interrupt(self.df, self._tag)
            if wait([future], _CANCEL_S).done:
                return

    def _save_with_residuals(self) -> None:
        """End with what is now, if workers that are about to be cancelled must be asked for it."""
        if self.snapshotter is not None and self.job.keeps_residuals:
            self._last = self.residence.console.export()
            self._save(self._last, _RESIDUALS_S)

    def _save(self, states: Sequence[ShardState], patience_s: float = 0.0) -> None:
        if self.snapshotter is not None:
            self._snapshot = self.snapshotter.save(states, patience_s)

    def _end_with_snapshot(self) -> str:
        """What to go on from after an error, in words: a new snapshot if the shards live."""
        try:
            self._follow(waits=True)
            self.residence.check()
            self._save(self.residence.console.export())
        except DownpourError:
            pass  # The shards are what failed: the last snapshot is the one to name.
        latest = self.snapshotter.latest if self.snapshotter is not None else None
        places = [*([latest] if latest is not None else []), *self._logs()]
        return f"resume from {' or '.join(places)}" if places else ""

    def _tell_of(self, reports: Sequence[Report], wants_last: bool, *, interrupted: bool) -> None:
        """Report what the workers have lost, and what is left where there is no last snapshot."""
        for report in reports:
            if report.lost:
                self.told(report.lost)
        if len(reports) < self.job.workers and not interrupted:
            # The data was counted, but a query may give other rows each time.
            self.told(
                f"{len(reports)} of {self.job.workers} workers had rows to train on: the schedule"
                " has run more slowly than for all"
            )
        if self._snapshot is None and self.snapshotter is not None and wants_last:
            for logs in self._logs():
                self.told(f"{logs} stay: they hold what the last snapshot was to")

    def _logs(self) -> list[str]:
        """Where the job's logs are, in words, if it keeps any."""
        where = " on the shards' nodes" if self.job.logs_apart else ""
        logs = f"the logs in {self.residence.logs}{where}"
        return [logs] if self.job.durability.keeps_log else []


def _with_more(error: DownpourError, places: str) -> DownpourError:
    """The error with what to resume from; its notes, such as a traceback, are kept."""
    more = type(error)(f"{error}; {places}")
    for note in getattr(error, "__notes__", ()):
        more.add_note(note)
    return more


def _snapshotter(
    job: Job,
    cluster: Cluster,
    shelf: Shelf | None,
    begins_at: int,
    told: Callable[[str], None],
) -> AbstractContextManager[Snapshotter | None]:
    if shelf is None:
        return nullcontext()
    return Snapshotter(
        cluster,
        shelf,
        rule=job.rule_name,
        workers=job.workers,
        every=job.snapshot_every,
        every_s=job.snapshot_every_s,
        begins_at=begins_at,
        aligned=job.snapshot_aligned,
        residuals=job.keeps_residuals,
        told=told,
    )


def _evaluator(
    plan: EvaluationPlan | None,
    job: Job,
    cluster: Cluster,
    begins_at: int,
    observer: Observer | None,
    told: Callable[[str], None],
) -> AbstractContextManager[BackgroundEvaluator | None]:
    if plan is None:
        return nullcontext()

    def found(result: Evaluation) -> None:
        _LOG.info(str(result))
        if observer is not None:
            observer.evaluated(result)

    return BackgroundEvaluator(
        plan, cluster, begins_at=begins_at, last=job.plan.steps, found=found, told=told
    )


def _starting(job: Job) -> Start:
    """How shards of this job are started."""
    return lambda specs, ports, logs: start_shards(
        job.shards_in,
        specs,
        host=job.bind,
        port=job.port + ports if job.port else 0,
        transport=job.transport,
        device=job.shard_device,
        secure=False if job.plaintext else None,
        durability=job.durability,
        silence_s=job.silence_s,
        rollback_s=_rollback_s(job),
        logs=logs,
        logs_apart=job.logs_apart,
    )


def _rollback_s(job: Job) -> float:
    return job.rollback_s if job.durability is Durability.MEMORY else 0.0


def _patience_s(job: Job, table: DenseTable) -> float:
    """How long a silent shard is waited for: one that keeps a log comes back, even if the job has
    moved to a single one by then; one of two copies is taken over from."""
    if job.durability is Durability.REPLICATED:
        return _ANSWER_S + job.silence_s
    if _rollback_s(job):
        return _BACK_S
    return recovery_s(table.size, job.rule) if job.durability.keeps_log else _ANSWER_S


def _seen_by_workers(place: str | Path | None) -> str | None:
    """A path as any process of this machine finds it; a URI is the same everywhere."""
    if place is None or "://" in str(place):
        return None if place is None else str(place)
    return str(Path(place).absolute())


def _assemble(cluster: Cluster, states: Sequence[ShardState]) -> NDArray[np.float32]:
    arena = cluster.table.empty()
    cluster.map.join([state.weights for state in states], arena)
    return arena
