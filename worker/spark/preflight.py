"""Checks of what Spark's tasks get: the rows of each partition, and the Python that runs there."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from pyspark.sql import DataFrame

from ps.build_id import build_id
from shards.errors import BadInput, GiveUp
from worker.spark.failures import PYTHON_REMEDY, SPARK_ERRORS, jvm_gone, task_reason
from worker.spark.tasks import map_batches, python_of

_PYTHON_FAULTS = (
    (
        r"different version: (\d+\.\d+) than that in driver: (\d+\.\d+)",
        "is {0}, here it is {1}",
    ),
    (r"No module named ('[\w.]+')", "has no module {0}"),
    (r"(\w+ >= [\w.]+) must be installed", "has no {0}"),
    (r'Cannot run program "([^"]*)"', "cannot be run"),
)


class PartitionRows(NamedTuple):
    """A partition of a DataFrame, and the Python that Spark runs over it.

    `build` is the build id of this project's code there. `lacks` is the reason why no worker can
    run there, or empty.
    """

    rows: int
    python: str
    build: str
    lacks: str


def survey(df: DataFrame) -> list[PartitionRows]:
    """Count the rows of each partition by a small Spark job, and inspect the Python that runs it.

    The job reads no column. Raises BadInput if that Python cannot run at all, GiveUp
    if the DataFrame cannot be computed.
    """

    # Pickled by value, with its own imports: the executor may have none of our packages.
    def look(batches: Iterator[Any]) -> Iterator[Any]:
        import sys

        import pyarrow as pa

        build = lacks = ""
        try:
            import worker.spark.worker_task  # noqa: F401  # all that a worker needs
            from ps.build_id import build_id

            build = build_id()
        except Exception as error:  # noqa: BLE001  # any error means that no worker can start
            lacks = f"{type(error).__name__}: {error}"
        rows = sum(batch.num_rows for batch in batches)
        facts = {"rows": rows, "python": sys.executable, "build": build, "lacks": lacks}
        yield pa.RecordBatch.from_pylist([facts])

    schema = "rows long, python string, build string, lacks string"
    try:
        return [
            PartitionRows(*row)
            for row in map_batches(df.selectExpr("true AS row"), look, schema).collect()
        ]
    except SPARK_ERRORS as error:
        text = str(error)
        if why := _python_fault(text):
            raise BadInput(f"Spark's Python ({python_of(df)}) {why}: {PYTHON_REMEDY}") from None
        raise (
            jvm_gone(error) or GiveUp(f"Spark cannot compute the DataFrame: {task_reason(text)}")
        ) from None


def check_python(part: PartitionRows) -> None:
    """Raise BadInput if no worker can run in this Python, or only one of another build."""
    driver_build = build_id()
    if part.lacks:
        raise BadInput(
            f"Spark's Python ({part.python}) cannot run a worker, {part.lacks}: {PYTHON_REMEDY}"
        )
    if part.build != driver_build:
        raise BadInput(
            f"Spark's Python ({part.python})",
            expected=f"build {driver_build} of this project, as here",
            got=(
                f"{part.build}: install the same version in both places, or ship "
                "this one (docs/how-to/clusters.md)"
            ),
        )


def _python_fault(text: str) -> str:
    """Why a Python worker could not run, if Spark reports such a fault; else empty."""
    for pattern, words in _PYTHON_FAULTS:
        if match := re.search(pattern, text):
            return words.format(*match.groups())
    return ""
