"""Faults of the database and of the machine, with stub runners: no job is lost, and none starts
twice."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from deploy.run.folder import RunFolder, lock_folder
from deploy.runner import job_folder
from deploy.runner.job_folder import AttemptIdentity
from deploy.runner.journal import Journal, JournalReader
from deploy.service import database, database_tables, server
from deploy.service.access import exposure_of
from deploy.service.app import ServeOptions
from deploy.service.clock import SteadyClock
from deploy.service.database_tables import DATABASE, DatabasePlace, open_database
from deploy.service.job_rows import JobFilter
from deploy.service.job_store import JobStore
from deploy.service.launcher import Liveness, LocalLauncher, processes_with
from deploy.service.retention import ServiceLimits
from deploy.service.server import Listen
from deploy.service.states import LONGEST_RETRY_S
from deploy.service.tokens import TokenRole
from ps.snapshots.catalog import SnapshotCatalog
from shards.errors import BadInput, GiveUp
from tests.support.eventually import eventually
from tests.support.job_processes import processes_of
from tests.support.ports import free_port
from tests.support.postgres_server import PostgresServer
from tests.support.service_in_process import Running, Start

DATABASES = ("sqlite", "postgresql")
PROBLEM = "application/problem+json"
HOUR_S = 3600.0
SQLITE = pytest.mark.parametrize("place", ["sqlite"], indirect=True)
"""A test of the database's file; PostgreSQL's files are its server's."""


def pid_of(running: Running, job: str) -> int:
    folder = running.service.store.folder(job)
    return int(json.loads((folder / "attempt.json").read_text())["pid"])


def serve(home: Path) -> None:
    exposure = exposure_of("127.0.0.1", tls=False, proxy=None, require_tokens=False)
    options = ServeOptions(home=home, slots=1, exposure=exposure)
    server.serve(options, Listen(host="127.0.0.1", port=free_port()))


@contextmanager
def locked(place: DatabasePlace) -> Iterator[None]:
    """Another process holds the database's lock for writing."""
    if isinstance(place, Path):
        first = f"sqlite3.connect({str(place)!r}, isolation_level=None)"
        second = "BEGIN IMMEDIATE"
    else:
        text = place.set(drivername="postgresql").render_as_string(hide_password=False)
        first, second = f"psycopg.connect({text!r})", "LOCK TABLE job, event IN SHARE MODE"
    script = (
        f"import sqlite3, psycopg; c = {first}; c.execute({second!r});"
        " print('locked', flush=True); input()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"locked\n"
        try:
            yield
        finally:
            child.kill()


def test_a_locked_database(start: Start, place: DatabasePlace) -> None:
    """What has to be stored is answered by 503, jobs train on, and the service recovers by itself.
    A repeated submission makes one job, and an order that reached the journal is carried out."""
    with start(busy_s=0.2) as running:
        job = running.submit("train")
        running.await_state(job, "RUNNING")
        pid = pid_of(running, job)
        body = {"settings": {"solver": str(running.solver)}, "labels": {"stub": "succeed"}}
        keyed = {"json": body, "headers": {"Idempotency-Key": "once"}}
        with locked(place):
            for answer in (
                running.http.post("/api/v1/jobs", **keyed),
                running.http.post("/api/v1/jobs", **keyed),
                running.ask(job, "cancel"),
            ):
                assert (answer.status_code, answer.headers["content-type"]) == (503, PROBLEM)
                assert answer.json()["code"] == "unavailable"
                assert "train on" in answer.json()["hint"]
            assert running.http.get("/healthz").status_code == 200
            assert running.get(job)["state"] == "RUNNING"
            assert pid_of(running, job) == pid
        made = running.http.post("/api/v1/jobs", **keyed)
        assert made.status_code == 201, made.text
        assert running.await_state(job, "CANCELLED")["attempt"] == 1
        running.await_state(made.json()["id"], "SUCCEEDED")
        assert len(running.service.store.page(JobFilter(), 9).jobs) == 2
        assert len(list((running.service.store.folder("")).iterdir())) == 2
        assert running.service.ready


def test_a_cancelled_job_in_a_locked_database(start: Start, place: DatabasePlace) -> None:
    """An order that is in the journal alone is final: the job is not started afterwards."""
    with start(busy_s=0.2, slots=2) as running:
        first, second = running.submit("train"), running.submit("train")
        running.await_state(first, "RUNNING")
        with locked(place):
            assert running.ask(second, "cancel").status_code == 503
        running.ask(first, "cancel")
        running.await_state(first, "CANCELLED")
        assert running.await_state(second, "CANCELLED")["attempt"] == 0


def test_a_service_that_starts_while_its_database_is_locked(
    start: Start, place: DatabasePlace
) -> None:
    """It answers, and takes in what its journals have as soon as it can."""
    with start(driven=False) as before:
        job = before.submit("train")
        store = before.service.store
        store._append(job, 0, "state", {"state": "CANCELLED", "state_seq": 1})
    with locked(place):
        context = start(busy_s=0.1)
        running = context.__enter__()
        assert running.http.get("/healthz").status_code == 200
        assert not running.service.ready
    running.await_state(job, "CANCELLED")
    eventually(lambda: running.service.ready, because="the service drives jobs again")
    context.__exit__(None, None, None)


@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
def test_postgresql_that_restarts(
    start: Start, place: DatabasePlace, postgres: PostgresServer
) -> None:
    """Broken connections are replaced: 503 while the server is down, and nothing is lost."""
    with start() as running:
        job = running.submit("train")
        running.await_state(job, "RUNNING")
        pid = pid_of(running, job)
        postgres.stop()
        try:
            answer = running.http.get(f"/api/v1/jobs/{job}")
            assert (answer.status_code, answer.headers["content-type"]) == (503, PROBLEM)
        finally:
            postgres.start()
        eventually(
            lambda: running.http.get(f"/api/v1/jobs/{job}").status_code == 200, because="recovery"
        )
        assert (running.get(job)["state"], pid_of(running, job)) == ("RUNNING", pid)
        running.ask(job, "cancel")
        running.await_state(job, "CANCELLED")


@SQLITE
def test_a_database_that_is_deleted_while_it_is_used(
    start: Start, home: Path, place: DatabasePlace
) -> None:
    """Nothing is written into the deleted file: 503, then no start but by `reindex`, which finds
    the same job with the same process."""
    with start() as running:
        job = running.submit("train")
        running.await_state(job, "RUNNING")
        pid = pid_of(running, job)
        for path in home.glob(f"{DATABASE}*"):
            path.unlink()
        answer = running.http.get("/api/v1/jobs")
        assert (answer.status_code, answer.headers["content-type"]) == (503, PROBLEM)
    assert not (home / DATABASE).exists()
    with pytest.raises(BadInput, match="downpour service reindex"):
        serve(home)
    assert server.reindex(home) == 1
    with start() as running:
        assert (running.get(job)["state"], pid_of(running, job)) == ("RUNNING", pid)
        running.ask(job, "cancel")
        assert running.await_state(job, "CANCELLED")["attempt"] == 1


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_database_that_is_truncated(start: Start, home: Path, share: float) -> None:
    """Half a file, or an empty one: 503 while it is in use, then no start, until `reindex`."""
    with start(driven=False) as running:
        job = running.submit()
        running.service.store._engine.dispose()  # the file has all that its log had
        os.truncate(home / DATABASE, int(share * (home / DATABASE).stat().st_size))
        answer = running.http.get("/api/v1/jobs")
        assert (answer.status_code, answer.headers["content-type"]) == (503, PROBLEM)
    with pytest.raises(BadInput, match="downpour service reindex") as caught:
        serve(home)
    assert "\n" not in str(caught.value)
    assert server.reindex(home) == 1
    with start(driven=False) as running:
        assert running.get(job)["state"] == "QUEUED"


class Times:
    """The system's clock, which a test sets, and the time since its start."""

    def __init__(self) -> None:
        self.offset, self.passed = 0.0, 0.0
        self._now = time.time

    def system(self) -> float:
        return self._now() + self.passed + self.offset

    def since_boot(self) -> float:
        return time.monotonic() + self.passed


def test_the_clock_does_not_go_back() -> None:
    """It follows the system's clock forward, and stays where the time since its start leads."""
    system, boot = [1000.0], [5.0]
    clock = SteadyClock(lambda: system[0], lambda: boot[0])
    assert clock() == 1000.0
    system[0], boot[0] = 1010.0, 15.0
    assert clock() == 1010.0
    system[0], boot[0] = 1020.0 - HOUR_S, 25.0
    assert clock() == 1020.0
    system[0] = 5000.0
    assert clock() == 5000.0


def test_a_clock_that_is_set_back(
    start: Start, place: DatabasePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour back: no state changes by it, no time is negative, an expired token stays expired,
    later jobs come later, and a job that waited to recover does not wait for the hour."""
    times = Times()
    monkeypatch.setattr(time, "time", times.system)
    with start(clock=SteadyClock(times.system, times.since_boot)) as running:
        store, access = running.service.store, running.service.access
        job = running.submit("train")
        running.await_state(job, "RUNNING")
        _, token = access.create_token("short", TokenRole.VIEWER, None, 60.0)
        store.answer("old", "", 200, {})
        times.passed = 61.0
        assert access.of_token(token) is None
        times.offset = -HOUR_S
        assert access.of_token(token) is None
        assert store.earlier_answer("old") is not None
        assert access.create_token("long", TokenRole.VIEWER, None, 60.0)[0].expires > time.time()
        running.service.supervisor.reconcile()
        found = running.get(job)
        assert (found["state"], found["attempt"], found["contact"]) == ("RUNNING", 1, "")
        os.kill(pid_of(running, job), signal.SIGKILL)
        running.await_attempt(job, 2)
        running.await_state(job, "RUNNING")
        later = running.submit("succeed")
        assert later > job
        assert running.get(later)["created"] > found["created"]
        running.ask(job, "cancel")
        running.await_state(job, "CANCELLED")
        for attempt in store.attempts(job):
            assert attempt["ended"] >= attempt["started"]
        times.passed = 49 * HOUR_S
        store.answer("new", "", 200, {})
        assert store.earlier_answer("old") is None


def test_a_clock_that_is_set_back_while_no_service_runs(start: Start, place: DatabasePlace) -> None:
    """A job that was to recover at a time that is now an hour away starts at once; one that may
    not start yet waits as long as a retry may."""
    with start() as running:
        job = running.submit("train")
        running.await_state(job, "RUNNING")
        store, supervisor = running.service.store, running.service.supervisor
        now = supervisor._clock()
        row = store.get(job)
        for wait, due in ((-1.0, True), (LONGEST_RETRY_S, False), (HOUR_S, True)):
            waiting = sa.update(database_tables.job).values(not_before=now + wait)
            with store._engine.begin() as connection:
                connection.execute(waiting.where(database_tables.job.c.id == job))
            assert supervisor._is_due(store.get(job)) is due
        assert row.not_before == 0.0
        running.ask(job, "cancel")
        running.await_state(job, "CANCELLED")


@pytest.mark.parametrize("boot", ["same", "other"])
def test_a_process_id_of_another_process(start: Start, boot: str) -> None:
    """The number of a lost runner now belongs to another process, or its machine has been started
    again: the job recovers, and that process is left alone."""
    with subprocess.Popen(["sleep", "600"]) as stranger:
        try:
            with start() as running:
                job = running.submit("train")
                running.await_state(job, "RUNNING")
                pid = pid_of(running, job)
            folder = running.service.store.folder(job)
            os.kill(pid, signal.SIGKILL)
            mark = f"DOWNPOUR_JOB={job}"
            eventually(lambda: not processes_with({mark}), because="its subreaper ends too")
            path = folder / job_folder.ATTEMPT
            identity = job_folder.load(path, AttemptIdentity)
            assert identity is not None
            found = json.loads(path.read_text()) | {"pid": stranger.pid}
            if boot == "other":
                found["boot"] = "another-boot"
            path.write_text(json.dumps(found))
            (folder / ".lock").write_text(str(stranger.pid))
            assert LocalLauncher().probe(folder, identity.nonce) is Liveness.GONE
            with start() as running:
                running.await_attempt(job, 2)
                running.await_state(job, "RUNNING")
                running.ask(job, "cancel")
                running.await_state(job, "CANCELLED")
            assert stranger.poll() is None
        finally:
            stranger.kill()


@contextmanager
def small_disk(folder: Path, *, options: str = "size=4m") -> Iterator[None]:
    """A file system of a few MB on `folder`; skips the test where none can be mounted."""
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("needs root, to mount a small file system")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount a small file system: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@SQLITE
def test_a_full_disk(start: Start, home: Path, place: DatabasePlace) -> None:
    """On a full disk a submission is refused with the next step, and leaves nothing behind; with
    room again everything continues."""
    kept = (home / DATABASE).read_bytes()
    with small_disk(home):
        (home / DATABASE).write_bytes(kept)
        with start(limits=ServiceLimits(free_mb=0)) as running:
            job = running.submit("train")
            running.await_state(job, "RUNNING")
            _fill(home / "filler")
            before = sorted((home / "jobs").iterdir())
            answer = running.http.post(
                "/api/v1/jobs", json={"settings": {"solver": str(running.solver)}}
            )
            assert (answer.status_code, answer.headers["content-type"]) == (503, PROBLEM)
            hint = answer.json()["hint"]
            assert "free space" in hint or "train on" in hint
            assert sorted((home / "jobs").iterdir()) == before
            assert running.get(job)["state"] == "RUNNING"
            (home / "filler").unlink()
            running.await_state(running.submit(), "SUCCEEDED")
            running.ask(job, "cancel")
            assert running.await_state(job, "CANCELLED")["attempt"] == 1
        engine = open_database(home / DATABASE)
        assert JobStore(home, engine).catch_up() == 0
        engine.dispose()


def _fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file:
        try:
            for size in (1 << 16, 1 << 10, 1):
                try:
                    while file.write(b"x" * size):
                        pass
                except OSError:
                    continue
        finally:
            os.fsync(file.fileno())


def test_a_journal_on_a_full_disk(tmp_path: Path) -> None:
    """An entry that has no room leaves no half line, and the next one has its number."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, options="size=64k"), Journal(disk / "events.jsonl") as journal:
        journal.append("first", 1)
        _fill(disk / "filler")
        with pytest.raises(GiveUp, match="No space left"):
            journal.append("more", 1, text="x" * 9000)  # more than is left of the file's block
        last = JournalReader(disk / "events.jsonl").read()[-1].number
        assert (disk / "events.jsonl").read_bytes().endswith(b"\n")
        (disk / "filler").unlink()
        assert journal.append("after", 1).number == last + 1
        entries = JournalReader(disk / "events.jsonl").read()
    assert [each.number for each in entries] == list(range(1, last + 2))


@SQLITE
def test_a_home_that_cannot_be_written(home: Path, place: DatabasePlace) -> None:
    """A read-only home: no start, one sentence that says so."""
    with small_disk(home):
        subprocess.run(["mount", "-o", "remount,ro", home], check=True)
        with pytest.raises(BadInput, match=r"DOWNPOUR_HOME .*: Read-only file system$"):
            serve(home)
    lock = lock_folder(home)
    with pytest.raises(BadInput, match="no other service with this home"):
        serve(home)
    os.close(lock)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make a folder read-only; skips the test where it cannot be mounted once more."""
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("needs root, to mount a folder read-only")
    for options in (("--bind", folder, folder), ("-o", "remount,bind,ro", folder)):
        done = subprocess.run(["mount", *options], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount a folder read-only: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def close_connections(engine: sa.Engine) -> None:
    """Close those connections of a pool that are not in use, so that new ones are opened."""
    with ExitStack() as checked_out:
        for _ in range(10):
            checked_out.enter_context(engine.connect()).invalidate()


@SQLITE
def test_a_home_that_becomes_read_only(start: Start, home: Path, place: DatabasePlace) -> None:
    """The service answers and says why it starts nothing; the jobs under way train on. With a home
    that can be written again it continues by itself, and the alert is over."""
    with start() as running:
        job = running.submit("train")
        running.await_state(job, "RUNNING")
        pid, store = pid_of(running, job), running.service.store
        with read_only(home):
            close_connections(store._engine)  # these could still write, unlike on a real disk
            eventually(lambda: running.service.feed.notice, because="the alert")
            assert "cannot be written" in running.http.get("/api/v1/service").json()["halted"]
            assert "▲ No job is started" in running.http.get("/service").text
            body = {"settings": {"solver": str(running.solver)}}
            for answer in (
                running.http.post("/api/v1/jobs", json=body),
                running.ask(job, "pause"),
            ):
                assert (answer.status_code, answer.headers["content-type"]) == (503, PROBLEM)
                assert "Errno" not in answer.text
                assert answer.json()["hint"]
            assert running.http.get("/healthz").status_code == 200
            found = running.get(job)
            assert (found["state"], found["attempt"], pid_of(running, job)) == ("RUNNING", 1, pid)
            assert processes_of(job) == [pid]
        eventually(lambda: not running.service.feed.notice, because="the alert is over")
        assert running.get(job)["state"] == "RUNNING"
        running.await_state(running.submit(), "SUCCEEDED")
        running.ask(job, "cancel")
        assert running.await_state(job, "CANCELLED")["attempt"] == 1


@SQLITE
def test_a_run_folder_that_becomes_read_only(
    start: Start, tmp_path: Path, place: DatabasePlace
) -> None:
    """The job trains on, with an alert. If it has to recover, it waits until the folder can be
    written again, spends no attempt meanwhile, and then continues by itself."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with start() as running:
        settings = {"solver": str(running.solver), "out": str(disk / "run")}
        job = running.submit("train", settings=settings)
        running.await_state(job, "RUNNING")
        with read_only(disk):
            eventually(lambda: running.get(job)["alerts"] == ["unwritable"], because="the alert")
            (alert,) = [e for e in running.service.store.events([job]) if e["kind"] == "alert"]
            assert f"{disk} cannot be written" in alert["data"]["text"]
            assert running.get(job)["state"] == "RUNNING"
            os.kill(pid_of(running, job), signal.SIGKILL)
            running.await_state(job, "RECOVERING")
            supervisor, store = running.service.supervisor, running.service.store
            eventually(lambda: supervisor._is_due(store.get(job)), because="the end of its wait")
            for _ in range(3):
                supervisor.reconcile()
            found = running.get(job)
            assert (found["state"], found["attempt"]) == ("RECOVERING", 1)
            assert found["alerts"] == ["unwritable"]
        running.await_attempt(job, 2)
        running.await_state(job, "RUNNING")
        eventually(lambda: running.get(job)["alerts"] == [], because="the alert is over")
        running.ask(job, "cancel")
        running.await_state(job, "CANCELLED")


def test_a_disk_that_is_read_only_may_be_mended(tmp_path: Path) -> None:
    """A run folder and a place of snapshots on it are no bad input, which would end a job for good:
    the attempt ends, and another one may find the disk mended."""
    run, fresh, snapshots = (tmp_path / name for name in ("run", "fresh", "snapshots"))
    snapshots.mkdir()
    RunFolder.create(run, {"workers": 1}).close()
    actions: list[Callable[[], object]] = [
        lambda: RunFolder.resume(run, {"workers": 2}),
        lambda: RunFolder.create(fresh, {"workers": 2}),
        SnapshotCatalog(snapshots).check_writable,
        lambda: lock_folder(run),
    ]
    with read_only(tmp_path):
        for act in actions:
            with pytest.raises(GiveUp, match="Read-only file system") as caught:
                act()
            assert not isinstance(caught.value, BadInput)
    RunFolder.resume(run, {"workers": 2}).close()


def test_a_stopped_runner_is_no_dead_one(start: Start) -> None:
    """The alert `silent`, the same state, no second process, also across a restart of the service;
    continued, the job trains on and the alert is over."""
    limits = ServiceLimits(silent_s=0.3, free_mb=0)
    with start() as running:
        job = running.submit("alive")
        running.await_state(job, "RUNNING")
        pid = pid_of(running, job)
        os.kill(pid, signal.SIGSTOP)

    def silent(running: Running) -> dict[str, Any]:
        eventually(lambda: running.get(job)["alerts"] == ["silent"], because="the alert")
        return running.get(job)

    try:
        for _ in range(2):
            with start(limits=limits) as running:
                found = silent(running)
                assert (found["state"], found["attempt"]) == ("RUNNING", 1)
                assert processes_of(job) == [pid]
    finally:
        os.kill(pid, signal.SIGCONT)
    with start() as running:
        eventually(lambda: running.get(job)["alerts"] == [], because="the alert is over")
        assert (running.get(job)["state"], pid_of(running, job)) == ("RUNNING", pid)
        running.ask(job, "cancel")
        assert running.await_state(job, "CANCELLED")["attempt"] == 1
    assert database.HOME in {path.name for path in running.service.options.home.iterdir()}
