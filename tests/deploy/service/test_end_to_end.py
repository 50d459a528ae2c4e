"""A real training job through `downpour serve`: killed service, killed runner, clone, success."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.service.client import ServiceClient
from deploy.service.launcher import processes_with
from tests.support import tiny_job
from tests.support.cli_process import Child
from tests.support.clusters import QUICK_JAVA
from tests.support.eventually import eventually
from tests.support.ports import free_port

PATIENCE_S = 600.0
START = "from deploy.cli import main; main()"


class Served:
    """A `downpour serve` of its own process, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = ServiceClient(self.url)
        self.start()

    def start(self) -> None:
        options = ("serve", "--port", self.port, "--retry-s", 0.1, "--limit", "silent-s=3")
        home = str(self.folder / "home")
        # Its own output goes to a file: nobody reads a pipe here.
        self.child = Child(self.folder, *options, DOWNPOUR_HOME=home, **QUICK_JAVA)
        self.client.call("GET", "/jobs", patience_s=PATIENCE_S)

    def kill(self) -> None:
        self.child.process.send_signal(signal.SIGKILL)
        self.child.process.wait()

    def get(self, job: str) -> dict[str, Any]:
        return self.client.get(f"/jobs/{job}")

    def ask(self, job: str, verb: str, **body: Any) -> dict[str, Any]:
        return self.client.post(f"/jobs/{job}:{verb}", body)

    def await_state(self, job: str, state: str, attempt: int) -> dict[str, Any]:
        def there() -> bool:
            found = self.get(job)
            return (found["state"], found["attempt"]) == (state, attempt)

        def seen() -> str:
            return f"{self.get(job)} {list(self.client.logs(job, None, 4096, follow=False))}"

        eventually(there, because=seen, within_s=PATIENCE_S)
        return self.get(job)

    def command(self, *words: object) -> tuple[int, dict[str, Any]]:
        """Run a command of the client with --json; returns its status and answer."""
        done = subprocess.run(
            [sys.executable, "-c", START, *map(str, words), "--server", self.url, "--json"],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    def runner(self, job: str) -> int:
        path = self.folder / "home" / "jobs" / job / "attempt.json"
        return int(json.loads(path.read_text())["pid"])


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A service in a folder with the tiny job. Whatever it has started is ended."""
    tiny_job.write_job(tmp_path)
    found = Served(tmp_path)
    yield found
    jobs = found.client.get("/jobs")["jobs"]
    found.kill()
    for pid in processes_with({f"DOWNPOUR_JOB={job['id']}" for job in jobs}):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_job_outlives_the_service_and_its_own_runner(served: Served) -> None:
    """Kill the service: the job trains on. Stop the runner: an alert, and nothing else. Kill it:
    the job resumes from its snapshot. A clone of its newest checkpoint trains to the end."""
    more = ("--data", "data", "--shards-in", "processes", "--max-iter", 10**7)
    status, answer = served.command(
        *("submit", "solver.prototxt", *more, "--snapshot-every", "1s", "--snapshot-keep", 3)
    )
    assert status == 0
    job = answer["id"]
    served.await_state(job, "RUNNING", 1)
    runner = served.runner(job)
    snapshots = served.folder / "home" / "jobs" / job / "run" / "snapshots"
    eventually(
        lambda: any(snapshots.glob("*/manifest.json")), because="a snapshot", within_s=PATIENCE_S
    )

    served.kill()
    steps = eventually(lambda: _steps(served, job), because="steps", within_s=PATIENCE_S)
    eventually(
        lambda: _steps(served, job) > steps,
        because="steps without a service",
        within_s=PATIENCE_S,
    )
    served.start()
    served.await_state(job, "RUNNING", 1)
    assert served.runner(job) == runner

    os.kill(runner, signal.SIGSTOP)
    try:
        eventually(
            lambda: "silent" in served.get(job)["alerts"],
            because="the alert of a stopped runner",
            within_s=PATIENCE_S,
        )
        found = served.get(job)
        assert (found["state"], found["attempt"], served.runner(job)) == ("RUNNING", 1, runner)
    finally:
        os.kill(runner, signal.SIGCONT)
    steps = _steps(served, job)
    eventually(lambda: _steps(served, job) > steps, because="steps afterwards", within_s=PATIENCE_S)
    assert served.await_state(job, "RUNNING", 1)["id"] == job

    os.kill(runner, signal.SIGKILL)
    found = served.await_state(job, "RUNNING", 2)
    assert int(found["snapshot"]) > 0
    log = "".join(served.client.logs(job, "driver-2", 1 << 16, follow=False))
    assert "starting Spark" in log
    eventually(
        lambda: served.get(job)["head"].get("steps", 0) > 2 * int(found["snapshot"]),
        because="more steps than the snapshot had",
        within_s=PATIENCE_S,
    )
    assert served.ask(job, "pause")["state"] == "PAUSING"
    paused = served.await_state(job, "PAUSED", 2)
    assert processes_with({f"DOWNPOUR_JOB={job}"}) == []

    end = int(paused["snapshot"]) + 20
    clone = served.ask(job, "clone", snapshot="newest", settings={"max_iter": end})
    status, ended = served.command("wait", clone["id"])
    assert (status, ended["state"]) == (0, "SUCCEEDED"), ended
    run = served.folder / "home" / "jobs" / clone["id"] / "run"
    summary = json.loads((run / "summary.json").read_text())
    # A worker that was ahead of the other at the snapshot has more than its share already.
    assert summary["updates"] >= 2 * end
    kept = [int(path.name) for path in (run / "snapshots").iterdir() if path.name.isdecimal()]
    # On a busy machine the first snapshot is due before the first step.
    assert min(kept) >= int(paused["snapshot"]), "it began with the checkpoint"
    assert summary["test_accuracy"] > 0.9
    assert served.ask(job, "cancel")["state"] == "CANCELLED"


def _steps(served: Served, job: str) -> int:
    """The steps in the newest reading, which the runner writes."""
    path = served.folder / "home" / "jobs" / job / "readings" / "newest.json"
    return int(json.loads(path.read_text())["readings"]["steps"])
