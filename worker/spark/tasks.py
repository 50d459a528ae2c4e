"""Python over the partitions of a DataFrame, or over none: ordinary tasks on Arrow batches."""

import os
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark import SparkFiles, TaskContext, cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from ps import logs
from ps.shared_memory.shm_files import temporary_folder
from shards.errors import BadInput, GiveUp
from worker.spark import settings as spark_settings
from worker.spark.executors import DRIVER
from worker.spark.failures import (
    BAD_INPUT,
    GAVE_UP,
    SPARK_ERRORS,
    jvm_gone,
    reason,
    task_error,
    task_reason,
)
from worker.spark.signals import end_at_hangup

_MAX_TASKS = 10_000  # to search for the one that failed
_MOST_RAISED = 4  # times that a task may raise the same error: Spark's usual number of attempts
_CHOOSING = Lock()  # threads that train at once share the session's setting
_CONNECT_S, _LONGEST_ANSWER = 3.0, 4096
ANY_PYTHON = "python3"  # Spark's choice unless one is configured: the first on PATH


@dataclass(frozen=True)
class NumberedTasks:
    """Tasks of a session that is not Spark Connect's, which read their rows themselves.

    They run as a job of the core of Spark, of which the first costs less than one of Spark SQL.
    """

    sparkSession: SparkSession  # noqa: N815  # as a DataFrame has it
    count: int

    @property
    def frame(self) -> DataFrame:
        """A DataFrame of one row a partition, its number."""
        return self.sparkSession.range(0, self.count, 1, self.count)


TaskInput = DataFrame | NumberedTasks


def run_tasks(
    df: TaskInput, task: Callable[..., Iterator[Any]], schema: Any, tag: str, job: str = ""
) -> list[Any]:
    """The rows of `map_tasks`, computed now; numbered tasks get no batches.

    Tasks are ordinary Spark tasks: there may be more than slots, and a failed one is retried alone.
    `tag` names them for `interrupt`. When one fails for good, its own error is raised if that was a
    BadInput, and otherwise a GiveUp that quotes it; a note holds the traceback.
    """
    add, remove, _ = _tagging(df)
    try:
        add(tag)
        if isinstance(df, NumberedTasks):
            return _run_numbered(df, _host(task, job))
        return map_tasks(df, task, schema, job).collect()
    except SPARK_ERRORS as error:
        raise jvm_gone(error) or task_error(str(error)) from None
    finally:
        with suppress(*SPARK_ERRORS):  # the JVM may have ended; its error is raised above
            remove(tag)


def map_tasks(
    df: DataFrame, task: Callable[..., Iterator[Any]], schema: Any, job: str = ""
) -> DataFrame:
    """Map each partition of `df` by `task(batches, partition, attempt, gpus)`, when it is read.

    `batches` are Arrow record batches, and so is what `task` yields, with the schema `schema`, of
    Arrow or of Spark.
    `attempt` is higher for each later attempt at a partition, whether its task or its whole stage
    is retried. `gpus` are the addresses of the GPUs that Spark assigned to the task, empty if Spark
    schedules none. `job` names the tasks in what they log.
    """
    return map_batches(
        df,
        _host(task, job),
        from_arrow_schema(schema) if isinstance(schema, pa.Schema) else schema,
    )


def _host(task: Callable[..., Iterator[Any]], job: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """The function that runs `task` within a task of Spark."""
    settings = logs.current()

    def host(batches: Iterator[Any]) -> Iterator[Any]:
        context = TaskContext.get()
        assert context is not None, "mapInArrow runs inside a task"
        end_at_hangup()
        logs.set_up(settings, job=job, worker=f"w{context.partitionId()}")
        gpu = (context.resources() or {}).get("gpu")
        gpus = list(gpu.addresses) if gpu is not None else []
        # Spark's attempt number would restart at 0 if a lost shuffle made Spark retry the stage.
        yield from task(batches, context.partitionId(), context.taskAttemptId(), gpus)

    return host


def _run_numbered(
    tasks: NumberedTasks, host: Callable[[Iterator[Any]], Iterator[Any]]
) -> list[Any]:
    """The rows of the batches that `host` yields in each task, as tuples."""

    def rows(_: int, __: Iterable[int]) -> Iterator[tuple[Any, ...]]:
        for batch in host(iter(())):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    numbers = tasks.sparkSession.sparkContext.parallelize(range(tasks.count), tasks.count)
    return numbers.mapPartitionsWithIndex(rows).collect()


def map_batches(
    df: DataFrame, task: Callable[[Iterator[Any]], Iterator[Any]], schema: Any
) -> DataFrame:
    """`df.mapInArrow`; local tasks run in this process's Python unless another is configured.

    Spark's default is the first `python3` on PATH, which is a different Python where a virtual
    environment is not activated.
    """
    with _CHOOSING:
        chosen = python_of(df) != ANY_PYTHON or "PYSPARK_PYTHON" in os.environ
    if chosen or not runs_here(df):
        return df.mapInArrow(task, schema)
    context = df.sparkSession.sparkContext
    with _CHOOSING:
        context.pythonExec = sys.executable
        try:
            return df.mapInArrow(task, schema)
        finally:
            context.pythonExec = ANY_PYTHON


def share(df: DataFrame, values: NDArray[Any]) -> Callable[[], NDArray[Any]]:
    """A function that returns `values` in any task over `df`, and is small to send with each.

    PySpark itself broadcasts a task of more than 1 MiB. Spark Connect would send it in one message
    with each query, of at most 128 MiB; so there the values are a file of the session, which is
    sent once, in pieces, and kept until the session ends. Raises GiveUp.
    """
    if is_classic(df):
        return lambda: values
    name = f"downpour-{secrets.token_hex(8)}.npy"
    try:
        with temporary_folder("share") as folder:
            np.save(folder / name, values)
            df.sparkSession.addArtifacts(str(folder / name), file=True)
    except SPARK_ERRORS as error:
        raise GiveUp(f"sending {values.nbytes} bytes to Spark failed: {reason(error)}") from None
    return lambda: np.load(SparkFiles.get(name))


def is_classic(df: TaskInput) -> bool:
    """Return whether the session is not Spark Connect's."""
    return isinstance(df, NumberedTasks) or hasattr(df, "_jdf")


def python_of(df: TaskInput) -> str:
    """The Python that Spark runs for tasks over `df`, as far as the driver knows."""
    return str(df.sparkSession.sparkContext.pythonExec) if is_classic(df) else "on the server"


def master_host(df: TaskInput) -> str | None:
    """The host of Spark's master or of its Connect server; None for an embedded Spark and YARN."""
    session = df.sparkSession
    if not is_classic(df):
        builder = getattr(session.client, "_builder", None)
        return str(getattr(builder, "host", "")) or None
    try:
        servers = spark_settings.addresses(
            str(session.sparkContext.master), {"HADOOP_CONF_DIR": ""}
        )
    except BadInput:  # local[N]
        return None
    return servers[0][0] if servers else None


def _tagging(df: TaskInput) -> tuple[Callable[[str], Any], ...]:
    """Functions that add a tag to this thread's jobs, remove it, and cancel the jobs with a tag.

    A classic session's tags do not reach the job behind `collect`, so its context's are used.
    """
    session = df.sparkSession
    if not is_classic(df):
        return session.addTag, session.removeTag, session.interruptTag
    context = session.sparkContext
    return context.addJobTag, context.removeJobTag, context.cancelJobsWithTag


def interrupt(df: TaskInput, tag: str) -> None:
    """Cancel the jobs with `tag`; their tasks end within moments."""
    with suppress(*SPARK_ERRORS):
        _, _, cancel = _tagging(df)
        cancel(tag)


def final_failure(df: TaskInput, tag: str) -> GiveUp | None:
    """The error of a task with `tag` that would fail at every attempt, if any has.

    That is a BadInput, or any error that the code of a task has raised four times. Spark itself
    reports an error after as many attempts as it was told to make, which is many where processes
    are often killed. Over Spark Connect the error is not known earlier, so this returns None.
    """
    if not is_classic(df):
        return None
    with suppress(*SPARK_ERRORS):
        context = df.sparkSession.sparkContext._jsc.sc()
        tracker, store = context.statusTracker(), context.statusStore()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForTag(tag)]
        stages = [stage for job in jobs if job.isDefined() for stage in job.get().stageIds()]
        for stage in stages:
            info = tracker.getStageInfo(stage)
            if not info.isDefined() or not info.get().numFailedTasks():
                continue
            tasks = store.taskList(stage, info.get().currentAttemptId(), _MAX_TASKS)
            raised = Counter[tuple[int, str]]()
            for task in (tasks.apply(n) for n in range(tasks.size())):
                if not task.errorMessage().isDefined():
                    continue
                text = str(task.errorMessage().get())
                why = task_reason(text)
                raised[task.index(), why] += why.startswith(GAVE_UP)
                if why.startswith(BAD_INPUT) or raised[task.index(), why] == _MOST_RAISED:
                    return task_error(text)
    return None


def runs_here(df: TaskInput) -> bool:
    """Return whether the tasks over `df` are known to run on this machine."""
    return is_classic(df) and str(df.sparkSession.sparkContext.master).startswith("local")


def runs_this_python(df: TaskInput) -> bool:
    """Return whether the tasks over `df` are known to run in this Python, on this machine."""
    return runs_here(df) and python_of(df) == sys.executable


def task_slots(df: TaskInput) -> int | None:
    """The number of tasks over `df` that run at once; None if it is not known or may change.

    It is not known over Spark Connect, and may change where executors are allocated dynamically.
    """
    if not is_classic(df):
        return None
    context = df.sparkSession.sparkContext
    with suppress(*SPARK_ERRORS):
        if context.getConf().get("spark.dynamicAllocation.enabled", "false") == "true":
            return None
        executors = context._jsc.sc().statusStore().executorList(True)
        summaries = [executors.apply(n) for n in range(executors.size())]
        is_local = runs_here(df)  # the driver is the only executor then, and none otherwise
        slots = sum(
            executor.maxTasks() for executor in summaries if is_local or executor.id() != DRIVER
        )
        return slots or None
    return None


def check_guarded(df: TaskInput) -> None:
    """Raise BadInput if a secret in a closure over `df` could be intercepted on the network.

    Or if a standalone master runs programs of strangers.
    """
    session = df.sparkSession
    names = (*spark_settings.GUARDS, spark_settings.SUBMISSION_PORT)
    if is_classic(df):
        conf = session.sparkContext.getConf()
        settings = {name: conf.get(name) for name in names}
        master = str(session.sparkContext.master)
    else:
        try:
            settings = {name: session.conf.get(name, None) for name in names}
            master = str(session.conf.get("spark.master", ""))
        except SPARK_ERRORS as error:
            raise GiveUp(f"Spark Connect does not show its settings: {reason(error)}") from None
    spark_settings.check_guarded(master, settings)
    check_submissions(master, settings)


def check_submissions(master: str, settings: Mapping[str, str | None]) -> None:
    """Raise BadInput if a standalone master at `master` takes programs over HTTP.

    Spark asks nobody there for its secret, so a stranger could run programs on the workers.
    `settings` are the session's, which may name the port.
    """
    if not master.startswith("spark://") or spark_settings.stays_here(master):
        return
    port = spark_settings.find_submission_port(settings)
    for host, _ in spark_settings.addresses(master, {}):
        if _takes_submissions(host, port):
            raise BadInput(
                f"Spark at {master}",
                expected="spark.master.rest.enabled=false in the master's spark-defaults.conf "
                "where shards are open to other hosts (docs/explanation/security.md), "
                "or give --plaintext",
                got=f"a master that runs anyone's programs, submitted to port {port}",
            )


def _takes_submissions(host: str, port: int) -> bool:
    connection = HTTPConnection(host, port, timeout=_CONNECT_S)
    try:
        connection.request("GET", "/v1/submissions/status/none")
        return b"serverSparkVersion" in connection.getresponse().read(_LONGEST_ANSWER)
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def check_sendable(function: object, args: object) -> None:
    """Raise BadInput unless a function and its arguments can be sent to tasks."""
    for label, value in (("args", args), ("train", function)):
        try:
            cloudpickle.dumps(value)
        except Exception as error:  # noqa: BLE001  # any object may fail in its own way
            why = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
            raise BadInput(
                f"run: {label}",
                expected="what can be sent to Spark's tasks",
                got=f"{why}: create such objects within the function, or pass a path",
            ) from None
