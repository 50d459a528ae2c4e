"""Spark's reports of failures, in one line: what a task raised, or what Java said."""

import re

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException

from shards.errors import BadInput, GiveUp

SPARK_ERRORS = (PySparkException, Py4JError, OSError)
BAD_INPUT = "BadInput: "


def task_reason(text: str) -> str:
    """The error that a Python task raised, found in Spark's report of stages and tracebacks."""
    lines = [line.strip() for line in text.splitlines()]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|[A-Z]\w+): ", line)]
    ours = [line for line in raised if line.startswith("shards.errors.")]
    for line in ours or raised[-1:]:
        return line.removeprefix("shards.errors.")
    return next((line for line in lines if line), "no reason given")


def task_error(text: str) -> GiveUp:
    """The error to raise for a task that failed for good, parsed from Spark's report."""
    why = task_reason(text)
    error = (
        BadInput(why.removeprefix(BAD_INPUT))
        if why.startswith(BAD_INPUT)
        else GiveUp(f"a Spark task failed for good: {why.removeprefix('GiveUp: ')}")
    )
    if "Traceback (most recent call last)" in text:
        python = (line for line in text.splitlines() if not re.match(r"\s+at |\t", line))
        error.add_note("\n".join(["Spark reports:", *python]).rstrip())
    return error


def reason(error: BaseException) -> str:
    """An error in one line; Java's own message if it came from Java."""
    text = str(error)
    if isinstance(error, Py4JJavaError):
        text = str(error.java_exception.toString())
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
