"""One training run from settings to run folder: the work of `downpour train`.

All checks of the input come before anything is started. Ray and Spark are started one after the
other from the main thread, because a Ray that is started in a thread dies with that thread.
Everything that was started is stopped when the run ends, however it ends. With shards in processes
Ray is not even imported.
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np
import pyarrow as pa
from msgspec.structs import replace
from numpy.typing import NDArray

from deploy.disk_space import check_room
from deploy.evaluations import EvaluationsFile
from deploy.java import java_environment
from deploy.plots import plot_loss, plot_staleness
from deploy.progress import Progress
from deploy.reshard_requests import ReshardInbox
from deploy.run_folder import CAFFEMODEL, LOGS, SETTINGS, SUMMARY, WEIGHTS, RunFolder, writer_of
from deploy.service_probe import check_spark
from deploy.settings import TrainSettings
from deploy.snapshot_ref import SnapshotRef, newest, shelf_of
from deploy.summary import Summary, summarise
from deploy.updates import UpdatesWriter
from ps import Cluster
from ps.launch.launch_plan import place_of
from ps.launch.launcher import Placement
from ps.snapshots.catalog import LoadedSnapshot, SnapshotCatalog
from ps.snapshots.manifest import Manifest
from ps.snapshots.object_store import without_secrets
from ps.transport.addresses import check_listen, check_reachable
from ps.wal.catalog import is_job, newest_logs
from shards.errors import UNDECODABLE, BadInput, GiveUp
from shards.job_ids import short_id
from shards.messages import ShardStatus
from worker import spark, spark_settings
from worker.caffe.evaluator import Evaluator, classes_of, needs_test_net
from worker.caffe.job import caffe_job
from worker.caffe.model import CaffeModel
from worker.caffe.row_shape import rows_of
from worker.caffe.solver import read_solver
from worker.caffe.weights import write_caffemodel
from worker.device_selection import check_here
from worker.evaluation import Evaluation, EvaluationPlan
from worker.inference import starting_weights, write_safetensors
from worker.initial_state import check_fit
from worker.job import DEFAULT_SEED
from worker.job_runner import Outcome, run_job
from worker.job_shards import in_words
from worker.signals import SafeExitStack, asked_for, deferred, hangup_spares_children
from worker.sources import ImageSource, Split, has_test, open_source, part_to_test

_FLOAT_BYTES = 4


class Finished(Exception):
    """The run to resume has taken all its steps and written all its results."""


def run(settings: TrainSettings, *, origin: SnapshotRef | None = None) -> Summary | None:
    """Train with `settings` and write a run folder.

    Returns the summary, or None if Ctrl-C ended the run early. With an `origin`, the run continues
    from it. If `origin` names no snapshot, the run continues in its own folder from the newest
    snapshot, or from the logs of shards that were killed if those hold more steps; otherwise it
    starts in a new folder. SIGUSR1 requests a snapshot; reshard requests are read from the folder.

    Raises a DownpourError if anything goes wrong, after saving the progress in a snapshot if it
    can; KeyboardInterrupt if Ctrl-C left no snapshot; Finished if there is nothing left to do.
    """
    inputs = _Inputs(settings)
    shelf = shelf_of(settings, settings.out)
    in_place = origin is not None and origin.name is None and origin.run == settings.out
    if not in_place:
        _check_own(settings)
    found = _found(origin, inputs) if origin is not None else None
    open_folder = RunFolder.resume if in_place else RunFolder.create
    if found is not None and _is_over(inputs, found):
        if not in_place:
            raise BadInput(
                f"--resume {found.place}: expected a snapshot with steps left to take, got one that"
                f" has taken all {inputs.job.plan.steps}; give a larger --max-iter"
            )
        ended = _ended(settings.out, found)
        if ended is not None:
            return _complete(inputs, found, ended)
    _check_guarded(settings)
    _check_addresses(settings)
    _check_room(inputs, shelf)
    with (
        asked_for(signal.SIGUSR1) as asked,
        open_folder(settings.out, settings.plain()) as folder,
        SafeExitStack() as stack,
    ):
        progress = stack.enter_context(
            Progress(
                steps=inputs.job.plan.steps,
                workers=settings.workers,
                bound=settings.staleness,
                rows=inputs.train.rows,
                display=inputs.job.display,
                average_loss=inputs.job.average_loss,
            )
        )
        for notice in inputs.notices:
            progress.note(notice)
        if found is not None:
            for complaint in found.passed_over:
                progress.note(f"{complaint}; continuing from {found.place}")
        seed = inputs.job.plan.seed
        begins_at = found.manifest.steps // settings.workers if found is not None else None
        observer = _Observer(folder, progress, settings, seed=seed, begins_at=begins_at)
        stack.enter_context(observer)
        # Read the data before Ray and Spark start: only reading finds faults such as a NaN.
        table = pa.Table.from_batches(inputs.train.batches())
        with hangup_spares_children():
            session = _start(settings, progress, stack)
        progress.starting("the shards and workers")
        with deferred():
            df = session.createDataFrame(table)
        outcome = run_job(
            df,
            inputs.job,
            weights=None if found is not None else inputs.weights,
            resume=found,
            snapshots=shelf,
            asked=asked,
            wishes=ReshardInbox(folder.path),
            logs=settings.logs or folder.logs,
            evaluation=inputs.evaluation,
            observer=observer,
            even=True,
        )
        if not outcome.interrupted:
            progress.starting("the test")
        try:
            summary = _finish(inputs, outcome, folder, observer)
        except KeyboardInterrupt:  # During the test: everything but its figures is written.
            summary = None
        if summary is None and outcome.snapshot is None:
            raise KeyboardInterrupt  # The reason and what remains to resume from are reported.
        return summary


def _check_own(settings: TrainSettings) -> None:
    """Raise BadInput if --snapshots or --logs names a place with files of another job."""
    shelf, logs = settings.snapshots, settings.logs
    if (
        shelf is not None
        and "://" not in shelf
        and Path(shelf).exists()
        and not Path(shelf).is_dir()
    ):
        raise BadInput(f"--snapshots {shelf}: expected a folder, got a file")
    if shelf is not None and SnapshotCatalog(shelf).entries():
        raise BadInput(
            f"--snapshots {without_secrets(shelf)}: expected a place of this run's own, got one"
            " with snapshots; choose another place"
        )
    if logs is not None and logs.is_dir() and any(logs.iterdir()):
        raise BadInput(f"--logs {logs}: expected a folder of this run's own, got one with files")


def _found(origin: SnapshotRef, inputs: "_Inputs") -> LoadedSnapshot:
    """Load and check the state to continue from: a snapshot, or the shards' logs."""

    def check(place: str, manifest: Manifest) -> None:
        check_fit(place, manifest, inputs.model.table, inputs.job)

    shelf = origin.open()
    if origin.name is None:
        kept = _logs_left(origin.run, inputs.settings) if origin.run is not None else None
        return newest(shelf, newest_logs(kept) if kept is not None else None, check)
    found = shelf.load(origin.name)
    check(found.place, found.manifest)
    return found


def _logs_left(run: Path, settings: TrainSettings) -> Path:
    """The folder in which a resumed run has its earlier logs, if any, and keeps its new ones.

    Raises BadInput if the settings name another folder: the earlier logs would be ignored.
    """
    logs, left = settings.logs or run / LOGS, TrainSettings.load(run / SETTINGS).logs or run / LOGS
    if logs != left and any(is_job(job) for job in left.glob("*")):
        raise BadInput(
            f"--logs {logs}: expected the folder where the run has left its logs, {left}; or move"
            f" what that holds to {logs}"
        )
    return logs


class _Inputs:
    """The solver, data, weights and job of a run, all read and checked before anything starts."""

    def __init__(self, settings: TrainSettings) -> None:
        self.settings = settings
        rows = rows_of(read_solver(settings.solver).train)
        reads = partial(open_source, settings.data, "train", shape=rows.shape, image=rows.image)
        source = reads()
        if source.rows < settings.workers:
            raise BadInput(
                f"--workers: expected at most {source.rows}, as {settings.data} has {source.rows}"
                f" rows to train on and each worker needs one, got {settings.workers}"
            )
        self.solver = read_solver(settings.solver, source.shape)
        every, every_s = settings.build_interval()
        self.job = caffe_job(
            self.solver,
            strategy=settings.build_strategy(),
            workers=settings.workers,
            shards=settings.shards,
            bound=settings.staleness,
            seed=settings.seed,
            max_iter=settings.max_iter,
            prefetch=settings.prefetch,
            shuffle=settings.shuffle,
            lease_s=settings.lease_s,
            shards_in=settings.shards_in,
            shard_device=settings.shard_device,
            bind=settings.bind,
            port=settings.port,
            plaintext=settings.plaintext,
            link=settings.build_link(),
            transport=settings.transport,
            compression=settings.build_compression(),
            device=settings.build_device(self.solver.device),
            precision=settings.precision,
            durability=settings.durability,
            silence_s=settings.silence_s,
            rollback_s=settings.rollback_s,
            logs_apart=settings.logs is not None,
            snapshot_every=every,
            snapshot_every_s=every_s,
            snapshot_aligned=settings.snapshot_aligned,
            keep=settings.build_keep(),
        )
        if spark_settings.embedded_master(settings.spark, 1):
            check_here(self.job.device)
        if settings.ray is None:  # the shards will run on this machine
            place_of(settings.shard_device)
        self.model = CaffeModel(self.solver.train)
        # Open the data again, now with the range of labels, which only the net defines.
        self.classes = classes_of(self.model.net)
        self.train = reads(classes=self.classes)
        self.weights = starting_weights(self.model, self._files(), self.job.plan.seed)
        self.test = self._test()

    @property
    def evaluation(self) -> EvaluationPlan | None:
        """The tests during training that the solver asks for; None without data to test on."""
        if self.test is None or not self.solver.test_interval:
            return None
        return EvaluationPlan(
            self.test.sample, self.solver.test_interval, self.solver.test_initialization
        )

    @property
    def notices(self) -> list[str]:
        """One line for each setting of the solver that has no effect."""
        found = list(self.solver.notices)
        if self.solver.tests and self.solver.test_interval and self.test is None:
            found.append(
                f"{self.settings.solver}: test_interval has no effect: {self.settings.data} has no"
                " test part, and no --test-data was given"
            )
        return found

    def _test_source(self) -> ImageSource | None:
        """The data to test on: --test-data, else the test part of --data, if any."""
        if self.settings.test_data is not None:
            test = self.settings.test_data
            needs_test_net(self.solver, "--test-data", test)
            return self._opened(test, part_to_test(test))
        if not self.solver.tests or not has_test(self.settings.data):
            return None
        return self._opened(self.settings.data, "test")

    def _opened(self, data: Path, split: Split) -> ImageSource:
        rows = rows_of(self.solver.tests[0].net)
        return open_source(data, split, classes=self.classes, shape=rows.shape, image=rows.image)

    def _test(self) -> Evaluator | None:
        """The test nets with their data, or None. They run on one row now, to find faults early."""
        source = self._test_source()
        if source is None:
            return None
        test = Evaluator(self.solver, self.model, source.batches)
        start = self.weights if self.weights is not None else self.model.initial(1)
        try:
            test.check(start)
        except BadInput as error:
            raise BadInput(
                f"test on {self.settings.test_data or self.settings.data}: {error}"
            ) from None
        return test

    def _files(self) -> Sequence[str | Path]:
        """The files of starting weights: --weights, else those that the solver names."""
        return self.solver.weights if self.settings.weights is None else (self.settings.weights,)


class _Observer:
    """Records and displays what `run_job` reports; a context manager.

    `begins_at` is the iteration from which a resumed run continues.
    """

    def __init__(
        self,
        folder: RunFolder,
        progress: Progress,
        settings: TrainSettings,
        *,
        seed: int = DEFAULT_SEED,
        begins_at: int | None = None,
    ) -> None:
        self._folder = folder
        self._progress = progress
        self._settings = settings
        self._seed = seed
        self.evaluations = EvaluationsFile(folder.evaluations, upto=begins_at)
        self.updates: UpdatesWriter | None = None

    def started(self, cluster: Cluster, restored: list[int] | None) -> None:
        cluster.save(self._folder.cluster)
        self.updates = self._folder.open_updates(
            job=short_id(cluster.job), seed=self._seed, restored=restored
        )

    def progressed(self, statuses: list[ShardStatus], records: list[NDArray[np.void]]) -> None:
        assert self.updates is not None, "started comes first"
        with self._survives_loss():
            self.updates.write(records)
        # Before the first worker registers, keep displaying what is being started.
        if statuses[0].workers:
            self._progress.update(statuses, records)

    def evaluated(self, result: Evaluation) -> None:
        self._progress.evaluated(result)
        with self._survives_loss():
            self.evaluations.add(result)

    def moved(self, cluster: Cluster) -> None:
        assert self.updates is not None, "started comes first"
        self.updates.moved()
        settings = replace(self._settings, shards=cluster.map.shards)
        self._folder.resettle(settings.plain(), cluster)
        self._progress.note(f"moved to {in_words(cluster.map.shards)}")

    def told(self, text: str) -> None:
        self._progress.note(text)

    def close(self) -> None:
        if self.updates is not None:
            with self._survives_loss():
                self.updates.close()

    @contextmanager
    def _survives_loss(self) -> Iterator[None]:
        """Report a record that cannot be written, and continue: the training is worth more."""
        try:
            yield
        except GiveUp as error:
            self.told(f"{error}; the run continues without it")

    def __enter__(self) -> "_Observer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check_guarded(settings: TrainSettings) -> None:
    """Raise BadInput if the shards are guarded, but Ray or Spark would admit strangers."""
    if not settings.guarded:
        return
    if settings.ray is not None:
        from deploy.ray_cluster import check_token

        check_token(os.environ)
    if settings.spark is not None:
        spark_settings.check_connect(settings.spark)


def _check_addresses(settings: TrainSettings) -> None:
    """Raise BadInput if shards cannot use the host or a port, or Ray or Spark does not answer."""
    if (
        settings.shards_in is Placement.PROCESSES or settings.ray is None
    ):  # they listen on this machine
        ports = range(settings.port, settings.port + settings.shards) if settings.port else ()
        _of_option("--bind", lambda: check_listen(settings.bind, ()))
        _of_option("--port", lambda: check_listen(settings.bind, ports))
    if settings.ray is not None:
        from deploy.ray_cluster import check_address

        check_address(settings.ray)
    url = settings.spark
    if url is None or spark_settings.embedded_master(url, 1):
        return
    name, servers = (
        f"Spark at {spark_settings.shown(url)}",
        spark_settings.addresses(url, os.environ),
    )
    if servers:
        check_reachable(name, servers)
    if url.startswith("spark://"):
        check_spark(name, servers)


def _of_option(name: str, check: Callable[[], None]) -> None:
    """Run a check, and put the option in front of the text of its BadInput."""
    try:
        check()
    except BadInput as error:
        raise BadInput(f"{name}: {error}") from None


def _check_room(inputs: _Inputs, shelf: str) -> None:
    """Raise BadInput if a disk lacks room for the weights, in two formats, and a snapshot."""
    out = inputs.settings.out
    weights = inputs.model.table.size * _FLOAT_BYTES
    there = [out / name for name in (WEIGHTS, CAFFEMODEL)]
    needs = {out: 2 * weights - sum(path.stat().st_size for path in there if path.is_file())}
    if "://" not in shelf:
        needs[Path(shelf)] = weights * (1 + len(inputs.job.rule.slot_names))
    check_room(needs)


def _start(settings: TrainSettings, progress: Progress, stack: ExitStack) -> spark.SparkSession:
    """Connect to Ray if shards run there, then to Spark; `stack` stops what is started."""
    with deferred():
        java = java_environment() if settings.spark is None else {}
    if settings.shards_in is Placement.RAY:
        from deploy import ray_cluster

        progress.starting("Ray" if settings.ray is None else f"Ray at {settings.ray}")
        with deferred():
            stack.enter_context(ray_cluster.connect(settings.ray, cpus=settings.shards))
    where = "" if settings.spark is None else f" at {spark_settings.shown(settings.spark)}"
    progress.starting(f"Spark{where}")
    with deferred():
        return stack.enter_context(
            spark.start_session(settings.spark, settings.workers, app="downpour", env=java)
        )


def _finish(
    inputs: _Inputs, outcome: Outcome, folder: RunFolder, observer: _Observer
) -> Summary | None:
    """Write the results into the run folder and test the weights; None if Ctrl-C ended the run."""
    assert observer.updates is not None
    observer.close()
    summary = summarise(
        outcome.statuses,
        observer.updates.fresh,
        outcome.reports,
        workers=inputs.settings.workers,
        staleness_bound=inputs.settings.staleness,
        seconds=outcome.seconds,
        kept=observer.updates.kept,
        fresh_samples=observer.updates.fresh_samples,
        left=outcome.left,
    )
    # Remove the weights of an earlier stop, which would not belong to the new summary.
    for path in (folder.weights, folder.caffemodel):
        path.unlink(missing_ok=True)
    with _with_hint(inputs.settings, outcome):
        folder.write_summary(summary)
        summary = _conclude(
            inputs,
            outcome.weights,
            summary,
            folder,
            observer.evaluations,
            observer.evaluated,
            test=not outcome.interrupted,
            draw=not observer.updates.lost,
        )
    return None if outcome.interrupted else summary


def _conclude(
    inputs: _Inputs,
    weights: NDArray[np.float32],
    summary: Summary,
    folder: RunFolder,
    evaluations: EvaluationsFile,
    report: Callable[[Evaluation], None],
    *,
    test: bool,
    draw: bool,
) -> Summary:
    """Write the weights, test them, and draw the plots even if Ctrl-C ends the test.

    Returns the summary with the figures of the test, after writing it.
    """
    write_safetensors(folder.weights, inputs.model.table, weights)
    write_caffemodel(folder.caffemodel, inputs.model.net, weights)
    try:
        if test and inputs.test is not None:
            figures = inputs.test.whole(weights)
            steps = inputs.job.plan.steps
            report(Evaluation(steps, summary.samples, summary.seconds, figures))
            summary = replace(
                summary, test_accuracy=figures.get("accuracy"), test_loss=figures.get("loss")
            )
            folder.write_summary(summary)
    finally:
        if draw:
            plot_loss(folder.updates, summary, folder.loss_plot, evaluations.results)
            plot_staleness(folder.updates, summary, folder.staleness_plot)
    return summary


@contextmanager
def _with_hint(settings: TrainSettings, outcome: Outcome) -> Iterator[None]:
    """Add to an error what was saved and how to continue."""
    try:
        yield
    except (GiveUp, OSError) as error:
        if outcome.snapshot is not None:
            where = f"the progress is saved in {outcome.snapshot}"
        elif SnapshotCatalog(shelf_of(settings, settings.out)).entries():
            where = "the progress since the last snapshot is lost"
        else:
            raise
        again = f"downpour train --resume {settings.out}"
        raise GiveUp(f"{error}; {where}; make room, then continue with: {again}") from None


# --- a run to resume that has taken all its steps -------------------------------------------------


def _is_over(inputs: _Inputs, found: LoadedSnapshot) -> bool:
    """Whether a snapshot has all the steps; raises BadInput if it has more than --max-iter."""
    workers, wanted = inputs.settings.workers, inputs.job.plan.steps
    if found.manifest.steps > wanted * workers:
        done = -(-found.manifest.steps // workers)
        raise BadInput(
            f"--max-iter: expected at least {done}, which the run has already taken, got {wanted}"
        )
    return found.manifest.steps == wanted * workers


def _ended(run: Path, found: LoadedSnapshot) -> Summary | None:
    """The summary of the run that ended with this snapshot; None if it has not written one."""
    try:
        summary = msgspec.json.decode((run / SUMMARY).read_bytes(), type=Summary)
    except (OSError, *UNDECODABLE):
        return None
    updates = min(part.version for part in found.manifest.parts)
    return summary if summary.updates == updates and writer_of(run) is None else None


def _complete(inputs: _Inputs, found: LoadedSnapshot, summary: Summary) -> Summary:
    """Write results that are missing after a full disk or Ctrl-C; raises Finished if none is."""
    out = inputs.settings.out
    written = all((out / name).is_file() for name in (WEIGHTS, CAFFEMODEL))
    tested = inputs.test is None or summary.test_loss is not None
    if written and (tested or summary.test_accuracy is not None):
        raise Finished(
            f"{out} is finished: each worker has taken its {inputs.job.plan.steps} steps;"
            " to train further, give a larger --max-iter"
        )
    with RunFolder.resume(out, TrainSettings.load(out / SETTINGS).plain()) as folder:
        weights = inputs.model.table.empty()
        found.manifest.map.join([state.weights for state in found.states], weights)
        tests = EvaluationsFile(folder.evaluations, upto=inputs.job.plan.steps)
        drawable = folder.updates.is_file()
        return _conclude(
            inputs, weights, summary, folder, tests, tests.add, test=True, draw=drawable
        )
