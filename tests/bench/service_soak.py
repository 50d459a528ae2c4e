"""The memory of a service over an hour of live jobs and viewers: what it is, whether it grows.

    python -m tests.bench.service_soak [--seconds 3600] [--jobs 20] [--viewers 50]

The jobs are runners that train nothing (tests/support/stub_runner.py). As those of real jobs, their
folders get a reading each second and an event each minute; their series are as long as a series
gets from the start, because memory that holds a longer series is no leak. The memory is sampled
every ten seconds; its growth is the slope of a line through the samples after the first tenth, in
which libraries and caches fill up.
"""

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from deploy.runner import job_folder
from deploy.runner.journal import Journal
from deploy.runner.readings import FigureTally, ReadingFiles
from deploy.service.job_store import JOBS
from tests.bench.bench_service import end_runners, lines_read, rss_mb, served, submit
from tests.bench.bench_service_page import await_state, write_series
from tests.bench.report import Goal, goals, save
from tests.support import tiny_job
from tests.support.job_readings import training_figures

_SAMPLE_S = 10.0
_EVENT_S = 60.0


class LiveJob:
    """What the runner of a job writes into its folder."""

    def __init__(self, folder: Path) -> None:
        self._readings = ReadingFiles(folder / job_folder.READINGS)
        self._tally = FigureTally()
        self._journal = Journal(folder / job_folder.EVENTS)

    def write(self, second: int) -> None:
        """The figures after this many seconds, and each minute an event."""
        figures = training_figures(
            9 * second, 10**6, elapsed_s=float(second), loss=1 / second, clocks=(3 * second,) * 3
        )
        self._readings.write(self._tally.reading(1, time.time(), figures, 576 * second, 0.5))
        if second % _EVENT_S == 0:
            self._journal.append("notice", 1, text=f"after {second} s")


def soaked(home: Path, solver: Path, jobs: int, viewers: int, seconds: int) -> dict[str, float]:
    """Serve the jobs to the viewers; returns the figures of the service's memory."""
    with ThreadPoolExecutor(viewers) as pool, served(home) as (process, http, _):
        ids = [submit(http, solver, "deaf") for _ in range(jobs)]  # these cost no processor
        for job in ids:
            await_state(http, job, "RUNNING")
            write_series(home, job, 10**6)
        live = [LiveJob(home / JOBS / job) for job in ids]
        url = str(http.base_url.join("/api/v1/stream"))
        streams = [pool.submit(lines_read, url) for _ in range(viewers)]
        begun = time.monotonic()
        at, weights = list[float](), list[float]()
        for second in range(1, seconds + 1):
            for one in live:
                one.write(second)
            if second % _SAMPLE_S == 0:
                at.append(time.monotonic() - begun)
                weights.append(rss_mb(process))
            time.sleep(max(0.0, begun + second - time.monotonic()))
    end_runners(home)
    warm = len(at) // 10
    slope = float(np.polyfit(at[warm:], weights[warm:], 1)[0])
    return {
        "seconds": at[-1], "rss_first_mb": weights[warm], "rss_last_mb": weights[-1],
        "rss_most_mb": max(weights), "growth_mb_an_hour": 3600 * slope,
        "lines_a_viewer": statistics.mean(stream.result() for stream in streams),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--viewers", type=int, default=50)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        home.mkdir(mode=0o700)
        solver = tiny_job.write_job(Path(folder))
        figures = soaked(home, solver, chosen.jobs, chosen.viewers, chosen.seconds)
    save("service_soak", figures)
    print({name: round(value, 2) for name, value in figures.items()})
    goals(
        [
            Goal("service, live jobs and viewers, most", figures["rss_most_mb"], 150, "MB"),
            Goal("its growth", figures["growth_mb_an_hour"], 1, "MB/h"),
        ]
    )


if __name__ == "__main__":
    main()
