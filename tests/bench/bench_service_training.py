"""What the service costs a job: the same training by `train`, as a job, and as a job with viewers.

    python -m tests.bench.bench_service_training [--steps 1500] [--rounds 3] [--viewers 50]

LeNet trains on the packaged MNIST with two workers and one shard in processes, so that two cores
are busy throughout and each second that the service uses is missing. The three ways take turns,
in another order in each round. Compared are the seconds of training of the runs' own summaries,
and those from the command, or the submission, to the end; and the CPU seconds of the service. The
viewers are open streams of the job, as a page has one.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec
import psutil

from deploy.run.folder import SUMMARY
from deploy.run.summary import Summary
from deploy.runner.job_folder import RUN
from deploy.service.job_store import JOBS
from tests.bench.bench_service import client_of, lines_read
from tests.bench.report import Goal, goals, save
from tests.support.ports import free_port

_COMMAND = "from deploy.cli.app import main; main()"
_DEMO = Path(__file__).parents[2] / "deploy" / "demo"
_ENDS = ("SUCCEEDED", "FAILED", "CANCELLED")
PLAIN, JOB, VIEWED = "train", "job", "job with viewers"


class Took(NamedTuple):
    """The seconds of one run: of its training, from its command to its end, and the service's."""

    training_s: float
    whole_s: float
    service_cpu_s: float = 0.0


def settings(steps: int) -> dict[str, object]:
    """The options of the training, as the service takes them."""
    return {
        "solver": str(_DEMO / "lenet_solver.prototxt"), "data": str(_DEMO / "mnist"),
        "shards_in": "processes", "shards": 1, "workers": 2, "max_iter": steps,
    }  # fmt: skip


def trained_s(run: Path) -> float:
    return msgspec.json.decode((run / SUMMARY).read_bytes(), type=Summary).seconds


def by_train(out: Path, steps: int) -> Took:
    """Train by `downpour train`, in a process of its own."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in settings(steps).items()]
    command = [sys.executable, "-c", _COMMAND, "train", *words, f"--out={out}"]
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return Took(trained_s(out), time.perf_counter() - begun)


@contextmanager
def service(home: Path) -> Iterator[tuple[psutil.Process, httpx.Client]]:
    """A `downpour serve` in a process of its own, and a client."""
    port = free_port()
    environ = os.environ | {"DOWNPOUR_HOME": str(home)}
    words = [sys.executable, "-c", _COMMAND, "serve", "--port", str(port), "--limit", "free-mb=0"]
    with (home.parent / "service.log").open("ab") as log:
        process = subprocess.Popen(words, env=environ, stdout=log, stderr=log)
    with client_of(process, home, port) as http:
        yield psutil.Process(process.pid), http


def by_service(home: Path, steps: int, viewers: int) -> Took:
    """Train as a job of a service, with this many open streams of it."""
    with ThreadPoolExecutor(max(1, viewers)) as pool, service(home) as (process, http):
        before = sum(process.cpu_times()[:2])
        begun = time.perf_counter()
        job = str(http.post("/api/v1/jobs", json={"settings": settings(steps)}).json()["id"])
        url = str(http.base_url.join(f"/api/v1/stream?jobs={job}"))
        streams = [pool.submit(lines_read, url) for _ in range(viewers)]
        while (state := http.get(f"/api/v1/jobs/{job}").json()["state"]) not in _ENDS:
            time.sleep(0.5)
        whole_s = time.perf_counter() - begun
        assert state == "SUCCEEDED", http.get(f"/api/v1/jobs/{job}").json()
        cpu_s = sum(process.cpu_times()[:2]) - before
    assert all(stream.result() > 0 for stream in streams)
    return Took(trained_s(home / JOBS / job / RUN), whole_s, cpu_s)


def ratio(runs: dict[str, list[Took]], above: str, below: str, what: str) -> float:
    """The median over the rounds of one way's seconds over another's."""
    pairs = zip(runs[above], runs[below], strict=True)
    found: list[float] = [getattr(one, what) / getattr(other, what) for one, other in pairs]
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--viewers", type=int, default=50)
    chosen = parser.parse_args()
    ways = [PLAIN, JOB, VIEWED]
    runs: dict[str, list[Took]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as name:
        for number in range(chosen.rounds):
            for way in ways[number % 3 :] + ways[: number % 3]:
                folder = Path(name) / f"{way.replace(' ', '-')}-{number}"
                folder.mkdir()
                if way == PLAIN:
                    took = by_train(folder / "run", chosen.steps)
                else:
                    viewers = chosen.viewers if way == VIEWED else 0
                    took = by_service(folder / "home", chosen.steps, viewers)
                runs[way].append(took)
                print(
                    f"{way:17} training {took.training_s:6.2f} s, whole {took.whole_s:6.2f} s,"
                    f" CPU of the service {took.service_cpu_s:5.2f} s",
                    flush=True,
                )
    more = {
        "job_over_train": ratio(runs, JOB, PLAIN, "training_s"),
        "job_over_train_whole": ratio(runs, JOB, PLAIN, "whole_s"),
        "viewed_over_job": ratio(runs, VIEWED, JOB, "training_s"),
    }
    kept = {way: [took._asdict() for took in found] for way, found in runs.items()}
    save("service_training", {**more, "runs": kept})
    slower = {name: 100 * (value - 1) for name, value in more.items()}
    goals(
        [
            Goal("a job over train: training", slower["job_over_train"], 2, "%"),
            Goal("a job over train: start to end", slower["job_over_train_whole"], 2, "%"),
            Goal(f"{chosen.viewers} viewers: training", slower["viewed_over_job"], 1, "%"),
        ]
    )


if __name__ == "__main__":
    main()
