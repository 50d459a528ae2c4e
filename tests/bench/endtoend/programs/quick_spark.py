"""What each program that starts a Spark gives it: JVMs that are up sooner, also of executors.

A run lasts a minute or two, which is less than the second compiler takes to repay its time.
"""

from typing import Any

from tests.bench.endtoend.programs.task import Task

_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
QUICK_SPARK: dict[str, Any] = {
    "spark.driver.extraJavaOptions": _OPTIONS,
    "spark.executor.extraJavaOptions": _OPTIONS,
}


def choose_master(task: Task) -> str:
    """The running cluster, or else this machine, with more attempts of a task than there are kills.

    By default Spark ends a job whose task has failed four times, however far it has come.
    """
    return task.cluster or f"local[{task.workers},100]"
