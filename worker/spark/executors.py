"""Runs a Python program on every executor of a Spark as a plain process, not as a Python worker.

Spark's Python workers exist only where Python, its version and its packages are as Spark wants
them. A program that looks for what is missing must run where they are not. So Spark pipes rows
through a shell there, which runs the Python that Spark would run, and reports how that ended.
"""

import json
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from pyspark.sql import SparkSession

from shards.errors import BadInput, GiveUp
from worker.spark.failures import SPARK_ERRORS, task_reason
from worker.spark.settings import parse_local_master

DRIVER = "driver"
"""The id of the driver among executors."""
_ROUNDS = 5
_POLL_S = 0.2
_RUN = """\
printf '@host %s\\n' "$(uname -n)"
{ said=$("$0" -c "$1" 2>&1 >&3 3>&-); status=$?; } 3>&1
printf '@status %s %s\\n' "$status" "$(printf %s "$said" | tail -n 1)"
sleep "$2"
"""
_OUTPUT = re.compile(r"@host (.*)\n((?:.*\n)*?)@status (\d+) ?(.*)")


class ExecutorOutput(NamedTuple):
    """A program's output on one executor's host: its lines, and the last of standard error."""

    host: str
    lines: list[str]
    status: int
    error: str


def block_managers(session: SparkSession) -> dict[str, tuple[str, int]]:
    """The address of each block manager of Spark, by the executor's id: `driver` or a number."""
    known = _context(session)._jsc.sc().statusStore().executorList(True)
    managers = {}
    for number in range(known.size()):
        executor = known.apply(number)
        host, _, port = str(executor.hostPort()).rpartition(":")
        if host:  # else the executor has no block manager yet
            managers[str(executor.id())] = host.strip("[]"), int(port)
    return managers


def has_executors(session: SparkSession) -> bool:
    """Return whether a Spark on a cluster has an executor; costs the same for any number of them.

    The driver is in Spark's list, too.
    """
    return int(_context(session)._jsc.sc().statusStore().executorList(True).size()) > 1


def await_executors(session: SparkSession, count: int, wait_s: float) -> dict[str, tuple[str, int]]:
    """The block managers once `count` executors have one, or after `wait_s` seconds.

    An embedded Spark has that of the driver alone.
    """
    count = 1 if parse_local_master(_context(session).master, 1) else 1 + count
    until = time.monotonic() + wait_s
    while len(managers := block_managers(session)) < count and time.monotonic() < until:
        time.sleep(_POLL_S)
    return managers


def pick_executors(managers: Mapping[str, tuple[str, int]]) -> Mapping[str, tuple[str, int]]:
    """The block managers of executors; the driver's alone where Spark is embedded."""
    return {name: end for name, end in managers.items() if name != DRIVER} or managers


def run_on_executors(
    session: SparkSession, source: str, request: Mapping[str, Any]
) -> list[ExecutorOutput]:
    """Run a program of Python on each host with an executor; `request` is its standard input.

    Returns one output for each host name. Spark spreads tasks over executors that are free; a host
    that is busy for long may be missing. Raises GiveUp if Spark cannot run the job.
    """
    context = _context(session)
    managers = pick_executors(block_managers(session))
    hosts, tasks = len({host for host, _ in managers.values()}), len(managers)
    outputs: dict[str, ExecutorOutput] = {}
    for hold_s in range(_ROUNDS):
        # A task that holds its core leaves the next task to another executor.
        printed = _call(partial(_pipe, context, source, request, tasks, hold_s))
        outputs |= {output.host: output for output in parse_outputs(printed)}
        if len(outputs) >= hosts:
            break
    return [outputs[host] for host in sorted(outputs)]


def parse_outputs(printed: str) -> list[ExecutorOutput]:
    """The outputs in what the shells have printed, in their order."""
    return [
        ExecutorOutput(host, lines.splitlines(), int(status), error.strip())
        for host, lines, status, error in _OUTPUT.findall(printed)
    ]


def _pipe(context: Any, source: str, request: Mapping[str, Any], tasks: int, hold_s: int) -> str:
    jvm = context._jvm
    rows, command = jvm.java.util.ArrayList(), jvm.java.util.ArrayList()
    for _ in range(tasks):
        rows.add(json.dumps(request))
    for word in ("sh", "-c", _RUN, context.pythonExec, source, str(hold_s)):
        command.add(word)
    lines = context._jsc.parallelize(rows, tasks).pipe(command).collect()
    return "".join(f"{line}\n" for line in lines)


def _call(action: Callable[[], str]) -> str:
    try:
        return action()
    except SPARK_ERRORS as error:
        raise GiveUp(f"Spark cannot run a job: {task_reason(str(error))}") from None


def _context(session: SparkSession) -> Any:
    if not hasattr(session, "_jsc"):
        raise BadInput(
            "--spark",
            expected="a master: its executors run programs of the driver",
            got="Spark Connect",
        )
    return session.sparkContext
