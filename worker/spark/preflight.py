"""Checks of what Spark's tasks get: the rows of each partition, and the Python that runs there."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql.types import ArrayType, DoubleType, FloatType

from ps.build_id import build_id
from ps.transport.advertised_address import network_id
from shards.errors import BadInput, GiveUp
from worker.spark.failures import BAD_INPUT, PYTHON_REMEDY, SPARK_ERRORS, jvm_gone, task_reason
from worker.spark.tasks import map_batches, python_of

_UNLIKELY = -3.1234567e38
"""A number that no list holds; in one that did, only the task of a worker would notice a null."""

_PYTHON_FAULTS = (
    (
        r"different version: (\d+\.\d+) than that in driver: (\d+\.\d+)",
        "is {0}, here it is {1}",
    ),
    (r"No module named ('[\w.]+')", "has no module {0}"),
    (r"(\w+ >= [\w.]+) must be installed", "has no {0}"),
    (
        r'Cannot run program "[^"]*".*(?:error=8,|error: 8 )',
        "is for another kind of machine than its executor, as `downpour pack --check` there shows",
    ),
    (
        r'Cannot run program "[^"]*".*(?:error=2,|error: 2 )',
        "is not there, or is a link that leads out of its archive (`downpour pack --check`)",
    ),
    (r"version `GLIBC_([\d.]+)' not found", "needs glibc {0}, which its executor lacks"),
    (r'Cannot run program "([^"]*)"', "cannot be run"),
)


class PartitionRows(NamedTuple):
    """A partition of a DataFrame, and the Python that Spark runs over it.

    `build` is the build id of this project's code there. `lacks` is the reason why no worker can
    run there, or empty. `nulls` are the rows with a null in each of the columns that were asked
    for. `network` is the `network_id` of the executor, and `host` its name.
    """

    rows: int
    python: str
    build: str
    lacks: str
    nulls: Sequence[int] = ()
    network: str = ""
    host: str = ""


def survey(df: DataFrame, columns: Sequence[str] = ()) -> list[PartitionRows]:
    """Count the rows of each partition by a small Spark job, and inspect the Python that runs it.

    The job reads those of `columns` that may hold nulls, in Spark itself, and counts the rows with
    a null, also within a list. It computes no column by a function of Python. Raises
    BadInput if that Python cannot run at all, or for what a data source refuses, GiveUp if the
    DataFrame cannot be computed.
    """

    # Pickled by value, with its own imports: the executor may have none of our packages.
    def look(batches: Iterator[Any]) -> Iterator[Any]:
        import sys

        import pyarrow as pa

        build = lacks = network = host = ""
        try:
            import worker.spark.worker_task  # noqa: F401  # all that a worker needs
            from ps.build_id import build_id

            build = build_id()
            from ps.transport.addresses import HOST_NAME
            from ps.transport.advertised_address import network_id

            network, host = network_id(), HOST_NAME
        except Exception as error:  # noqa: BLE001  # any error means that no worker can start
            lacks = f"{type(error).__name__}: {error}"
        rows, nulls = 0, [0] * count
        for batch in batches:
            rows += batch.num_rows
            nulls = [sum_ + batch.column(n).true_count for n, sum_ in enumerate(nulls)]
        facts: dict[str, Any] = {
            "rows": rows,
            "python": sys.executable,
            "build": build,
            "lacks": lacks,
        }
        facts |= {"nulls": nulls, "network": network, "host": host}
        yield pa.RecordBatch.from_pylist([facts])

    count = len(columns)
    flags = [f"{_holds_null(df, name)} AS null_{n}" for n, name in enumerate(columns)]
    schema = "rows long, python string, build string, lacks string, nulls array<long>"
    schema += ", network string, host string"
    try:
        return [
            PartitionRows(*row)
            for row in map_batches(df.selectExpr(*flags, "true AS row"), look, schema).collect()
        ]
    except SPARK_ERRORS as error:
        text = str(error)
        if why := _python_fault(text):
            raise BadInput(f"Spark's Python ({python_of(df)}) {why}: {PYTHON_REMEDY}") from None
        cause = task_reason(text)
        if cause.startswith(BAD_INPUT):
            raise BadInput(cause.removeprefix(BAD_INPUT)) from None
        raise jvm_gone(error) or GiveUp(f"Spark cannot compute the DataFrame: {cause}") from None


def _holds_null(df: DataFrame, name: str) -> str:
    """The expression of SQL that is true for a null, and for a list with a null, also of lists.

    It is false for a column that a function of Python computes: to compute it once more may take as
    long as the training, whose tasks refuse a null, too.
    """
    field = df.schema[name]
    kind, column = field.dataType, "`{}`".format(name.replace("`", "``"))
    may_hold = field.nullable
    if hasattr(df, "_jdf"):
        plan = df.select(column)._jdf.queryExecution().optimizedPlan()
        if "EvalPython" in plan.toString():
            return "false"
    while isinstance(kind, ArrayType) and isinstance(kind.elementType, ArrayType):
        may_hold |= kind.containsNull
        kind, column = kind.elementType, f"flatten({column})"
    if not isinstance(kind, ArrayType) or not kind.containsNull:
        return f"{column} IS NULL" if may_hold else "false"
    if isinstance(kind.elementType, FloatType | DoubleType):
        # Unknown, which is null, where the number is not in a list that has a null. `exists` would
        # take a hundred times as long.
        number = f"CAST({_UNLIKELY} AS {kind.elementType.simpleString()})"
        return f"array_contains({column}, {number}) IS NULL"
    return f"{column} IS NULL OR exists({column}, value -> value IS NULL)"


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


def check_same_host(part: PartitionRows) -> None:
    """Raise BadInput if the executor of `part` would look for 127.0.0.1 on a host of its own."""
    if part.network != network_id():
        raise BadInput(
            "bind",
            expected=f"an address that the executor on {part.host} can reach",
            got="one of loopback, which leads each host to itself",
            hint="give --bind 0.0.0.0 (bind=), or the address to listen on",
        )


def _python_fault(text: str) -> str:
    """Why a Python worker could not run, if Spark reports such a fault; else empty."""
    for pattern, words in _PYTHON_FAULTS:
        if match := re.search(pattern, text):
            return words.format(*match.groups())
    return ""
