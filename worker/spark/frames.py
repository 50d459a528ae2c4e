"""DataFrames: their partitions, columns and first rows, and those that are made here."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema, to_arrow_type

from shards.errors import BadInput, GiveUp
from worker.data.sequence_file import SCHEMA, image_record
from worker.data.source import Source, part_rows
from worker.data.stored_table import StoredTable, write_parts
from worker.spark.failures import BAD_INPUT, SPARK_ERRORS, reason, task_error, task_reason
from worker.spark.tasks import NumberedTasks, TaskInput, map_batches, map_tasks
from worker.tfrecord.source import TFRecord

_MAX_ROWS = 2**31 - 1  # the largest int in Java
# Spark divides a table of up to 48 MiB evenly by rows, and a larger one by record batches, which
# are then dealt. Its count of the bytes differs by some for each batch.
_EVEN_BYTES = 47 << 20


def check_running(label: str, data: TaskInput | SparkSession) -> None:
    """Raise BadInput, naming `label`, for a session that has ended, or a DataFrame of one."""
    session = data if isinstance(data, SparkSession) else data.sparkSession
    # The session is asked: a DataFrame of Spark Connect takes any name for that of a column.
    if hasattr(session, "_jsparkSession"):
        context = session.sparkContext._jsc  # None after `stop`
        try:
            ended = context is None or context.sc().isStopped()
        except SPARK_ERRORS:
            ended = True  # its JVM has gone
    else:
        ended = getattr(session, "is_stopped", False)
    if ended:
        raise BadInput(
            label,
            expected="a Spark session that runs",
            got=(
                "one that has been stopped or whose JVM has ended: start a "
                "session and read the data with it"
            ),
        )


def shows_progress(df: DataFrame) -> bool:
    """Return whether Spark draws its own bar of stages on this process's terminal."""
    if not hasattr(df, "_jdf"):
        return False
    with suppress(*SPARK_ERRORS):
        return bool(df.sparkSession.sparkContext._jsc.sc().progressBar().isDefined())
    return False


def partition_count(df: DataFrame) -> int:
    """Return the number of partitions of `df`; raises BadInput over Spark Connect."""
    if not hasattr(df, "_jdf"):
        raise BadInput("train over Spark Connect", expected="the number of workers", got="none")
    plan = df._jdf.queryExecution().optimizedPlan()
    if plan.getClass().getSimpleName() == "Repartition" and plan.shuffle():
        return int(plan.numPartitions())  # it is kept; to plan the rest would deal the rows
    return int(df.rdd.getNumPartitions())


def has_partitions(df: DataFrame, count: int) -> bool:
    """Return whether `df` is known to have `count` partitions; always false over Spark Connect.

    Adaptive execution may choose a different number for a different selection of columns.
    """
    return hasattr(df, "_jdf") and partition_count(df) == count


def deal(df: DataFrame, workers: int, sizes: Sequence[int]) -> DataFrame:
    """The rows of `df`, dealt evenly to `workers` partitions.

    `sizes` are the numbers of rows of its present partitions. Spark deals the rows of each
    partition in turn, starting at a random place, so partitions with few rows may leave a worker
    without any. If that could happen, one task deals all rows.
    """
    if sum(size // workers for size in sizes) * workers * 2 < sum(sizes):
        # The detour through Arrow keeps Spark from dropping the first of two repartitions.
        df = map_batches(df.coalesce(1), lambda batches: batches, df.schema)
    return df.repartition(workers)


def sequence_file(session: SparkSession, path: str) -> DataFrame:
    """The images in the SequenceFiles at `path`, any path or URI of Hadoop's, as a DataFrame.

    They are as CaffeOnSpark wrote them (worker/data/sequence_file.py has the columns), and are read
    when the DataFrame is. A record that does not fit fails the task that reads it, with an error
    that names the record. Raises BadInput over Spark Connect, which cannot read them.
    """
    if not hasattr(session, "_jsparkSession"):
        raise BadInput(
            f"SequenceFile {path}", expected="a Spark session that is not Spark Connect's"
        )
    kind = "org.apache.hadoop.io.BytesWritable"
    try:
        records: Any = session.sparkContext.sequenceFile(path, kind, kind)

        def row(record: tuple[bytearray, bytearray]) -> Any:
            return image_record(bytes(record[0]), bytes(record[1]), f"SequenceFile {path}")

        return session.createDataFrame(records.map(row), SCHEMA)
    except SPARK_ERRORS as error:
        raise BadInput(f"SequenceFile {path}: cannot be read: {reason(error)}") from None


def number_partitions(session: SparkSession, partitions: int) -> DataFrame:
    """A DataFrame of one row a partition, its number: for tasks that read their rows themselves."""
    return NumberedTasks(session, partitions).frame


def store_rows(table: Any, parts: int, folder: Path) -> StoredTable | None:
    """Write an Arrow table for `parts` numbered tasks, with the rows and types of a DataFrame's.

    An embedded Spark with as many slots divides a small DataFrame of `table` in this way. Returns
    None for a table that it would deal, or refuse.
    """
    nulls = any(column.null_count for column in table.columns)
    if nulls or table.num_rows < parts or table.nbytes > _EVEN_BYTES:
        return None
    schema = to_arrow_schema(from_arrow_schema(table.schema))
    return write_parts(table.cast(schema), parts, folder)


def active_session(label: str) -> SparkSession:
    """This thread's Spark session, or the default one; raises BadInput naming `label` for none."""
    session = SparkSession.getActiveSession()
    if session is None:
        raise BadInput(label, expected="a Spark session in this process to read a path", got="none")
    return session


def read_table(session: SparkSession, kind: str, uri: str) -> DataFrame:
    """The files at a path or URI as a DataFrame; `kind` is parquet or tfrecord. Raises BadInput."""
    if kind == "tfrecord":
        session.dataSource.register(TFRecord)
    where = uri if "://" in uri else str(Path(uri).absolute())
    try:
        return session.read.format(kind).load(where)
    except SPARK_ERRORS as error:
        # Spark wraps what the class of a data source raises into a traceback.
        raised = "Traceback (most recent call last)" in str(error)
        why = task_reason(str(error)).removeprefix(BAD_INPUT) if raised else reason(error)
        raise BadInput(f"{uri}: cannot be read: {why}") from None


def repartition_rows(df: DataFrame, workers: int) -> DataFrame:
    """The rows of `df` in this number of partitions."""
    return df if has_partitions(df, workers) else df.repartition(workers)


def source_rows(session: SparkSession, source: Source, parts: int) -> DataFrame:
    """The rows of a source as a DataFrame; `parts` tasks read them, each its own ranges."""

    def read(_: Iterator[Any], part: int, *__: Any) -> Iterator[Any]:
        return part_rows(source, parts, part)

    return map_tasks(number_partitions(session, parts), read, source.schema, job="read")


def write_frame(df: DataFrame, uri: str, form: str) -> int:
    """Write `df` as new files in a folder at `uri`, a path or URI of Hadoop's; returns its rows.

    `form` is parquet or json. Raises the BadInput of a task, or GiveUp for another failure.
    """
    try:
        df.write.format(form).save(uri)
        return df.sparkSession.read.schema(df.schema).format(form).load(uri).count()
    except SPARK_ERRORS as error:
        if "Traceback (most recent call last)" in str(error):
            raise task_error(str(error)) from None
        raise GiveUp(f"{uri}: cannot be written: {reason(error)}") from None


def first_rows(df: DataFrame, most: int) -> list[Any]:
    """The first `most` rows as Arrow record batches in this process; raises GiveUp."""
    try:
        batches: list[Any] = df.limit(min(most, _MAX_ROWS)).toArrow().to_batches()
    except SPARK_ERRORS as error:
        raise GiveUp(f"reading the first {most} rows failed: {reason(error)}") from None
    return batches


def column_types(df: DataFrame, names: Collection[str]) -> dict[str, Any]:
    """The Arrow types of these columns of `df`; raises BadInput where Arrow has no such type."""
    types = {}
    for field in df.schema.fields:
        if field.name not in names:
            continue
        try:
            types[field.name] = to_arrow_type(field.dataType)
        except PySparkException:
            kind = field.dataType.simpleString()
            raise BadInput(f"the DataFrame, column {field.name}: {kind} is not supported") from None
    return types
