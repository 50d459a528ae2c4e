"""Replace the service by another release while jobs train: for how long is there no page?

    python -m tests.bench.service_upgrade [--jobs 10]

The jobs are real, each with a Spark and a shard of its own. On a cluster most of their work is done
elsewhere: here all their processes but the runners stand still meanwhile, by SIGSTOP. The service
is ended by SIGTERM, and its successor, a copy of the packages with another version, is started on
the same home. Meanwhile a reader asks for the page. Each job must train on in its first attempt and
in the same runner, and end with a snapshot when the new service is asked to cancel it.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, pairwise
from pathlib import Path
from threading import Event, Thread
from urllib.error import URLError
from urllib.request import urlopen

from deploy.service.launcher import processes_with
from tests.bench.report import Goal, goals
from tests.bench.service_kills import Trial, left
from tests.support import tiny_job
from tests.support.eventually import eventually
from tests.support.fresh_clone import ROOT

_GOAL_S = 5.0
_MORE_STEPS = 50
_READ_S = 0.02
_NEXT = "0.2.0"
_PACKAGES = ("cupy_kernels", "shards", "ps", "worker", "deploy")


def main() -> None:
    """Start, upgrade, stop, and print the goals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        goals(run(Path(folder), options.jobs))


def run(folder: Path, jobs: int) -> list[Goal]:
    """Upgrade a service with this number of jobs; returns the goals."""
    solver, known = tiny_job.write_job(folder), set(left([], set()))
    successor = write_successor(folder / "successor")
    trial = Trial(folder, 1, "--slots", str(jobs))
    try:
        for _ in range(jobs):
            trial.submit(
                solver, shards_in="processes", shards=1, workers=1, max_iter=10**8,
                snapshot_every="5m",
            )  # fmt: skip
        assert trial.until(lambda states: set(states) == {"RUNNING"}), trial.states()
        runners = [trial.processes(job, "deploy.runner") for job in trial.jobs]
        page = f"http://127.0.0.1:{trial.port}/"
        with hold_still(trial, chain(*runners)), read_again(page) as answered:
            time.sleep(2.0)
            trial.service.send_signal(signal.SIGTERM)
            trial.service.wait()
            trial.checkout = successor
            trial.start()
            time.sleep(2.0)
        assert read_version(trial) == _NEXT
        before = read_steps(trial)
        assert trial.until(
            lambda _: all(
                now >= then + _MORE_STEPS
                for now, then in zip(read_steps(trial), before, strict=True)
            )
        ), before
        assert [trial.processes(job, "deploy.runner") for job in trial.jobs] == runners
        rows = [trial.client.get(f"/jobs/{job}") for job in trial.jobs]
        stopped = sum((row["state"], row["attempt"]) != ("RUNNING", 1) for row in rows)
        for job in trial.jobs:
            trial.client.post(f"/jobs/{job}:cancel", {})
        assert trial.until(lambda states: set(states) == {"CANCELLED"}), trial.states()
        assert all(trial.client.get(f"/jobs/{job}")["snapshot"] for job in trial.jobs)
        eventually(
            lambda: not left(trial.jobs, known), because=lambda: str(left(trial.jobs, known))
        )
    finally:
        trial.end()
    gap_s = max(after - before for before, after in pairwise(answered))
    return [
        Goal(f"{jobs} jobs: stopped by the upgrade", stopped, 0),
        Goal(f"{jobs} jobs: without a page", gap_s, _GOAL_S, "s"),
    ]


def write_successor(folder: Path) -> Path:
    """Copy the packages there, as those of the next release, and compile them."""
    for name in _PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "ps" / "__init__.py").open("a") as module:
        module.write(f'\n__version__ = "{_NEXT}"\n')
    subprocess.run([sys.executable, "-m", "compileall", "-q", folder], check=True)
    return folder


@contextmanager
def hold_still(trial: Trial, runners: Iterable[int]) -> Iterator[None]:
    """Stop all processes of the jobs but these runners while the context lasts."""
    pids = set(processes_with({f"DOWNPOUR_JOB={job}" for job in trial.jobs})) - set(runners)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def read_version(trial: Trial) -> str:
    """The version of the service that answers."""
    with urlopen(f"http://127.0.0.1:{trial.port}/healthz", timeout=30) as answer:
        return str(json.load(answer)["version"])


def read_steps(trial: Trial) -> list[int]:
    """The steps of each job."""
    return [int(trial.client.get(f"/jobs/{job}")["head"].get("steps", 0)) for job in trial.jobs]


@contextmanager
def read_again(url: str) -> Iterator[list[float]]:
    """Ask for a page again and again; gives the times at which it was read whole."""
    answered: list[float] = []
    over = Event()

    def read() -> None:
        while not over.wait(_READ_S):
            with suppress(URLError, OSError), urlopen(url, timeout=30) as page:
                page.read()
                answered.append(time.monotonic())

    reader = Thread(target=read)
    reader.start()
    try:
        yield answered
    finally:
        over.set()
        reader.join()


if __name__ == "__main__":
    main()
