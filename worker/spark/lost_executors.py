"""Notices that a standalone Spark has no executor for an application any more.

A standalone master that starts again has forgotten its applications, unless it keeps them in a
folder: it has their executors ended, and their drivers are not told, but wait for others for ever.
"""

from shards.errors import NoServer
from worker.spark.executors import has_executors
from worker.spark.failures import SPARK_ERRORS
from worker.spark.tasks import TaskInput, is_classic

WITHOUT_S = 300.0
"""Seconds without an executor after which none is expected any more."""


class ExecutorWatch:
    """The executors of one application of a standalone master, looked at now and then.

    Other masters give an application new executors by themselves, however long that takes.
    """

    def __init__(self, df: TaskInput) -> None:
        self._df = df
        self._master = str(df.sparkSession.sparkContext.master) if is_classic(df) else ""
        self._seen: float | None = None

    def check(self, now: float) -> None:
        """Raise NoServer if there were executors and are none for WITHOUT_S; `now` in seconds."""
        if not self._master.startswith("spark://"):
            return
        try:
            present = has_executors(self._df.sparkSession)
        except SPARK_ERRORS:
            return  # the JVM may have ended; the job's own error says so
        if present:
            self._seen = now
        elif self._seen is not None and now - self._seen > WITHOUT_S:
            raise NoServer(
                f"Spark at {self._master}",
                expected="an executor",
                got=(
                    f"none for {WITHOUT_S:g} s: its workers are gone, or its master has started"
                    " again without spark.deploy.recoveryMode and has forgotten the application"
                    " (docs/how-to/clusters.md)"
                ),
            )
