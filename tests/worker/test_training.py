"""What becomes of a job's logs when it ends. No Spark: a thread pushes in the place of tasks."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ps
from ps import Durability
from ps.logs.job_logs import newest_logs
from ps.storage.shelf import Shelf
from shards.errors import BadInput, GiveUp
from shards.messages import ShardStatus
from shards.spec import ShardSpec
from tests.integration.jobs import Ones, ones_job
from tests.worker.test_residence import Servers
from worker import spark, training

DEADLINE_S = 60.0


class Notes:
    """An observer that keeps what an operator should read."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def started(self, cluster: ps.Cluster, restored: list[int] | None) -> None: ...
    def progressed(self, statuses: list[ShardStatus], records: list[Any]) -> None: ...
    def moved(self, cluster: ps.Cluster) -> None: ...

    def told(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[Servers]:
    """The shards of each job that is run: in threads, with logs."""
    started: list[Servers] = []

    @contextmanager
    def start(_: Any, specs: Sequence[ShardSpec], *, logs: Path, **__: Any) -> Iterator[Servers]:
        started.append(Servers(specs, logs))
        try:
            yield started[-1]
        finally:
            started[-1].stop()

    monkeypatch.setattr(training, "start_shards", start)
    return started


def run(
    tasks: Callable[[], None],
    folder: Path,
    asked: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    resume: Path | None = None,
) -> tuple[training.Outcome, list[str]]:
    """A job that keeps logs, whose tasks do this; its outcome, and what was told."""

    def run_tasks(*_: Any) -> list[Any]:
        tasks()
        return []

    monkeypatch.setattr(spark, "run_tasks", run_tasks)
    monkeypatch.setattr(spark, "interrupt", lambda *_: None)
    observer = Notes()
    outcome = training.run_job(
        None,  # type: ignore[arg-type]  # no task reads it
        ones_job(Ones, steps=1, workers=1, durability=Durability.PROCESS),
        resume=resume,
        snapshots=folder / "snapshots",
        asked=asked,
        logs=folder / "logs",
        observer=observer,
    )
    return outcome, observer.notes


def push(servers: Servers, count: int, incarnation: int) -> None:
    with ps.Client(servers.cluster, worker="0", incarnation=incarnation) as client:
        for _ in range(count):
            client.pull()
            client.push(np.ones(servers.cluster.table.size, np.float32))
        client.flush()


def test_logs_go_where_the_last_snapshot_holds_all(
    servers: list[Servers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that ended with a snapshot needs them no more."""
    asked = threading.Event()
    outcome, notes = run(lambda: push(servers[0], 3, 0), tmp_path, asked, monkeypatch)
    assert outcome.snapshot == str(tmp_path / "snapshots" / "3")
    assert not (tmp_path / "logs").exists()
    assert notes == []


def test_logs_stay_where_the_last_snapshot_failed(
    servers: list[Servers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier one does not hold what came since; the logs do, and where they are is told."""
    save, asked, shelf = Shelf.save, threading.Event(), Shelf(tmp_path / "snapshots")

    def save_once(self: Shelf, *args: Any, **options: Any) -> str:
        if self.entries():
            raise GiveUp("no space left")
        return save(self, *args, **options)

    def tasks() -> None:
        push(servers[0], 1, 0)
        asked.set()
        until = time.monotonic() + DEADLINE_S
        while not shelf.entries():
            assert time.monotonic() < until
            time.sleep(0.01)
        push(servers[0], 4, 1)

    monkeypatch.setattr(Shelf, "save", save_once)
    outcome, notes = run(tasks, tmp_path, asked, monkeypatch)
    assert outcome.snapshot is None
    assert outcome.weights.min() == -5
    logs = newest_logs(tmp_path / "logs")
    assert logs is not None
    assert [state.weights.min() for state in logs.states] == [-5, -5]
    assert notes == [
        f"snapshot {tmp_path}/snapshots/1",
        f"no space left; the last good one is {tmp_path}/snapshots/1",
        f"the logs in {tmp_path}/logs stay: they hold what the last snapshot was to",
    ]


def test_logs_that_are_all_that_is_left(
    servers: list[Servers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run leaves them, or goes on from them; a snapshot that holds less is not enough."""
    save, logs, asked = Shelf.save, tmp_path / "logs", threading.Event()

    def no(*_: Any, **__: Any) -> str:
        raise GiveUp("no space left")

    def tasks() -> None:
        push(servers[-1], 4, 1)

    monkeypatch.setattr(Shelf, "save", no)
    run(tasks, tmp_path, asked, monkeypatch)
    monkeypatch.setattr(Shelf, "save", save)
    (job,) = logs.iterdir()
    elsewhere = tmp_path / "elsewhere"
    earlier, _ = run(lambda: push(servers[-1], 3, 0), elsewhere, asked, monkeypatch)
    assert earlier.snapshot is not None
    line = f"got an earlier job's logs, with 4 pushes: resume from {job}, or remove it"
    for resume in (None, Path(earlier.snapshot)):
        with pytest.raises(BadInput) as caught:
            run(tasks, tmp_path, asked, monkeypatch, resume)
        assert str(caught.value) == f"logs {logs}: expected a folder of this job's own, {line}"
        assert [path.name for path in logs.iterdir()] == [job.name]
    outcome, _ = run(tasks, tmp_path, asked, monkeypatch, job)
    assert outcome.weights.min() == -8
    assert not logs.exists()


def test_a_snapshot_that_holds_as_much_as_the_logs(
    servers: list[Servers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was killed between its last snapshot and the end of its logs goes on from it."""
    asked = threading.Event()
    with monkeypatch.context() as killed:
        killed.setattr(training, "drop_logs", lambda *_, **__: None)
        first, _ = run(lambda: push(servers[-1], 3, 0), tmp_path, asked, monkeypatch)
    assert first.snapshot is not None
    assert newest_logs(tmp_path / "logs") is not None
    resume = Path(first.snapshot)
    second, _ = run(lambda: push(servers[-1], 2, 1), tmp_path, asked, monkeypatch, resume)
    assert second.weights.min() == -5
    assert not (tmp_path / "logs").exists()
