"""Kills at random moments, by seed: of the service and of runners, while jobs train."""

import json
import os
import random
import signal
import time
from contextlib import ExitStack, suppress

import pytest

from tests.support.eventually import eventually
from tests.support.job_processes import processes_of
from tests.support.service_in_process import Running, Start


def runners(job: str) -> list[int]:
    """The runners of a job. A process between its fork and its own program is none: of several only
    those count that are there a moment later."""
    pids = processes_of(job)
    if len(pids) > 1:
        time.sleep(0.2)
        pids = [pid for pid in pids if pid in processes_of(job)]
    return pids


@pytest.mark.parametrize("seed", [1, 2])
def test_no_job_is_lost_doubled_or_stuck(start: Start, seed: int) -> None:
    """After ten kills each job trains with one runner; ended, it leaves no process."""
    dice = random.Random(seed)
    with ExitStack() as stack:
        service = stack.enter_context(start())
        jobs = [service.submit("train") for _ in range(3)]
        kills = 0
        for _ in range(10):
            job = dice.choice(jobs)
            service.await_state(job, "RUNNING", "RECOVERING", "STARTING")
            if dice.random() < 0.3:
                stack.close()
                service = stack.enter_context(start())
            elif (found := runners(job)) and service.get(job)["state"] == "RUNNING":
                os.kill(found[0], signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(found[0], 0)  # this process is its parent, as the service was
                kills += 1
            assert all(len(runners(each)) <= 1 for each in jobs), f"seed {seed}"
        for job in jobs:
            eventually(lambda job=job: _trains(service, job), because=f"seed {seed}")  # type: ignore[misc]
            service.ask(job, "cancel")
            service.await_state(job, "CANCELLED")
            assert runners(job) == []
        attempts = sum(service.get(job)["attempt"] for job in jobs)
        assert attempts == len(jobs) + kills, f"seed {seed}"


def _trains(service: Running, job: str) -> bool:
    """Whether the job is RUNNING, with exactly the runner that its folder names."""
    if service.get(job)["state"] != "RUNNING":
        return False
    folder = service.service.store.folder(job)
    pid = json.loads((folder / "attempt.json").read_text())["pid"]
    return runners(job) == [pid]
