"""Kill the parts of the training service at random moments, and count what is lost.

    python -m tests.bench.service_kills [--kills 20] [--seed 1] [--home FOLDER]

Two real jobs train, one with its shards in processes and `logged`, one in Ray. At random moments,
drawn from the seed, one process is killed with SIGKILL: the service, a runner, the head of Ray,
Spark's JVM, a shard, a worker. After the last kill both jobs train to their end.

Before each kill and after each recovery the shards of the job with logs say which pushes they have
applied. They acknowledge none before it is in the log, so that none may be lacking later; and at
the end each has applied as many as the workers have taken steps.

The exit status is 1 if a job is lost, had two runners at a time, does not end, or leaves a process
or shared memory behind, or if a push is lost or applied twice.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from deploy.run.folder import CLUSTER, SUMMARY
from deploy.run.summary import Summary
from deploy.runner.job_folder import RUN
from deploy.service.client import ServiceClient
from deploy.service.job_store import JOBS
from deploy.service.launcher import processes_with
from ps import AdminClient, Cluster
from ps.shared_memory import shm_files
from shards.errors import DownpourError
from tests.bench.report import save
from tests.support import tiny_job
from tests.support.fresh_clone import ROOT
from tests.support.job_processes import kill_processes
from tests.support.ports import free_port

_COMMAND = "from deploy.cli.app import main; main()"
KINDS = {
    "service": None,
    "runner": "deploy.runner",
    "Ray head": "gcs_server|raylet",
    "Spark JVM": "org.apache.spark",
    "shard": "child_main|ray::",
    "worker": "spark.daemon|pyspark/daemon",
}
"""What is killed, and the words of its command line."""
_STUCK_S = 420.0
_LEFT_S = 30.0
_MORE_STEPS = 1000  # of each worker, after the last kill


def _parent(pid: int) -> int | None:
    """The process that started another; None if that one has ended."""
    try:
        return psutil.Process(pid).ppid()
    except psutil.Error:
        return None


class Acknowledged:
    """The pushes that the shards of a job with logs have applied; `lost` are those they lack later.

    `compared` counts the comparisons of two answers of the shards.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self.versions: list[int] = []
        self.lost = self.compared = 0

    def compare(self) -> None:
        """Ask the shards, if any answer now."""
        with suppress(DownpourError):
            with AdminClient(Cluster.load(self._run / CLUSTER), patience_s=5.0) as admin:
                found = [status.version for status in admin.status()]
            if self.versions:
                before = zip(self.versions, found, strict=True)
                self.lost += sum(max(0, earlier - now) for earlier, now in before)
                self.compared += 1
            self.versions = found

    def miscounted(self, steps: int) -> int:
        """How many pushes more or fewer than these the run has applied at its end."""
        summary = msgspec.json.decode((self._run / SUMMARY).read_bytes(), type=Summary)
        return abs(summary.updates - steps)


class Trial:
    """A service that is killed and started again, its jobs, and what was seen of them."""

    def __init__(self, folder: Path, seed: int, *options: str) -> None:
        """`options` are further ones of `downpour serve`."""
        self.folder = folder
        self.checkout = ROOT
        self._options = options
        self.dice = random.Random(seed)
        self.port = free_port()
        self.client = ServiceClient(f"http://127.0.0.1:{self.port}")
        self.killed: Counter[str] = Counter()
        self.doubled = 0
        self.back_s: list[float] = []
        self.jobs: list[str] = []
        self.start()

    def start(self) -> None:
        environ = os.environ | {"DOWNPOUR_HOME": str(self.folder / "home")}
        words = ["serve", "--port", str(self.port), "--retry-s", "0.5", "--limit", "free-mb=0"]
        log = (self.folder / "service.log").open("ab")
        self.service = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, *words, *self._options],
            cwd=self.checkout,  # it imports the packages there
            env=environ,
            stdout=log,
            stderr=log,
        )
        self.client.call("GET", "/jobs", patience_s=120.0)

    def submit(self, solver: Path, **settings: Any) -> None:
        given = {"solver": str(solver), "data": str(solver.parent / "data"), **settings}
        body = {"settings": given, "name": f"job {len(self.jobs)}"}
        self.jobs.append(str(self.client.post("/jobs", body)["id"]))

    def states(self) -> list[str]:
        return [str(self.client.get(f"/jobs/{job}")["state"]) for job in self.jobs]

    def lengthened(self, job: str) -> int:
        """Have each worker of a job take some more steps; returns those of all together."""
        found = self.client.get(f"/jobs/{job}")
        workers = found["settings"]["workers"]
        each = found["head"]["steps"] // workers + _MORE_STEPS
        self.client.post(f"/jobs/{job}:set", {"settings": {"max_iter": each}})
        return int(each * workers)

    def run_folder(self, job: str) -> Path:
        return self.folder / "home" / JOBS / job / RUN

    def until(self, holds: Callable[[list[str]], bool]) -> bool:
        """Whether the states of the jobs come to that; two runners of a job are counted."""
        end = time.monotonic() + _STUCK_S
        while time.monotonic() < end:
            self.count_runners()
            with suppress(DownpourError):
                if holds(self.states()):
                    return True
            time.sleep(0.5)
        return False

    def count_runners(self) -> None:
        for job in self.jobs:
            found = {pid: _parent(pid) for pid in self.processes(job, "deploy.runner")}
            # A child that has not run its own program yet looks like its runner.
            self.doubled += sum(parent not in found for parent in found.values()) > 1

    def processes(self, job: str, words: str) -> list[int]:
        """The processes of a job with one of these words in their command line."""
        found = []
        for pid in processes_with({f"DOWNPOUR_JOB={job}"}):
            with suppress(psutil.Error):
                line = " ".join(psutil.Process(pid).cmdline())
                if any(word in line for word in words.split("|")):
                    found.append(pid)
        return found

    def kill_one(self) -> None:
        """Kill one process of a kind that is there."""
        for kind in self.dice.sample(list(KINDS), len(KINDS)):
            words = KINDS[kind]
            begun = time.monotonic()
            if words is None:
                self.service.kill()
                self.service.wait()
                self.start()
                self.back_s.append(time.monotonic() - begun)
            else:
                pids = self.processes(self.dice.choice(self.jobs), words)
                if not pids:
                    continue
                with suppress(OSError):
                    os.kill(self.dice.choice(pids), signal.SIGKILL)
            self.killed[kind] += 1
            print(f"killed: {kind} ({self.killed.total()})", flush=True)
            return

    def end(self) -> None:
        with suppress(OSError):
            self.service.send_signal(signal.SIGTERM)
            self.service.wait()
        kill_processes(self.jobs)


def left(jobs: list[str], before: set[str]) -> list[str]:
    """What the jobs have left: processes, and shared memory without an owner, but for `before`."""
    pids = processes_with({f"DOWNPOUR_JOB={job}" for job in jobs})
    return [*(f"process {pid}" for pid in pids), *sorted(_ownerless_memory() - before)]


def _ownerless_memory() -> set[str]:
    """The names of segments and sockets in shared memory that no living process has locked.

    That of other jobs on this machine, which train, has an owner.
    """
    found = set()
    for path in shm_files.ROOT.glob("downpour-*"):
        with suppress(OSError):
            file = os.open(path, os.O_RDONLY)
            try:
                if shm_files.owner_is_gone(file):
                    found.add(path.name)
            finally:
                os.close(file)
    return found


def run(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Play the trial; returns its figures."""
    before = _ownerless_memory()
    solver = tiny_job.write_job(folder)
    trial = Trial(folder, seed)
    try:
        more = {"max_iter": 10**6, "snapshot_every": "2s", "snapshot_keep": 3}
        trial.submit(solver, shards_in="processes", durability="logged", **more)
        trial.submit(solver, shards_in="ray", **more)
        logged = Acknowledged(trial.run_folder(trial.jobs[0]))
        lost = stuck = 0
        begun = time.monotonic()
        for number in range(kills):
            if not trial.until(lambda states: set(states) <= {"RUNNING", "DEGRADED"}):
                stuck += 1
                print(f"stuck after {number} kills: {trial.states()}", flush=True)
                break
            logged.compare()
            time.sleep(trial.dice.uniform(0.0, 6.0))
            logged.compare()
            trial.kill_one()
        trial.until(lambda states: set(states) <= {"RUNNING", "DEGRADED"})
        logged.compare()
        took_s = time.monotonic() - begun
        wanted = [trial.lengthened(job) for job in trial.jobs]
        ended = trial.until(lambda states: set(states) == {"SUCCEEDED"})
        lost = 0 if ended else sum(state != "SUCCEEDED" for state in trial.states())
        deadline = time.monotonic() + _LEFT_S
        while (found := left(trial.jobs, before)) and time.monotonic() < deadline:
            time.sleep(1.0)
        attempts = [trial.client.get(f"/jobs/{job}")["attempt"] for job in trial.jobs]
        return {
            "seed": seed, "kills": sum(trial.killed.values()), "killed": dict(trial.killed),
            "lost": lost, "doubled": trial.doubled, "stuck": stuck, "left": found,
            "attempts": attempts, "service_back_s": trial.back_s, "took_s": took_s,
            "pushes": sum(logged.versions), "pushes_lost": logged.lost,
            "pushes_miscounted": logged.miscounted(wanted[0]) if ended else 0,
            "comparisons": logged.compared,
        }  # fmt: skip
    finally:
        trial.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        figures = run(Path(folder), chosen.kills, chosen.seed)
    save("service_kills", figures)
    print(figures)
    bad = ("lost", "doubled", "stuck", "left", "pushes_lost", "pushes_miscounted")
    return 1 if any(figures[name] for name in bad) else 0


if __name__ == "__main__":
    sys.exit(main())
