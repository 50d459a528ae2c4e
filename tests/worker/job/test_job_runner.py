"""What a job leaves, however it ends. Without Spark: a thread pushes instead of the tasks."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

import ps
from ps import AdminClient, Durability
from ps.client import Client
from ps.launch.launch_plan import LaunchPlan
from ps.snapshot_scheduler import SnapshotScheduler
from ps.snapshots.catalog import SnapshotCatalog
from ps.snapshots.manifest import load_manifest
from ps.storage import open_store
from ps.wal.job_logs import load_logs, newest_logs
from shards.errors import BadInput, DownpourError, GiveUp
from shards.live_settings import LIVE
from shards.messages import LiveSettings
from shards.shard_status import ShardStatus
from tests.support.eventually import eventually
from tests.support.ones_job import Ones, ones_job, rows
from tests.support.snapshot_stores import Keyed
from tests.support.stoppable_shards import Servers
from worker import spark
from worker.job import runner as job_runner
from worker.job import running_job
from worker.job.options import LinkOptions
from worker.job.outcome import Observer, Outcome
from worker.job.run_control import Order, ReshardOrder, RunControl, SettingsOrder, SnapshotOrder
from worker.strategies import SSP
from worker.training.evaluation import Evaluation, EvaluationPlan
from worker.training.training_loop import WorkerReport

DEADLINE_S = 60.0
REPORTED = WorkerReport(
    worker="w0",
    incarnation=0,
    steps=1,
    samples=4,
    seconds=0.0,
    compute_s=0.0,
    data_s=0.0,
    waited_s=0.0,
    network_s=0.0,
    serialise_s=0.0,
    duplicates=0,
)


class Notes:
    """An observer that keeps the messages for the operator."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def started(self, cluster: ps.Cluster, restored: list[int] | None) -> None: ...
    def progressed(self, statuses: list[ShardStatus], records: list[Any]) -> None: ...
    def evaluated(self, result: Evaluation, weights: Any) -> None: ...
    def resharded(self, cluster: ps.Cluster) -> None: ...
    def settings_changed(self, settings: LiveSettings) -> None: ...

    def notice(self, text: str) -> None:
        self.notes.append(text)


class Evaluations(Notes):
    """An observer that keeps the results of tests, and that a task can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Evaluation] = []
        self._came = threading.Condition()

    def evaluated(self, result: Evaluation, weights: Any) -> None:
        assert weights.min() == result.figures["least"]
        with self._came:
            self.found.append(result)
            self._came.notify_all()

    def await_iteration(self, iteration: int) -> None:
        with self._came:
            assert self._came.wait_for(
                lambda: any(each.iteration == iteration for each in self.found), DEADLINE_S
            )


@pytest.fixture(autouse=True)
def _no_data_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows, which no task of these tests reads."""
    monkeypatch.setattr(job_runner, "check_frame", lambda *_: None)
    monkeypatch.setattr(spark, "master_host", lambda _: None)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[Servers]:
    """The shards of each job that is run: in threads, with logs."""
    started: list[Servers] = []

    @contextmanager
    def start(_: Any, plan: LaunchPlan) -> Iterator[Servers]:
        started.append(Servers(plan.specs, plan.logs))
        try:
            yield started[-1]
        finally:
            started[-1].stop()

    monkeypatch.setattr(job_runner, "start_shards", start)
    return started


class Spark:
    """Runs `tasks` in the place of Spark; a job that waits for its end is ended by `interrupt`, but
    only when it has been asked `deaf` times before, as one that Spark has not begun yet."""

    def __init__(self, tasks: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
        self._tasks = tasks
        self.deaf = self.interrupts = 0
        self._ended = threading.Event()
        self.ended_by_itself = False
        monkeypatch.setattr(job_runner, "check_columns", lambda *_: None)
        monkeypatch.setattr(job_runner, "deal_rows", lambda df, *_, **__: df)
        monkeypatch.setattr(spark, "run_tasks", self._run_tasks)
        monkeypatch.setattr(spark, "interrupt", self._interrupt)

    def for_ever(self) -> None:
        """What tasks do that only `interrupt` ends."""
        self.ended_by_itself = not self._ended.wait(DEADLINE_S)

    def _run_tasks(self, *_: Any) -> list[Any]:
        self._tasks()
        return [(msgspec.json.encode(REPORTED),)]

    def _interrupt(self, *_: Any) -> None:
        self.interrupts += 1
        if self.interrupts > self.deaf:
            self._ended.set()


def run(
    tasks: Callable[[], None],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    resume: Path | None = None,
    *,
    control: RunControl | None = None,
    snapshots: bool = True,
) -> tuple[Outcome, list[str]]:
    """Run a job with logs and these tasks; returns its outcome and its messages."""
    Spark(tasks, monkeypatch)
    observer = Notes()
    outcome = run_job(folder, observer, resume, control=control, snapshots=snapshots)
    return outcome, observer.notes


def run_job(
    folder: Path,
    observer: Observer | None,
    resume: Path | None = None,
    *,
    control: RunControl | None = None,
    snapshots: bool = True,
) -> Outcome:
    return job_runner.run_job(
        None,  # type: ignore[arg-type]  # no task reads it
        ones_job(Ones, steps=1, workers=1, durability=Durability.PROCESS),
        resume=resume,
        snapshots=folder / "snapshots" if snapshots else None,
        control=control,
        logs=folder / "logs",
        observer=observer,
    )


def push(servers: Servers, count: int, incarnation: int) -> None:
    with Client(servers.cluster, worker="0", incarnation=incarnation) as client:
        for _ in range(count):
            client.pull()
            client.push(np.ones(servers.cluster.layout.size, np.float32))
        client.flush()


def test_what_a_death_at_the_end_has_cost(
    servers: list[Servers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost updates at the end of a job are reported, too: the final weights lack them."""

    def tasks() -> None:
        push(servers[-1], 1, 0)
        servers[-1].lost = ["shard 0 has died"]

    _, notes = run(tasks, tmp_path, monkeypatch)
    assert notes == ["shard 0 has died"]


def test_rows_that_are_refused_change_nothing(
    servers: list[Servers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark looks at the rows while the shards start; what is stored stays until it has."""
    installed: list[Any] = []
    stopped = threading.Event()

    def refuse(*_: Any, **__: Any) -> None:
        raise BadInput("the DataFrame", expected="rows", got="none")

    Spark(lambda: None, monkeypatch)
    monkeypatch.setattr(job_runner, "deal_rows", refuse)
    monkeypatch.setattr(job_runner, "_install", lambda *given: installed.append(given))
    monkeypatch.setattr(Servers, "stop", lambda _: stopped.set())
    with pytest.raises(BadInput, match=r"the DataFrame: expected rows, got none"):
        run_job(tmp_path, Notes())
    assert (installed, len(servers), stopped.is_set()) == ([], 1, True)


class Forks(Notes):
    """An observer that forks at its first call, and has an error raised in the child."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.child: int | None = None
        self.ended = threading.Event()
        self._error = error

    def progressed(self, statuses: list[ShardStatus], records: list[Any]) -> None:
        if self.child is None:
            self.child = os.fork()
            if not self.child:
                raise self._error
            assert os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1]) == 0
            self.ended.set()


@pytest.mark.parametrize("error", [SystemExit(3), ValueError("the child's")], ids=repr)
def test_a_callback_that_forks(
    error: BaseException, servers: list[Servers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a forked process raises leaves `run_job` there, and ends nothing of its parent's job."""
    forks, stops = Forks(error), list[Servers]()
    stop = Servers.stop

    def note_stop(group: Servers) -> None:
        stops.append(group)
        stop(group)

    monkeypatch.setattr(Servers, "stop", note_stop)
    fake = Spark(lambda: push(servers[-1], int(forks.ended.wait(DEADLINE_S)), 0), monkeypatch)
    try:
        outcome = run_job(tmp_path, forks)
    except (SystemExit, ValueError):
        os._exit(int(forks.child != 0 or bool(fake.interrupts) or bool(stops)))
    assert (fake.interrupts, stops, outcome.statuses[0].version) == (0, servers, 1)
    assert outcome.snapshot is not None


def test_residuals_are_read_where_the_snapshot_is(
    servers: list[Servers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers get the place with its key and options, without which they could not read there;
    nobody else is."""
    monkeypatch.setattr("pyarrow.fs.FileSystem", Keyed(tmp_path))

    def tasks(_: Any, host: Callable[..., Iterator[pa.RecordBatch]], *__: Any) -> list[Any]:
        (answer,) = host(iter(rows(8).to_batches()), 0, 0, [])
        return [(answer["report"][0].as_py(),)]

    monkeypatch.setattr(job_runner, "check_columns", lambda *_: None)
    monkeypatch.setattr(job_runner, "deal_rows", lambda df, *_, **__: df)
    monkeypatch.setattr(spark, "run_tasks", tasks)
    told, shelf, whole = Notes(), SnapshotCatalog(Keyed.URI), Keyed.URI.replace("?", "/2?")
    for steps, resume in ((2, None), (3, shelf.newest_good), (4, lambda: whole)):
        outcome = job_runner.run_job(
            None,  # type: ignore[arg-type]  # no task reads it
            ones_job(Ones, steps=steps, workers=1, links=LinkOptions(compress="topk:0.5")),
            resume=resume() if resume is not None else None,
            snapshots=Keyed.URI,
            observer=told,
        )
        assert [report.lost for report in outcome.reports] == [""]
    assert load_manifest(open_store(whole)).residuals != ()
    assert told.notes == []
    with pytest.raises(BadInput, match=r"resume s3://bucket/run/2: .* workers 1, got 3") as caught:
        job_runner.run_job(
            None,  # type: ignore[arg-type]  # no task reads it
            ones_job(Ones, steps=1, workers=3),
            resume=whole,
        )
    assert "secret" not in str(caught.value)


def test_without_an_observer_notices_are_logged(
    servers: list[Servers],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A snapshot that could not be written and a shard that was rolled back are warnings of the
    logger, and the outcome holds them, too."""

    def save(self: SnapshotCatalog, *_: Any, **__: Any) -> str:
        raise GiveUp("no space left")

    def tasks() -> None:
        push(servers[-1], 1, 0)
        servers[-1].lost = ["shard 0 has died"]

    monkeypatch.setattr(SnapshotCatalog, "save", save)
    Spark(tasks, monkeypatch)
    outcome = run_job(tmp_path, None)
    assert outcome.snapshot is None
    logged = [
        (record.name, record.levelname, record.getMessage())
        for record in caplog.records
        if record.name.startswith("downpour")
    ]
    assert [text for _, _, text in logged] == list(outcome.notices)
    assert {(name, level) for name, level, _ in logged} == {("downpour.worker", "WARNING")}
    assert outcome.notices[0].startswith("no space left")
    assert "shard 0 has died" in outcome.notices


def test_what_fails_in_a_shard_is_reported(
    servers: list[Servers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing autosave is reported once, while training continues; the outcome says it, too."""

    def tasks() -> None:
        servers[-1].trouble(0, "autosave saves: No space left on device")
        push(servers[-1], 3, 0)

    outcome, notes = run(tasks, tmp_path, monkeypatch)
    line = "shard 0: autosave saves: No space left on device; training continues"
    assert notes == list(outcome.notices) == [line]
    assert outcome.statuses[0].pushes == 3


def test_workers_that_had_no_rows_after_all(
    servers: list[Servers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query with different rows each time may leave a worker idle, which is reported."""
    Spark(lambda: push(servers[-1], 1, 0), monkeypatch)
    monkeypatch.setattr(spark, "run_tasks", lambda *_: [])
    outcome = run_job(tmp_path, Notes())
    assert outcome.notices[0].startswith("0 of 1 workers had rows to train on")


def test_snapshots_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: list[Servers]
) -> None:
    """A place that cannot hold snapshots is refused before a shard is started."""
    Spark(lambda: None, monkeypatch)
    (tmp_path / "snapshots").write_text("a file")
    with pytest.raises(BadInput, match=r"^snapshots \S*snapshots: cannot be written: \w"):
        run_job(tmp_path, None)
    assert servers == []


def test_logs_go_where_the_last_snapshot_holds_all(
    servers: list[Servers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logs of a job that ended with a snapshot are deleted."""
    outcome, notes = run(lambda: push(servers[0], 3, 0), tmp_path, monkeypatch)
    assert outcome.snapshot == str(tmp_path / "snapshots" / "3")
    assert not (tmp_path / "logs").exists()
    assert notes == []


def test_logs_go_where_no_snapshot_was_wanted(
    servers: list[Servers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outcome of a completed job has all its weights; the next job may use the same folder."""
    for _ in range(2):
        outcome, _ = run(lambda: push(servers[-1], 3, 0), tmp_path, monkeypatch, snapshots=False)
        assert (outcome.snapshot, outcome.weights.min()) == (None, -3)
        assert not (tmp_path / "logs").exists()


def test_a_job_that_wants_no_last_snapshot(
    servers: list[Servers],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ends without one, and without a word about it; its logs go, for it is all in its outcome."""
    Spark(lambda: push(servers[-1], 3, 0), monkeypatch)
    job, notes = ones_job(Ones, steps=3, workers=1, durability=Durability.PROCESS), Notes()
    outcome = job_runner.run_job(
        None,  # type: ignore[arg-type]  # no task reads it
        msgspec.structs.replace(job, snapshot_at_end=False),
        snapshots=tmp_path / "snapshots",
        logs=tmp_path / "logs",
        observer=notes,
    )
    assert (outcome.snapshot, outcome.weights.min(), notes.notes) == (None, -3, [])
    assert not (tmp_path / "logs").exists()
    assert SnapshotCatalog(tmp_path / "snapshots").entries() == []


def test_the_weights_are_tested_while_the_job_trains(
    servers: list[Servers],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """First those it begins with, then at each interval what has been pushed by then; the observer
    hears of each result at once, the log of each, and all are in the outcome."""
    seen = Evaluations()

    def tasks() -> None:
        for life, pushes in enumerate((2, 2)):
            push(servers[-1], pushes, life)
            seen.await_iteration(2 * (life + 1))

    Spark(tasks, monkeypatch)
    plan = EvaluationPlan(lambda weights, _: {"least": float(weights.min())}, every=2)
    with caplog.at_level("INFO", "downpour.worker.job"):
        outcome = job_runner.run_job(
            None,  # type: ignore[arg-type]  # no task reads it
            ones_job(Ones, steps=9, workers=1),
            evaluation=plan,
            observer=seen,
        )
    assert outcome.evaluations == seen.found
    assert [(each.iteration, each.figures["least"]) for each in seen.found] == [
        (0, 0.0),
        (2, -2.0),
        (4, -4.0),
    ]
    assert "test at iteration 2: least -2" in [record.getMessage() for record in caplog.records]


def test_a_press_during_the_last_test_leaves_a_snapshot(
    servers: list[Servers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C takes a snapshot even if the job wants none at its end; the test is dropped."""
    pushed = threading.Event()

    def tasks() -> None:
        push(servers[-1], 3, 0)
        pushed.set()

    def evaluate(_: Any, stopped: Callable[[], bool]) -> dict[str, float]:
        assert pushed.wait(DEADLINE_S)
        press()
        eventually(stopped, because="the test is stopped")
        return {}

    Spark(tasks, monkeypatch)
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        outcome = job_runner.run_job(
            None,  # type: ignore[arg-type]  # no task reads it
            msgspec.structs.replace(ones_job(Ones, steps=3, workers=1), snapshot_at_end=False),
            snapshots=tmp_path / "snapshots",
            evaluation=EvaluationPlan(evaluate, every=100),
        )
    finally:
        signal.signal(signal.SIGINT, former)
    assert outcome.interrupted
    assert outcome.snapshot == f"{tmp_path}/snapshots/3"
    assert outcome.evaluations == []


def test_logs_stay_where_the_last_snapshot_failed(
    servers: list[Servers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last snapshot lacks later updates; the logs hold them, and a message says where."""
    save, shelf = SnapshotCatalog.save, SnapshotCatalog(tmp_path / "snapshots")
    control = RunControl()
    answers: list[tuple[DownpourError | None, str]] = []

    def save_once(self: SnapshotCatalog, *args: Any, **options: Any) -> str:
        if self.entries():
            raise GiveUp("no space left")
        return save(self, *args, **options)

    def tasks() -> None:
        push(servers[0], 1, 0)
        control.submit(SnapshotOrder(), lambda *answer: answers.append(answer))
        eventually(shelf.entries, because="a snapshot is written")
        push(servers[0], 4, 1)

    monkeypatch.setattr(SnapshotCatalog, "save", save_once)
    outcome, notes = run(tasks, tmp_path, monkeypatch, control=control)
    assert answers == [(None, "snapshot 1")]
    assert outcome.snapshot is None
    assert outcome.weights.min() == -5
    logs = newest_logs(tmp_path / "logs")
    assert logs is not None
    assert [state.arrays["weights/weights"].min() for state in logs.states] == [-5, -5]
    assert notes == [
        f"snapshot {tmp_path}/snapshots/1",
        f"no space left; the last good one is {tmp_path}/snapshots/1",
        f"the logs in {tmp_path}/logs are kept: they hold the updates since the last snapshot",
    ]


def test_logs_that_are_all_that_is_left(
    servers: list[Servers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run keeps the logs or resumes from them; an older snapshot is refused."""
    save, logs = SnapshotCatalog.save, tmp_path / "logs"

    def no(*_: Any, **__: Any) -> str:
        raise GiveUp("no space left")

    def tasks() -> None:
        push(servers[-1], 4, 1)

    monkeypatch.setattr(SnapshotCatalog, "save", no)
    run(tasks, tmp_path, monkeypatch)
    monkeypatch.setattr(SnapshotCatalog, "save", save)
    (job,) = logs.iterdir()
    elsewhere = tmp_path / "elsewhere"
    earlier, _ = run(lambda: push(servers[-1], 3, 0), elsewhere, monkeypatch)
    assert earlier.snapshot is not None
    line = f"got an earlier job's logs, with 4 pushes: resume from {job}, or remove it"
    for resume in (None, Path(earlier.snapshot)):
        with pytest.raises(BadInput) as caught:
            run(tasks, tmp_path, monkeypatch, resume)
        assert str(caught.value) == f"logs {logs}: expected a folder of this job's own, {line}"
        assert [path.name for path in logs.iterdir()] == [job.name]
    there = (job / "shard-1").rename(tmp_path / "another-machine")
    line = rf"shard-1 is missing.* copy it here to resume from the logs, or remove {job} to"
    for resume in (None, Path(earlier.snapshot), job):
        with pytest.raises(BadInput, match=line):
            run(tasks, tmp_path, monkeypatch, resume)
    there.rename(job / "shard-1")
    outcome, _ = run(tasks, tmp_path, monkeypatch, job)
    assert outcome.weights.min() == -8
    assert not logs.exists()


def test_logs_next_to_those_that_are_resumed(
    servers: list[Servers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest logs of a job that was resharded and then killed; the former ones hold less."""
    logs = tmp_path / "logs"
    with monkeypatch.context() as killed:
        killed.setattr(job_runner, "drop_logs", lambda *_, **__: None)
        for pushes in (3, 5):
            run(lambda: push(servers[-1], pushes, 0), tmp_path, killed, snapshots=False)  # noqa: B023
            for job in logs.iterdir():
                job.rename(tmp_path / f"{job.name}.kept")
    for job in tmp_path.glob("*.kept"):
        job.rename(logs / job.stem)
    left, newest = sorted(logs.iterdir(), key=lambda job: load_logs(job).manifest.steps)
    with pytest.raises(BadInput, match=f"with 5 pushes: resume from {newest}, or remove it"):
        run(lambda: None, tmp_path, monkeypatch, left)
    outcome, _ = run(lambda: None, tmp_path, monkeypatch, newest)
    assert outcome.weights.min() == -5
    assert not logs.exists()


def test_a_snapshot_that_holds_as_much_as_the_logs(
    servers: list[Servers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was killed before its logs were deleted resumes from its last snapshot."""
    with monkeypatch.context() as killed:
        killed.setattr(job_runner, "drop_logs", lambda *_, **__: None)
        first, _ = run(lambda: push(servers[-1], 3, 0), tmp_path, monkeypatch)
    assert first.snapshot is not None
    assert newest_logs(tmp_path / "logs") is not None
    resume = Path(first.snapshot)
    second, _ = run(lambda: push(servers[-1], 2, 1), tmp_path, monkeypatch, resume)
    assert second.weights.min() == -5
    assert not (tmp_path / "logs").exists()


class Looker(Notes):
    """An observer that acts at the first look at the job after its tasks have pushed."""

    def __init__(self, pushed: threading.Event, act: Callable[[], None]) -> None:
        super().__init__()
        self._pushed = pushed
        self._acts = [act]

    def progressed(self, statuses: list[ShardStatus], records: list[Any]) -> None:
        if self._acts and self._pushed.is_set():
            self._acts.pop()()


@pytest.fixture
def watched(
    servers: list[Servers], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Spark, threading.Event]]:
    """A job that pushes twice and then runs until it is cancelled; and when it has pushed.

    However late it ends of that, it is cancelled once.
    """
    monkeypatch.setattr(running_job, "_CANCEL_S", DEADLINE_S)
    pushed = threading.Event()

    def tasks() -> None:
        push(servers[0], 2, 0)
        pushed.set()
        cluster.for_ever()

    cluster = Spark(tasks, monkeypatch)
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield cluster, pushed
    signal.signal(signal.SIGINT, former)


def test_settings_change_as_requested(
    watched: tuple[Spark, threading.Event], tmp_path: Path, servers: list[Servers]
) -> None:
    """The observer and the requester hear of it, the snapshot has it, a shard that has lost it is
    given it again. An order that the strategy cannot follow, or that is none, is answered with its
    reason; the answers are in the sequence of the orders."""
    control = RunControl()
    answers: list[tuple[DownpourError | None, str]] = []
    for changes in (
        {"staleness": None},
        {"shards": 3},
        {"staleness": 3, "rate_factor": 0.5},
    ):
        control.submit(SettingsOrder(changes), lambda *answer: answers.append(answer))
    seen: list[LiveSettings] = []
    looks: list[int] = []  # those in which all shards follow the change

    class Seeing(Notes):
        def settings_changed(self, settings: LiveSettings) -> None:
            seen.append(settings)

        def progressed(self, statuses: list[ShardStatus], records: list[Any]) -> None:
            if not (len(answers) == 3 and all(one.settings.revision == 1 for one in statuses)):
                return
            looks.append(len(looks))
            if looks == [0]:
                servers[0].lose_settings(1)
            elif looks == [0, 1]:
                press()

    job_runner.run_job(
        None,  # type: ignore[arg-type]  # no task reads it
        ones_job(Ones, steps=1, workers=1, durability=Durability.PROCESS, strategy=SSP()),
        control=control,
        snapshots=tmp_path / "snapshots",
        logs=tmp_path / "logs",
        observer=Seeing(),
    )
    refusal = f"set: expected {LIVE[0]} or {LIVE[1]}, which may change while a job trains"
    assert [(str(error), text) for error, text in answers] == [
        ("strategy ssp: expected a staleness bound, got no bound", ""),
        (f"{refusal}, got shards", ""),
        ("None", "the job trains on with these settings"),
    ]
    assert [(one.bound, one.rate_factor) for one in seen] == [(3, 0.5)]
    (entry,) = SnapshotCatalog(tmp_path / "snapshots").entries()
    assert load_manifest(tmp_path / "snapshots" / entry.name).settings == seen[0]


class Ordering(Notes):
    """Gives these orders once the job has pushed, and ends it when all of them are answered."""

    def __init__(self, pushed: threading.Event, *orders: Order) -> None:
        super().__init__()
        self.control = RunControl()
        self.answers: list[tuple[str, str]] = []
        self._pushed, self._orders, self._open = pushed, list(orders), len(orders)

    def progressed(self, statuses: list[ShardStatus], records: list[Any]) -> None:
        while self._pushed.is_set() and self._orders:
            self.control.submit(self._orders.pop(0), self._note)

    def _note(self, error: DownpourError | None, text: str) -> None:
        self.answers.append((str(error or ""), text))
        self._open -= 1
        if not self._open:
            press()


def test_orders_are_carried_out_in_sequence(
    watched: tuple[Spark, threading.Event], tmp_path: Path
) -> None:
    """The shards change only after the snapshot that was ordered before; the answers say which."""
    _, pushed = watched
    observer = Ordering(pushed, SnapshotOrder(), ReshardOrder(1), SnapshotOrder())
    run_job(tmp_path, observer, control=observer.control)
    assert observer.answers == [("", "snapshot 2"), ("", "moved to 1 shard"), ("", "snapshot 2")]


def test_a_run_without_a_folder_for_snapshots_takes_none(
    watched: tuple[Spark, threading.Event], tmp_path: Path
) -> None:
    """The order is answered at once with the reason."""
    _, pushed = watched
    observer = Ordering(pushed, SnapshotOrder())
    run_job(tmp_path, observer, control=observer.control, snapshots=False)
    line = "snapshot: expected a run with a folder for snapshots, got one without"
    assert observer.answers == [(line, "")]


@pytest.mark.parametrize(("factor", "found"), [(None, (3, 0.25)), (0.5, (2, 0.5))])
def test_changed_settings_are_resumed(
    servers: list[Servers],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    factor: float | None,
    found: tuple[int, float],
) -> None:
    """A job without a factor of its own continues with those in the snapshot; one with a factor has
    the settings of its options."""

    def tasks() -> None:
        push(servers[-1], 1, len(servers) - 1)
        with AdminClient(servers[-1].cluster) as admin:
            if len(servers) == 1:
                admin.set(staleness=3, rate_factor=0.25)
            seen.append([one.settings for one in admin.status()])

    seen: list[list[LiveSettings]] = []
    first, _ = run(tasks, tmp_path, monkeypatch)
    job_runner.run_job(
        None,  # type: ignore[arg-type]  # no task reads it
        msgspec.structs.replace(ones_job(Ones, steps=1, workers=1), rate_factor=factor),
        resume=first.snapshot,
        observer=Notes(),
    )
    assert {(one.bound, one.rate_factor) for one in seen[1]} == {found}


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_error_of_who_looks_on_ends_the_job_with_a_snapshot(
    watched: tuple[Spark, threading.Event], tmp_path: Path
) -> None:
    """The tasks are cancelled, and do not train unseen; their updates are kept, and the
    error says where."""
    cluster, pushed = watched

    def fail() -> None:
        raise OSError("no space left for the picture")

    with pytest.raises(OSError, match=r"^no space left for the picture\n") as caught:
        run_job(tmp_path, Looker(pushed, fail))
    assert (cluster.interrupts, cluster.ended_by_itself) == (1, False)
    assert [entry.name for entry in SnapshotCatalog(tmp_path / "snapshots").entries()] == ["2"]
    note = f"resume from {tmp_path}/snapshots/2 or the logs in {tmp_path}/logs"
    assert caught.value.__notes__ == [note]


def test_a_second_press_cancels_the_tasks_and_waits_for_nothing(
    watched: tuple[Spark, threading.Event], tmp_path: Path
) -> None:
    """The error ends the job at once, not after its tasks have trained to their end."""
    cluster, pushed = watched

    def press_twice() -> None:
        press()
        press()

    with pytest.raises(KeyboardInterrupt):
        run_job(tmp_path, Looker(pushed, press_twice))
    assert (cluster.interrupts, cluster.ended_by_itself) == (1, False)
    assert SnapshotCatalog(tmp_path / "snapshots").entries() == []


def test_a_press_before_spark_has_begun_is_heard(
    watched: tuple[Spark, threading.Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark cancels only tasks that run already, so it is asked until the job has ended."""
    monkeypatch.setattr(running_job, "_CANCEL_S", 0.01)
    cluster, pushed = watched
    cluster.deaf = 3
    outcome = run_job(tmp_path, Looker(pushed, press))
    assert outcome.interrupted
    assert outcome.snapshot == f"{tmp_path}/snapshots/2"
    assert cluster.interrupts >= 4
    assert not cluster.ended_by_itself


def test_a_press_after_the_last_step_costs_nothing(
    servers: list[Servers],
    watched: tuple[Spark, threading.Event],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Ctrl-C while the final weights are fetched does not lose them."""
    export = AdminClient.export

    def pressed(self: AdminClient, **options: Any) -> list[Any]:
        press()
        return export(self, **options)

    monkeypatch.setattr(AdminClient, "export", pressed)
    Spark(lambda: push(servers[0], 3, 0), monkeypatch)
    try:
        outcome = run_job(tmp_path, Notes())
    except KeyboardInterrupt:
        pytest.fail("it cost the last snapshot")
    assert outcome.snapshot == f"{tmp_path}/snapshots/3"
    assert outcome.interrupted
    assert outcome.weights.min() == -3


def test_a_resumed_job_reports_its_snapshot(
    servers: list[Servers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its iteration, so that no snapshot of it is due."""
    began: list[int] = []

    class Noted(SnapshotScheduler):
        def __init__(self, *args: Any, begins_at: int, **options: Any) -> None:
            began.append(begins_at)
            super().__init__(*args, begins_at=begins_at, **options)

    monkeypatch.setattr(job_runner, "SnapshotScheduler", Noted)
    first, _ = run(lambda: push(servers[-1], 3, 0), tmp_path, monkeypatch)
    assert first.snapshot is not None
    run(lambda: push(servers[-1], 1, 1), tmp_path, monkeypatch, Path(first.snapshot))
    assert began == [0, 3]
