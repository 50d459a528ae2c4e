"""LeNet on MNIST over Ray, Spark and ZeroMQ: where a worker's time goes, and what a second adds.

One and two workers train in turns in one process, so that both see the machine as it is. A run's
rate is taken from the times at which shard 0 applied its updates, without the first ones, in which
workers start. Run with nothing else on the machine: with two workers, two cores are all it has.
"""

import argparse
import os
import statistics
import time
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from deploy.clusters import ray_cluster
from deploy.clusters.java import spark_environment
from ps import Cluster
from shards.messages import LiveSettings
from shards.shard_status import ShardStatus
from tests.bench.report import Goal, goals, save
from tests.support import lenet_job
from worker import spark
from worker.job.runner import run_job
from worker.training.evaluation import Evaluation
from worker.training.training_loop import WorkerReport

_WARM_UPDATES = 40


class _Times:
    """Collects when shard 0 applied what."""

    def __init__(self) -> None:
        self._rows: list[NDArray[np.void]] = []

    def started(self, cluster: Cluster, restored: list[int] | None) -> None:
        pass

    def progressed(self, statuses: list[ShardStatus], records: list[NDArray[np.void]]) -> None:
        self._rows.append(records[0])

    def evaluated(self, result: Evaluation, weights: NDArray[np.float32]) -> None:
        pass

    def resharded(self, cluster: Cluster) -> None:
        pass

    def settings_changed(self, settings: LiveSettings) -> None:
        pass

    def notice(self, text: str) -> None:
        print(text)

    def rate(self) -> float:
        """Samples a second between the first updates and the last."""
        rows = np.concatenate(self._rows)[_WARM_UPDATES:]
        return float(rows["samples"][1:].sum() / (rows["time"][-1] - rows["time"][0]))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=300, help="steps a worker and round")
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args()
    table = lenet_job.rows()
    rates: dict[int, list[float]] = {1: [], 2: []}
    reports: list[WorkerReport] = []
    with (
        ray_cluster.connect(None, 2),
        spark.start_session(None, 2, app="bench", env=spark_environment()) as session,
    ):
        frames = {w: session.createDataFrame(table).repartition(w).cache() for w in rates}
        for number in range(given.rounds):
            for workers, df in frames.items():
                times = _Times()
                job = lenet_job.lenet_job(
                    steps=given.steps, workers=workers, shards=2, bound=4, seed=number
                )
                before, started = _cpu_seconds(), time.monotonic()
                outcome = run_job(df, job, observer=times)
                rates[workers].append(times.rate())
                if workers == 2:
                    reports += outcome.reports
                print(
                    f"{workers} worker(s): {rates[workers][-1]:7.0f} samples/s,"
                    f" {_cpu_seconds() - before:5.1f} CPU s"
                    f" in {time.monotonic() - started:5.1f} s"
                )
    finish(rates, reports)


def finish(rates: dict[int, list[float]], reports: list[WorkerReport]) -> None:
    """Write the figures down and judge them."""
    split = {part: _share(reports, part) for part in _PARTS}
    median = {workers: statistics.median(values) for workers, values in rates.items()}
    for part, share in split.items():
        print(f"{part:12} {share:6.1%} of a worker's time")
    figures: dict[str, Any] = {"samples_per_second": rates, "split": split}
    save("training", figures)
    goals(
        [
            Goal("network + serialise, share of a worker's time", _wire(split), 0.10),
            Goal("samples/s of 2 workers over 1", median[2] / median[1], 1.7, "x", at_least=True),
        ]
    )


_PARTS = ("compute_s", "data_s", "waited_s", "network_s", "serialise_s")


def _share(reports: list[WorkerReport], part: str) -> float:
    total = sum(report.seconds for report in reports)
    return float(sum(getattr(report, part) for report in reports) / total)


def _wire(split: dict[str, float]) -> float:
    return split["network_s"] + split["serialise_s"]


def _cpu_seconds() -> float:
    """CPU seconds of this process and of all that descend from it and live."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process(os.getpid()).children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


if __name__ == "__main__":
    main()
