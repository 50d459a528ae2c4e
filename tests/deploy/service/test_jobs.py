"""Jobs through the service, with stub runners: queue, verbs, recovery, restarts of the service."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from deploy.runner.job_folder import ORDERS
from deploy.runner.journal import Journal
from deploy.service.access_store import ProjectLimits
from deploy.service.database_tables import DatabasePlace, open_database
from deploy.service.job_rows import JobFilter
from deploy.service.job_store import JobStore
from deploy.service.launcher import processes_with
from deploy.service.states import ATTEMPTED, TERMINAL, JobState, QueuedJob
from tests.support.eventually import eventually
from tests.support.job_processes import kill_processes
from tests.support.journal_reads import counted_bytes
from tests.support.service_in_process import Running, Start
from tests.support.snapshot_stores import write_snapshot

DATABASES = ("sqlite", "postgresql")


def pid_of(running: Running, job: str) -> int:
    folder = running.service.store.folder(job)
    return int(json.loads((folder / "attempt.json").read_text())["pid"])


def states_of(running: Running, job: str) -> list[str]:
    events = running.http.get(f"/api/v1/jobs/{job}/events").json()["events"]
    return [each["data"]["state"] for each in events if "state" in each["data"]]


def test_a_job_runs_to_its_end(service: Running) -> None:
    """Every state on the way is an event, the attempt is kept, and no process is left."""
    job = service.submit()
    found = service.await_state(job, "SUCCEEDED")
    assert found["reason"] == "done"
    expected = ["QUEUED", "CHECKING", "STARTING", "RUNNING", "STOPPING", "SUCCEEDED"]
    assert states_of(service, job) == expected
    (attempt,) = service.http.get(f"/api/v1/jobs/{job}/attempts").json()["attempts"]
    assert (attempt["number"], attempt["cause"], attempt["exit_status"]) == (1, "succeeded", 0)
    assert "attempt 1: succeed" in attempt["log_tail"]
    assert processes_with({f"DOWNPOUR_JOB={job}"}) == []


@pytest.mark.parametrize(
    ("stub", "code", "before"),
    [("bad", "bad_input", "CHECKING"), ("fail", "error", "STOPPING")],
)
def test_a_job_fails(service: Running, stub: str, code: str, before: str) -> None:
    """Bad input and defects end a job, and are not retried."""
    job = service.submit(stub)
    found = service.await_state(job, "FAILED")
    assert (found["code"], found["attempt"]) == (code, 1)
    assert states_of(service, job)[-2:] == [before, "FAILED"]


def test_a_runner_that_always_dies_is_given_up(service: Running) -> None:
    """After five attempts without a newer snapshot the job has failed, and says why."""
    job = service.submit("die")
    found = service.await_state(job, "FAILED")
    assert (found["code"], found["attempt"]) == ("thrashing", 5)
    attempts = service.http.get(f"/api/v1/jobs/{job}/attempts").json()["attempts"]
    assert [each["exit_status"] for each in attempts] == [-signal.SIGKILL] * 5


def test_a_killed_runner_is_replaced(service: Running) -> None:
    """The job recovers by itself, with another process and another attempt."""
    job = service.submit("train")
    service.await_state(job, "RUNNING")
    os.kill(pid_of(service, job), signal.SIGKILL)
    service.await_attempt(job, 2)
    service.await_state(job, "RUNNING")
    assert "RECOVERING" in states_of(service, job)
    service.ask(job, "cancel")
    assert service.await_state(job, "CANCELLED")["attempt"] == 2


def test_pause_and_resume(service: Running) -> None:
    """A paused job has no process and no slots; resumed, it is queued and runs again."""
    job = service.submit("train")
    service.await_state(job, "RUNNING")
    assert service.ask(job, "pause").status_code == 202
    service.await_state(job, "PAUSED")
    assert service.service.store.slots_held() == 0
    assert processes_with({f"DOWNPOUR_JOB={job}"}) == []
    service.ask(job, "resume")
    service.await_attempt(job, 2)
    service.await_state(job, "RUNNING")


def test_a_job_shows_why_it_waits(start: Start) -> None:
    """Its position and the limit that holds it are shown while it is queued, and no longer."""
    with start(slots=2) as running:
        first = running.submit("train")
        running.await_state(first, "RUNNING")
        second, third = running.submit("train"), running.submit("train")
        assert running.get(first)["waiting"] is None
        behind = "an earlier job waits for slots"
        assert running.get(third)["waiting"] == {"position": 2, "length": 2, "reason": behind}
        page = running.http.get(f"/jobs/{second}").text
        assert "1 of 2 in the queue: it needs 2 slots, and the service has 0 free" in page
        running.service.access.set_limits("default", ProjectLimits(running=0))
        reason = running.get(second)["waiting"]["reason"]
        assert reason == "the project's limit on running jobs is reached"
        for job in (third, second, first):
            running.ask(job, "cancel")
            running.await_state(job, "CANCELLED")
        assert running.get(second)["waiting"] is None


def test_a_job_shows_its_newest_snapshot_while_it_trains(start: Start) -> None:
    """It does not wait for the end of the attempt, which then counts as one that got further."""
    with start(retry_s=300.0) as running:
        job = running.submit("train")
        found = running.await_state(job, "RUNNING")
        assert found["snapshot"] is None
        write_snapshot(Path(found["settings"]["out"]) / "snapshots", 50, steps=100)
        eventually(
            lambda: running.get(job)["snapshot"] == "50", because=lambda: str(running.get(job))
        )
        row = running.service.store.get(job)
        assert (row.state, row.fruitless) == (JobState.RUNNING, 0)
        os.kill(pid_of(running, job), signal.SIGKILL)
        running.await_state(job, "RECOVERING")
        row = running.service.store.get(job)
        assert (row.snapshot, row.fruitless) == ("50", 1)


def test_an_end_without_an_outcome_is_explained_by_the_log(start: Start) -> None:
    """The reason quotes the last error in the log, in letters that are safe to show."""
    with start(retry_s=300.0) as running:
        job = running.submit("break")
        found = running.await_state(job, "RECOVERING")
        said = "Failed to connect to GCS within 60 seconds  [0m"
        assert found["reason"] == f"the runner ended without an outcome: {said}"


def test_jobs_wait_for_slots(start: Start) -> None:
    """With room for one job, the second starts when the first has ended."""
    with start(slots=2) as running:
        first, second = running.submit("train"), running.submit("train")
        running.await_state(first, "RUNNING")
        assert running.get(second)["state"] == "QUEUED"
        running.ask(first, "cancel")
        running.await_state(second, "RUNNING")
        assert running.get(first)["state"] == "CANCELLED"
        running.ask(second, "cancel")
        running.await_state(second, "CANCELLED")


@pytest.mark.parametrize("killed", [False, True])
def test_a_restarted_service_attaches_again(start: Start, killed: bool) -> None:
    """The job does not notice; what it has done meanwhile is taken in. No second runner starts."""
    with start() as before:
        job = before.submit("train")
        before.await_state(job, "RUNNING")
        pid = pid_of(before, job)
    if killed:
        os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)  # this process is its parent, as the service was
    with start() as after:
        if killed:
            after.await_attempt(job, 2)
            after.await_state(job, "RUNNING")
        else:
            assert after.get(job)["state"] == "RUNNING"
            assert pid_of(after, job) == pid
        after.ask(job, "cancel")
        found = after.await_state(job, "CANCELLED")
        assert found["attempt"] == (2 if killed else 1)


def test_an_order_costs_the_same_after_many(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service does not read a job's earlier orders for a new one, and misses none."""
    read = counted_bytes(monkeypatch)
    with start(driven=False) as running:
        job, store = running.submit("train"), running.service.store
        for number in range(30):
            store.note(store.get(job), "notice", text=str(number))
            read.append(-1)
        costs = [sum(part) for part in _split(read)]
        assert max(costs[-10:]) <= max(costs[1:11]) + 10
        with Journal(store.folder(job) / ORDERS) as other:
            other.append("notice", 0, text="from another process")
        assert running.ask(job, "pause").json()["state"] == JobState.PAUSED
        assert running.ask(job, "resume").json()["state"] == JobState.QUEUED
        events = store.events([job])
        numbers = [event["number"] for event in events if event["source"] == "service"]
        assert numbers == list(range(1, 35))
        assert events[-3]["data"]["text"] == "from another process"


def _split(read: list[int]) -> Iterator[list[int]]:
    """The bytes read, by order: -1 ends one."""
    part: list[int] = []
    for size in read:
        if size < 0:
            yield part
            part = []
        else:
            part.append(size)


def test_silence_changes_no_state(service: Running) -> None:
    """A stopped runner is alive: the page says that contact is lost, and nothing is started."""
    service.service.supervisor._silent_s = 0.0
    job = service.submit("train")
    service.await_state(job, "RUNNING")
    pid = pid_of(service, job)
    (service.service.store.folder(job) / "readings" / "alive").touch()
    os.kill(pid, signal.SIGSTOP)
    try:
        eventually(
            lambda: service.get(job)["contact"].startswith("lost since"), because="contact lost"
        )
        found = service.get(job)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (found["state"], found["attempt"]) == ("RUNNING", 1)


def test_no_process_of_a_job_outlives_it(service: Running) -> None:
    """Not one with another session, no environment, no parent and no ear for SIGTERM."""
    job = service.submit("hide")
    assert service.await_state(job, "SUCCEEDED", "FAILED")["state"] == "SUCCEEDED"
    hidden = int((service.service.store.folder(job) / "hidden").read_text())
    assert not Path("/proc", str(hidden)).exists()


def test_a_queue_is_read_again_after_a_change(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that a limit keeps back cost nothing until it, a job or a priority changes."""
    with start(driven=False) as running:
        store, supervisor = running.service.store, running.service.supervisor
        reads: list[int] = []
        read = store.list_queued

        def queued() -> list[QueuedJob]:
            reads.append(1)
            return read()

        monkeypatch.setattr(store, "list_queued", queued)

        def pass_over(times: int = 3) -> int:
            reads.clear()
            for _ in range(times):
                type(supervisor).reconcile(supervisor)
            return len(reads)

        running.service.access.set_limits("default", ProjectLimits(running=0))
        jobs = [running.submit("train", name=f"job {n}") for n in range(3)]
        assert pass_over() == 1
        assert pass_over() == 0
        running.http.patch(f"/api/v1/jobs/{jobs[2]}", json={"priority": 5})
        assert (pass_over(), pass_over()) == (1, 0)
        running.service.access.set_limits("default", ProjectLimits(running=1))
        assert pass_over() > 0
        states = [running.get(job)["state"] for job in jobs]
        assert (states[:2], states[2] in {"CHECKING", "STARTING", "RUNNING"}) == (
            ["QUEUED", "QUEUED"],
            True,
        )
        running.ask(jobs[2], "cancel", mode="now")
        for job in jobs[:2]:
            running.ask(job, "cancel")
        eventually(
            lambda: pass_over(1) is not None and running.get(jobs[2])["state"] == "CANCELLED",
            because=lambda: str(running.get(jobs[2])),
        )
        pass_over()
        assert pass_over() == 0


@pytest.fixture
def finished(start: Start) -> Iterator[Running]:
    """A service with jobs in several terminal states, and a paused one."""
    with start() as running:
        for stub in ("succeed", "bad", "fail"):
            running.await_state(running.submit(stub), "SUCCEEDED", "FAILED")
        paused = running.submit("train")
        running.await_state(paused, "RUNNING")
        running.ask(paused, "pause")
        running.await_state(paused, "PAUSED")
        running.service.supervisor.reconcile()  # what it writes of the end is in the database now
        yield running


def test_the_database_is_an_index(finished: Running, home: Path, tmp_path: Path) -> None:
    """Rebuilt from the folders, it holds the same jobs, attempts and events, these in the order in
    which they happened."""

    def content(store: JobStore) -> list[object]:
        jobs = [store.get(row.id) for row in reversed(store.page(JobFilter(), 100).jobs)]
        events = [
            {name: value for name, value in each.items() if name != "id"}
            for job in jobs
            for each in store.events([job.id])
        ]
        events.sort(key=lambda each: (each["job"], each["source"], each["number"]))
        return [jobs, [store.attempts(job.id) for job in jobs], events]

    store = finished.service.store
    before = content(store)
    engine = open_database(tmp_path / "rebuilt.db")
    for rebuilt in (JobStore(home, engine), store):
        assert rebuilt.rebuild() == 4
        assert content(rebuilt) == before
        for row in rebuilt.page(JobFilter(), 100).jobs:
            times = [each["time"] for each in rebuilt.events([row.id])]
            assert times == sorted(times)
    engine.dispose()


def test_a_crash_between_journal_and_database(
    start: Start, home: Path, place: DatabasePlace
) -> None:
    """An order that is in the journal and not in the database is taken in at the next start."""
    with start() as before:
        job = before.submit("train")
        before.await_state(job, "RUNNING")
        before.ask(job, "pause")
        before.await_state(job, "PAUSED")
        store = before.service.store
        store._append(job, 1, "state", {"state": "CANCELLED", "state_seq": 99})
    with start() as after:
        assert after.get(job)["state"] == "CANCELLED"
    engine = open_database(place)
    assert JobStore(home, engine).catch_up() == 0
    engine.dispose()
    assert (home / "jobs" / job / ORDERS).is_file()


STAYS = {
    JobState.QUEUED: "train",
    JobState.CHECKING: "stay-checking",
    JobState.STARTING: "stay-starting",
    JobState.RUNNING: "train",
    JobState.DEGRADED: "stay-degraded",
    JobState.PAUSING: "deaf",
    JobState.PAUSED: "train",
    JobState.RECOVERING: "die",
    JobState.STOPPING: "deaf",
}
"""For each state that is not terminal, a stub that stays in it, or is led into it by a verb."""
assert set(STAYS) == set(JobState) - TERMINAL


def led_into(running: Running, state: JobState) -> str:
    """A job that is in this state, and stays there by itself; its id."""
    if state is JobState.QUEUED:
        running.service.access.set_limits("default", ProjectLimits(running=0))
    job = running.submit(STAYS[state])
    if state in {JobState.PAUSING, JobState.PAUSED, JobState.STOPPING}:
        running.await_state(job, "RUNNING")
        running.ask(job, "cancel" if state is JobState.STOPPING else "pause")
    running.await_state(job, state)
    if state in ATTEMPTED:  # CHECKING is ordered before there is a process
        path = running.service.store.folder(job) / "attempt.json"
        eventually(path.is_file, because="the runner has begun")
    return job


@pytest.mark.parametrize("state", STAYS)
def test_cancel_in_each_state(start: Start, state: JobState) -> None:
    """A job can be cancelled at once in every state, in STOPPING after a gentler cancel."""
    retry_s = 200.0 if state is JobState.RECOVERING else 0.1
    with start(retry_s=retry_s) as running:
        job = led_into(running, state)
        answer = running.ask(job, "cancel", mode="now")
        assert answer.status_code == 202
        kill_processes([job])  # a deaf one would be killed after its grace
        assert running.await_state(job, "CANCELLED")["attempt"] <= 1
        assert processes_with({f"DOWNPOUR_JOB={job}"}) == []
        assert running.ask(job, "cancel").status_code == 409


PAUSES = {JobState.QUEUED, JobState.RECOVERING, JobState.RUNNING, JobState.DEGRADED}


@pytest.mark.parametrize("state", STAYS)
def test_pause_in_each_state(start: Start, state: JobState) -> None:
    """A job that waits or trains is paused without a process; in another state this is refused, and
    nothing changes."""
    retry_s = 200.0 if state is JobState.RECOVERING else 0.1
    with start(retry_s=retry_s) as running:
        job = led_into(running, state)
        answer = running.ask(job, "pause")
        if state in PAUSES:
            assert answer.status_code == 202
            running.await_state(job, "PAUSED")
            assert processes_with({f"DOWNPOUR_JOB={job}"}) == []
        else:
            assert (answer.status_code, answer.json()["got"]) == (409, state)
            assert running.get(job)["state"] == state
        end(running, job)


AFTER_KILL = {
    JobState.CHECKING: JobState.RECOVERING,
    JobState.STARTING: JobState.RECOVERING,
    JobState.RUNNING: JobState.RECOVERING,
    JobState.DEGRADED: JobState.RECOVERING,
    JobState.PAUSING: JobState.PAUSED,
    JobState.STOPPING: JobState.CANCELLED,
}
"""What a killed runner leads to from each state with a process; the others have none to kill."""
assert set(AFTER_KILL) == ATTEMPTED


@pytest.mark.parametrize("state", AFTER_KILL)
def test_a_kill_in_each_state(start: Start, state: JobState) -> None:
    """From each state the job comes to the one that the table names, with no process left."""
    with start(retry_s=200.0) as running:
        job = led_into(running, state)
        os.kill(pid_of(running, job), signal.SIGKILL)
        found = running.await_state(job, AFTER_KILL[state])
        assert found["attempt"] == 1
        assert processes_with({f"DOWNPOUR_JOB={job}"}) == []
        end(running, job)


def end(running: Running, job: str) -> None:
    """End a job in whatever state it is, so that the test leaves no process."""
    running.ask(job, "cancel")
    kill_processes([job])
    running.await_state(job, *TERMINAL)
