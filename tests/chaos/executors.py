"""Executors of Spark come and go while they train: dynamic allocation, and kill -9 of one.

    python -m tests.chaos.executors

A standalone cluster of this machine begins with one executor of one slot. Six partitions wait, so
Spark adds another. In the middle of its first attempt one worker kills its executor, with all
Python processes of it; Spark starts another executor and retries the task. Each row is pushed once
an epoch, and the sum of all pushes proves it. When training is over, Spark removes idle executors.

Prints what was seen, and fails if a promise was not kept.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
from pyspark.sql import SparkSession

import ps
import worker
from deploy.clusters.java import spark_environment
from tests.support.clusters import standalone_spark
from tests.support.eventually import eventually

ROWS, WORKERS, EPOCHS, BATCH = 1200, 6, 2, 10
STEP_S, VICTIM, KILLED_AT = 0.05, 1, 8
WITHIN_S = 240.0
SETTINGS: dict[str, bool | float | int | str | None] = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.initialExecutors": "1",
    "spark.dynamicAllocation.maxExecutors": "2",
    "spark.dynamicAllocation.executorIdleTimeout": "5s",
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
}


def is_executor(process: psutil.Process) -> bool:
    """Whether a process is an executor of Spark."""
    try:
        return "org.apache.spark.executor.CoarseGrainedExecutorBackend" in process.cmdline()
    except psutil.Error:
        return False


def train(seen: str, ctx: worker.Context) -> None:
    """Push the sum of the ids of each batch; one worker kills its executor in the middle.

    `seen` is the folder for a file an attempt: the partition, the attempt, the executor's pid.
    """
    executor = next(one for one in psutil.Process().parents() if is_executor(one))
    first = not list(Path(seen).glob(f"{ctx.rank}-*"))
    (Path(seen) / f"{ctx.rank}-{ctx.attempt}-{executor.pid}").touch()
    for number, batch in enumerate(ctx.batches(BATCH, epochs=EPOCHS)):
        if first and (ctx.rank, number) == (VICTIM, KILLED_AT):
            for process in [executor, *executor.children(recursive=True)]:
                process.kill()
        time.sleep(STEP_S)
        with ctx.worker.step(samples=len(batch["id"])) as step:
            step.pull()
            step.push({"sum": [-float(batch["id"].sum())]})


def executors() -> list[int]:
    """The process ids of the executors that this process's cluster has."""
    return [one.pid for one in psutil.Process().children(recursive=True) if is_executor(one)]


def main() -> None:
    os.environ |= spark_environment() | {"PYSPARK_PYTHON": sys.executable}
    with tempfile.TemporaryDirectory() as folder, standalone_spark(Path(folder)) as master:
        seen = Path(folder) / "seen"
        seen.mkdir()
        spark = SparkSession.builder.master(master).config(map=SETTINGS).getOrCreate()
        trained = worker.run(
            spark.range(0, ROWS, 1, WORKERS),
            train,
            str(seen),
            params=ps.Dense.like({"sum": np.zeros(1, np.float32)}, rate=1.0),
            strategy="downpour:scale=1",
            staleness=None,
            shards_in="processes",
        )
        found, wanted = float(trained.params["sum"][0]), float(EPOCHS * sum(range(ROWS)))
        attempts = sorted(tuple(map(int, one.name.split("-"))) for one in seen.iterdir())
        print("partition, attempt, executor:", *attempts, sep="\n  ")
        print(f"sum of what was pushed: {found:.0f}, expected {wanted:.0f}")
        eventually(lambda: not executors(), because=lambda: "idle executors end", within_s=WITHIN_S)
        print("idle executors were removed")
        spark.stop()
    killed, *retried = [executor for partition, _, executor in attempts if partition == VICTIM]
    others = {executor for _, _, executor in attempts} - {killed}
    kept = found == wanted and retried and killed not in retried and len(others) >= 2
    sys.exit(0 if kept else "a promise was not kept")


if __name__ == "__main__":
    main()
