"""Runs each kind of Spark job that a training runs, on a few rows, in a session of its own.

    python -m worker.spark.rehearsal

A JVM that was started with -XX:ArchiveClassesAtExit then writes the classes that it has loaded
(deploy/clusters/class_archive.py). So the session has a page, as one of the user's has, here at a
free port of loopback; and its JVM has long to end, for it writes as it ends.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from ps.shared_memory.shm_files import temporary_folder
from worker.spark.frames import (
    deal,
    first_rows,
    number_partitions,
    partition_count,
    read_table,
    write_frame,
)
from worker.spark.preflight import survey
from worker.spark.session import start_embedded
from worker.spark.tasks import NumberedTasks, run_tasks

_TASKS, _ROWS = 2, 8
_WRITES_S = 600.0


def main() -> None:
    page = {"spark.ui.enabled": "true", "spark.ui.port": "0"}
    with (
        temporary_folder("rehearsal") as folder,
        start_embedded(
            f"local[{_TASKS}]",
            _TASKS,
            app="rehearsal",
            env={},
            folder=folder,
            conf=page,
            exit_s=_WRITES_S,
        ) as session,
    ):
        run_jobs(session, folder)


def run_jobs(session: SparkSession, folder: Path) -> None:
    """Run the jobs; files go into `folder`."""
    images = pa.array([b"pixels"] * _ROWS, pa.binary())
    values = pa.array([[1.0, 2.0]] * _ROWS, pa.list_(pa.float32()))
    table = pa.table({"data": images, "label": pa.array(range(_ROWS)), "values": values})
    df = session.createDataFrame(table)
    sizes = [part.rows for part in survey(df, df.columns)]
    dealt = deal(df, _TASKS, sizes)
    partition_count(dealt)
    first_rows(dealt, 1)
    df.select("data").head()
    for data in (df, dealt, number_partitions(session, _TASKS), NumberedTasks(session, _TASKS)):
        run_tasks(data, _report, pa.schema([("report", pa.binary())]), "rehearsal")
    files = str(folder / "rows.parquet")
    write_frame(df, files, "parquet")
    survey(read_table(session, "parquet", files), df.columns)


def _report(batches: Iterator[pa.RecordBatch], *_: Any) -> Iterator[pa.RecordBatch]:
    """Read all rows, and yield one, as a worker does."""
    rows = sum(batch.num_rows for batch in batches)
    yield pa.RecordBatch.from_pydict({"report": [str(rows).encode()]})


if __name__ == "__main__":
    main()
