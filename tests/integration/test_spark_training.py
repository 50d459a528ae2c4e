"""Training over Spark, Ray and ZeroMQ for real, where every push counts as one."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ps.launch.launcher import Placement
from shards.errors import GiveUp
from shards.shard_status import Standing
from tests.support.ones_job import Broken, DiesOnce, counted, ones_job, rows
from worker import spark
from worker.job.runner import run_job
from worker.strategies import BSP, Downpour


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("home", Placement)
def test_every_push_is_applied_once(spark: Any, home: Placement) -> None:
    """The weights count workers times steps pushes on every shard, and the gap is within bound.

    Wherever the shards live, workers of this host share memory with them.
    """
    df = spark.createDataFrame(rows(40)).repartition(2)
    outcome = run_job(df, ones_job(steps=30, workers=2, shards_in=home))
    assert counted(outcome.weights) == {-60.0}
    assert [status.version for status in outcome.statuses] == [60, 60]
    assert max(status.max_clock_gap for status in outcome.statuses) <= 3
    assert sorted(report.steps for report in outcome.reports) == [30, 30]
    assert {report.transports for report in outcome.reports} == {("shm", "shm")}
    assert {w.standing for s in outcome.statuses for w in s.workers} == {Standing.LEFT}


def test_more_workers_than_slots(spark: Any) -> None:
    """Six workers on two slots run in waves; none that has not started holds the others back."""
    df = spark.createDataFrame(rows(60)).repartition(6)
    outcome = run_job(df, ones_job(steps=10, workers=6, bound=0))
    assert counted(outcome.weights) == {-60.0}
    assert len(outcome.reports) == 6


def test_empty_and_ragged_partitions(spark: Any) -> None:
    """Empty partitions never register; one ten times longer than the others trains like them."""
    frame = spark.createDataFrame(rows(66)).repartition(1).rdd
    sizes = {0: 0, 1: 50, 2: 5, 3: 0, 4: 6, 5: 5}
    homes = [home for home, size in sizes.items() for _ in range(size)]
    dealt = (
        frame.zipWithIndex()
        .map(lambda pair: (homes[pair[1]], pair[0]))
        .partitionBy(len(sizes), lambda home: home)
        .values()
    )
    df = spark.createDataFrame(dealt, "label long, data binary")
    outcome = run_job(df, ones_job(steps=15, workers=4))
    assert counted(outcome.weights) == {-60.0}
    assert sorted(report.worker for report in outcome.reports) == ["w1", "w2", "w4", "w5"]


def test_killed_python_worker(spark: Any, tmp_path: Path) -> None:
    """kill -9 of a Python worker in mid-step: the job ends, nothing is applied twice or lost."""
    df = spark.createDataFrame(rows(40)).repartition(2)
    job = ones_job(partial(DiesOnce, tmp_path / "died", 20), steps=40, workers=2, lease_s=3.0)
    outcome = run_job(df, job)
    assert (tmp_path / "died").exists()
    assert counted(outcome.weights) == {-80.0}
    for status in outcome.statuses:
        assert sum(worker.takeovers for worker in status.workers) == 1


def test_worker_that_fails_for_good(spark: Any, tmp_path: Path) -> None:
    """A worker that fails at every attempt ends the job with its own words and a snapshot."""
    df = spark.createDataFrame(rows(40)).repartition(1)
    job = ones_job(Broken, steps=40, workers=1)
    with pytest.raises(GiveUp, match=r"the model broke.*resume from .*snapshots"):
        run_job(df, job, snapshots=tmp_path / "snapshots")


@pytest.mark.parametrize("shards", [2, 1])
def test_resume_goes_on_where_it_stopped(spark: Any, tmp_path: Path, shards: int) -> None:
    """A job resumed from a snapshot takes only the steps that remained, whatever its shards."""
    df = spark.createDataFrame(rows(40)).repartition(2)
    first = run_job(df, ones_job(steps=10, workers=2), snapshots=tmp_path)
    assert first.snapshot == str(tmp_path / "10")
    second = run_job(df, ones_job(steps=25, workers=2, shards=shards), resume=first.snapshot)
    assert counted(second.weights) == {-50.0}
    assert len(second.statuses) == shards
    assert sorted(report.steps for report in second.reports) == [15, 15]
    assert sum(worker.takeovers for worker in second.statuses[0].workers) == 0


@pytest.mark.parametrize(
    "strategy",
    [
        Downpour(n_push=4, n_fetch=4, scale=1.0),
        Downpour(n_push=2, warm_steps=6, scale=1.0),
    ],
)
def test_accumulated_pushes(spark: Any, strategy: Downpour) -> None:
    """n_push steps travel in one push, and none of them is lost at the end."""
    df = spark.createDataFrame(rows(40)).repartition(2)
    outcome = run_job(df, ones_job(steps=21, workers=2, bound=4, strategy=strategy))
    assert counted(outcome.weights) == {-42.0}
    assert outcome.statuses[0].version == 2 * -(-21 // strategy.n_push)


def test_synchronous_rounds(spark: Any) -> None:
    """bsp averages one push of every worker into one version."""
    df = spark.createDataFrame(rows(40)).repartition(2)
    outcome = run_job(df, ones_job(steps=12, workers=2, bound=0, strategy=BSP()))
    versions = outcome.statuses[0].version
    assert counted(outcome.weights) == {-float(versions)}
    assert 12 <= versions <= 24  # A worker that starts late or ends last makes rounds of its own.


CRASH = """An error occurred while calling o2707.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed 4 \
times, most recent failure: Lost task 0.3 in stage 1.0 (TID 7) (10.0.0.1 executor driver): \
org.apache.spark.SparkException: Python worker exited unexpectedly (crashed).
\tat org.apache.spark.api.python.BasePythonRunner.read(PythonRunner.scala:1)
Caused by: java.io.EOFException"""
LOST = """An error occurred while calling o35.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed 4 \
times, most recent failure: Lost task 0.3 in stage 1.0 (TID 7) (10.0.0.1 executor 1): \
ExecutorLostFailure (executor 1 exited caused by one of the running tasks) Reason: Out of memory"""
OTHER = """An error occurred while calling o35.collectToPython.
: java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext."""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (CRASH, "a Python worker of Spark exited unexpectedly, killed or crashed"),
        (LOST, "ExecutorLostFailure .* Reason: Out of memory$"),
        (OTHER, "java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext"),
        ("ModuleNotFoundError: No module named 'x'", "No module named 'x' .* set PYSPARK_PYTHON"),
    ],
)
def test_task_reason_names_the_cause(text: str, reason: str) -> None:
    """Of a worker that was killed, a lost executor, and a module that only the driver has."""
    from worker.spark import task_reason

    assert re.search(reason, task_reason(text))
    assert "An error occurred" not in task_reason(text)


def test_task_reason_finds_the_error() -> None:
    """Out of Spark's report comes the one line that the task raised."""
    text = (
        "Job aborted due to stage failure: Task 1 in stage 3.0 failed 4 times\n"
        "org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n"
        '  File "worker_task.py", line 3, in <module>\n'
        "shards.errors.BadInput: row 7: expected a label in [0, 10), got 11\n\n\tat org.apache"
    )
    from worker.spark import task_reason

    assert task_reason(text) == "BadInput: row 7: expected a label in [0, 10), got 11"


def test_arrow_rows_reach_the_worker_unchanged(spark: Any) -> None:
    """`run_tasks` hands each partition's batches to the task and returns what it yields; what is
    tried later has a higher attempt, in another stage, too."""

    def task(batches: Any, partition: int, attempt: int, gpus: Any) -> Any:
        assert gpus == [], "local mode assigns none"
        count = sum(batch.num_rows for batch in batches)
        schema = pa.schema([("rows", pa.int64()), ("attempt", pa.int64())])
        yield pa.record_batch([pa.array([count]), pa.array([attempt])], schema=schema)

    schema = pa.schema([("rows", pa.int64()), ("attempt", pa.int64())])
    df = spark.createDataFrame(rows(10)).repartition(2)
    found = spark_tasks(df, task, schema)
    assert len(found) == 2
    assert sum(count for count, _ in found) == 10
    later = spark_tasks(df, task, schema)
    assert min(attempt for _, attempt in later) > max(attempt for _, attempt in found)


def spark_tasks(df: Any, task: Any, schema: Any) -> list[Any]:
    return spark.run_tasks(df, task, schema, "test-tag")
