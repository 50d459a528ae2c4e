"""The interface to Spark: this package alone imports PySpark, when one of its names is first used.

`session` starts sessions, `tasks` runs Python over partitions, `partitions` counts their rows and
inspects their Python, `frames` makes and reads DataFrames, `failures` puts Spark's reports in one
line. `settings` and `worker_task` need no Spark: the latter is what a worker's task runs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from worker.spark.failures import reason, task_reason
    from worker.spark.frames import (
        column_types,
        deal,
        first_rows,
        has_partitions,
        numbered,
        partition_count,
        sequence_file,
        source_rows,
        write_frame,
    )
    from worker.spark.partitions import PartitionRows, check_python, survey
    from worker.spark.session import start_session
    from worker.spark.tasks import (
        check_guarded,
        check_sendable,
        final_failure,
        interrupt,
        map_tasks,
        run_tasks,
        runs_here,
        share,
    )

__all__ = [
    "DataFrame",
    "PartitionRows",
    "SparkSession",
    "check_guarded",
    "check_python",
    "check_sendable",
    "column_types",
    "deal",
    "final_failure",
    "first_rows",
    "has_partitions",
    "interrupt",
    "map_tasks",
    "numbered",
    "partition_count",
    "reason",
    "run_tasks",
    "runs_here",
    "sequence_file",
    "share",
    "source_rows",
    "start_session",
    "survey",
    "task_reason",
    "write_frame",
]

_HOMES = {
    "pyspark.sql": ("DataFrame", "SparkSession"),
    "worker.spark.failures": ("reason", "task_reason"),
    "worker.spark.frames": (
        "column_types",
        "deal",
        "first_rows",
        "has_partitions",
        "numbered",
        "partition_count",
        "sequence_file",
        "source_rows",
        "write_frame",
    ),
    "worker.spark.partitions": ("PartitionRows", "check_python", "survey"),
    "worker.spark.session": ("start_session",),
    "worker.spark.tasks": (
        "check_guarded",
        "check_sendable",
        "final_failure",
        "interrupt",
        "map_tasks",
        "run_tasks",
        "runs_here",
        "share",
    ),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module worker.spark has no attribute {name}")
