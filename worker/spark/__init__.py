"""The interface to Spark: this package alone imports PySpark, when one of its names is first used.

`session` starts sessions, `executors` runs programs on their hosts, `lost_executors` notices that
none is left, `tasks` runs Python over partitions, `preflight` counts their rows and inspects their
Python, `frames` makes and reads DataFrames, `streams` runs queries, `failures` puts Spark's reports
in one line. `settings` and `worker_task` need no Spark: the latter is what a worker's task runs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from worker.spark.executors import (
        ExecutorOutput,
        await_executors,
        pick_executors,
        run_on_executors,
    )
    from worker.spark.failures import reason, task_reason
    from worker.spark.frames import (
        active_session,
        check_running,
        column_types,
        deal,
        first_rows,
        has_partitions,
        number_partitions,
        partition_count,
        read_table,
        repartition_rows,
        sequence_file,
        shows_progress,
        source_rows,
        store_rows,
        write_frame,
    )
    from worker.spark.lost_executors import ExecutorWatch
    from worker.spark.preflight import PartitionRows, check_python, check_same_host, survey
    from worker.spark.session import ship_code, start_session
    from worker.spark.streams import (
        await_query,
        await_stop,
        query_error,
        runs_queries,
        start_query,
        stop_query,
    )
    from worker.spark.tasks import (
        NumberedTasks,
        TaskInput,
        check_guarded,
        check_sendable,
        final_failure,
        interrupt,
        map_tasks,
        master_host,
        run_tasks,
        runs_here,
        runs_this_python,
        share,
        task_slots,
    )

__all__ = [
    "DataFrame",
    "ExecutorOutput",
    "ExecutorWatch",
    "NumberedTasks",
    "PartitionRows",
    "SparkSession",
    "TaskInput",
    "active_session",
    "await_executors",
    "await_query",
    "await_stop",
    "check_guarded",
    "check_python",
    "check_running",
    "check_same_host",
    "check_sendable",
    "column_types",
    "deal",
    "final_failure",
    "first_rows",
    "has_partitions",
    "interrupt",
    "map_tasks",
    "master_host",
    "number_partitions",
    "partition_count",
    "pick_executors",
    "query_error",
    "read_table",
    "reason",
    "repartition_rows",
    "run_on_executors",
    "run_tasks",
    "runs_here",
    "runs_queries",
    "runs_this_python",
    "sequence_file",
    "share",
    "ship_code",
    "shows_progress",
    "source_rows",
    "start_query",
    "start_session",
    "stop_query",
    "store_rows",
    "survey",
    "task_reason",
    "task_slots",
    "write_frame",
]

_HOMES = {
    "pyspark.sql": ("DataFrame", "SparkSession"),
    "worker.spark.executors": (
        "ExecutorOutput",
        "await_executors",
        "pick_executors",
        "run_on_executors",
    ),
    "worker.spark.failures": ("reason", "task_reason"),
    "worker.spark.frames": (
        "check_running",
        "column_types",
        "read_table",
        "repartition_rows",
        "active_session",
        "deal",
        "first_rows",
        "has_partitions",
        "number_partitions",
        "partition_count",
        "sequence_file",
        "shows_progress",
        "source_rows",
        "store_rows",
        "write_frame",
    ),
    "worker.spark.lost_executors": ("ExecutorWatch",),
    "worker.spark.preflight": ("PartitionRows", "check_python", "check_same_host", "survey"),
    "worker.spark.session": ("ship_code", "start_session"),
    "worker.spark.streams": (
        "await_query",
        "await_stop",
        "query_error",
        "runs_queries",
        "start_query",
        "stop_query",
    ),
    "worker.spark.tasks": (
        "NumberedTasks",
        "TaskInput",
        "check_guarded",
        "check_sendable",
        "final_failure",
        "interrupt",
        "map_tasks",
        "master_host",
        "run_tasks",
        "runs_here",
        "runs_this_python",
        "share",
        "task_slots",
    ),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module worker.spark has no attribute {name}")
