"""Executors of Spark come and go while they train: dynamic allocation, and kill -9 of one.

    python -m tests.chaos.executors

A standalone cluster of this machine begins with one executor of one slot. Six partitions wait, so
Spark adds another. When both train, one is killed with its Python processes; its task is retried,
and Spark starts a new one. Each row is pushed once an epoch, and the sum of all pushes proves it.
When training is over, Spark removes the executors that are idle.

Prints what was seen, and fails if a promise was not kept.
"""

import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from pyspark.sql import SparkSession

import ps
import worker
from deploy.java import java_environment
from tests.support.clusters import standalone_spark
from tests.support.eventually import eventually

ROWS, WORKERS, EPOCHS, BATCH = 1200, 6, 2, 10
STEP_S = 0.05
IDLE_S, WITHIN_S = 5, 240.0
SETTINGS = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.initialExecutors": "1",
    "spark.dynamicAllocation.maxExecutors": "2",
    "spark.dynamicAllocation.executorIdleTimeout": f"{IDLE_S}s",
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
}


def train(args: Any, ctx: worker.Context) -> None:
    """Push the sum of the ids of each batch."""
    for batch in ctx.batches(BATCH, epochs=EPOCHS):
        time.sleep(STEP_S)
        with ctx.worker.step(samples=len(batch["id"])) as step:
            step.pull()
            step.push({"sum": [-float(batch["id"].sum())]})


def executors() -> dict[int, psutil.Process]:
    """The executors that this process's cluster has, by process id."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if "org.apache.spark.executor.CoarseGrainedExecutorBackend" in command:
            found[process.pid] = process
    return found


def kill_one(seen: set[int]) -> None:
    """Kill an executor and its Python processes once two of them train."""
    eventually(lambda: len(executors()) == 2, because=lambda: "two executors", within_s=WITHIN_S)
    time.sleep(2)  # the steps of some tasks, so that the killed one was in the middle
    seen |= set(executors())
    victim = max(executors().values(), key=lambda process: process.create_time())
    for process in [victim, *victim.children(recursive=True)]:
        process.kill()
    eventually(
        lambda: len(executors().keys() - seen) == 1,
        because=lambda: "a new executor",
        within_s=WITHIN_S,
    )
    seen |= set(executors())


def main() -> None:
    os.environ |= java_environment() | {"PYSPARK_PYTHON": sys.executable}
    with tempfile.TemporaryDirectory() as folder, standalone_spark(Path(folder)) as master:
        spark = SparkSession.builder.master(master).config(map=SETTINGS).getOrCreate()
        seen: set[int] = set()
        chaos = threading.Thread(target=kill_one, args=[seen])
        chaos.start()
        trained = worker.run(
            spark.range(0, ROWS, 1, WORKERS),
            train,
            params=ps.Dense.like({"sum": np.zeros(1, np.float32)}, rate=1.0),
            strategy="downpour:scale=1",
            staleness=None,
            shards_in="processes",
        )
        chaos.join()
        found, wanted = float(trained.params["sum"][0]), EPOCHS * sum(range(ROWS))
        lasting = [report.incarnation for report in trained.outcome.reports]
        print(f"executors seen: {len(seen)}; attempts of the workers: {lasting}")
        print(f"sum of what was pushed: {found:.0f}, expected {wanted}")
        eventually(lambda: not executors(), because=lambda: "idle executors end", within_s=WITHIN_S)
        print("idle executors were removed")
        spark.stop()
    sys.exit(0 if found == wanted and len(seen) >= 3 else 1)


if __name__ == "__main__":
    main()
