"""Spark's reports of failures, in one line: what a task raised, or what Java said."""

import re
import sys
from contextlib import suppress
from subprocess import TimeoutExpired

from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from pyspark import SparkContext
from pyspark.errors import PySparkException

from shards.errors import BadInput, GiveUp
from worker.spark.parquet_faults import parquet_fault

SPARK_ERRORS = (PySparkException, Py4JError, OSError)
BAD_INPUT = "BadInput: "
GAVE_UP = "GiveUp: "
PYTHON_REMEDY = (
    f"set PYSPARK_PYTHON before the session starts, here to {sys.executable}, on a cluster to a"
    " Python with what workers need (docs/how-to/clusters.md)"
)


_SHUT_DOWN = "SparkContext was shut down"  # a JVM that ends first cancels its jobs
_OUT_OF_MEMORY = 52  # the exit status: SparkExitCode.OOM
_EXIT_S = 5.0  # a JVM closes its sockets before it has ended
_CRASH = "Python worker exited unexpectedly"  # Spark's words, from one release to the next
_CRASHED = (
    "a Python worker of Spark exited unexpectedly, killed or crashed: see whether the machine ran"
    " out of memory (fewer task slots or smaller batches need less), and Spark's log"
)
_LOST_TASK = re.compile(r"most recent failure: Lost task .*?\(TID \d+\)(?: \(.*?\))?: (.+)")
_NO_REASON = "An error occurred while calling "  # Py4J's first line, with the name of a method


def task_reason(text: str) -> str:
    """The error that a Python task raised, found in Spark's report of stages and tracebacks."""
    if fault := parquet_fault(text):
        return BAD_INPUT + fault
    lines = [line.strip() for line in text.splitlines()]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|[A-Z]\w+): ", line)]
    own_errors = [line for line in raised if line.startswith("shards.errors.")]
    for line in own_errors or raised[-1:]:
        return _with_remedy(line.removeprefix("shards.errors."))
    if _CRASH in text:
        return _CRASHED
    if lost := _LOST_TASK.search(text):
        return lost[1]  # such as the loss of an executor
    said = (line.removeprefix(": ") for line in lines if line and not line.startswith(_NO_REASON))
    return next(said, "no reason given")


def _with_remedy(line: str) -> str:
    """The error of a task; with a remedy for a module that only the driver's Python has."""
    missing = line.startswith("ModuleNotFoundError: ")
    return f"{line} in the Python that Spark runs: {PYTHON_REMEDY}" if missing else line


def task_error(text: str) -> GiveUp:
    """The error to raise for a task that failed for good, parsed from Spark's report."""
    why = task_reason(text)
    error = (
        BadInput(why.removeprefix(BAD_INPUT))
        if why.startswith(BAD_INPUT)
        else GiveUp(f"a Spark task failed for good: {why.removeprefix(GAVE_UP)}")
    )
    if "Traceback (most recent call last)" in text:
        python = (line for line in text.splitlines() if not re.match(r"\s+at |\t", line))
        error.add_note("\n".join(["Spark reports:", *python]).rstrip())
    return error


def jvm_gone(error: BaseException) -> GiveUp | None:
    """The error to raise where a call of Spark failed because its JVM has ended; else None."""
    ended = isinstance(error, ConnectionError | Py4JNetworkError)
    if (ended or _SHUT_DOWN in str(error)) and _ran_out_of_memory():
        return GiveUp(
            "Spark's JVM has ended, out of memory: give the driver more, by spark.driver.memory in"
            " spark-defaults.conf"
        )
    if ended:
        return GiveUp("Spark's JVM has ended, killed or crashed: start a new Spark session")
    return None


def _ran_out_of_memory() -> bool:
    """Return whether the JVM that this process has started said so by its exit status."""
    started = getattr(SparkContext._gateway, "proc", None)
    if started is None:  # spark-submit has
        return False
    with suppress(TimeoutExpired):
        return bool(started.wait(_EXIT_S) == _OUT_OF_MEMORY)
    return False


def root_cause(printed: str) -> str | None:
    """The innermost cause in a stack trace of Java, or else the first line with an error.

    The first line of a trace often says only that something failed, as ExceptionInInitializerError.
    """
    lines = [line.strip() for line in printed.splitlines()]
    causes = [line for line in lines if line.startswith("Caused by: ")]
    if causes:
        return causes[-1].removeprefix("Caused by: ")
    return next((line for line in lines if re.search("Error|Exception", line)), None)


def reason(error: BaseException) -> str:
    """An error in one line; Java's own message if it came from Java."""
    text = str(error)
    if fault := parquet_fault(text):
        return fault
    if isinstance(error, Py4JJavaError):
        text = str(error.java_exception.toString())
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
