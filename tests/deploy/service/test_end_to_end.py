"""A real training job through `downpour serve`: killed service, killed runner, clone, success."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.service.launcher import processes_with
from tests.support import tiny_job
from tests.support.cli_process import PATIENCE_S
from tests.support.eventually import eventually
from tests.support.served import Served, served_in


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A service in a folder with the tiny job."""
    tiny_job.write_job(tmp_path)
    with served_in(tmp_path) as found:
        yield found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_job_outlives_the_service_and_its_own_runner(served: Served) -> None:
    """Kill the service: the job trains on. Stop the runner: an alert, and nothing else. Kill it:
    the job resumes from its snapshot. A clone of its newest snapshot trains to the end."""
    # Behind a slow link, so that a job that is waited for leaves the cores to those that wait.
    more = ("--data", "data", "--shards-in", "processes", "--max-iter", 10**7, "--link", "rtt=20ms")
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
    assert min(kept) >= int(paused["snapshot"]), "it began with the snapshot"
    assert summary["test_accuracy"] > 0.9
    assert served.ask(job, "cancel")["state"] == "CANCELLED"


def _steps(served: Served, job: str) -> int:
    """The steps in the newest reading, which the runner writes."""
    path = served.folder / "home" / "jobs" / job / "readings" / "newest.json"
    return int(json.loads(path.read_text())["readings"]["steps"])
