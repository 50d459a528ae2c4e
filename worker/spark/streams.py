"""Streams: queries of Structured Streaming that bring their micro-batches to this process."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from shards.errors import BadInput, GiveUp
from worker.spark.failures import SPARK_ERRORS, reason

_SLEEP_MS = 60_000


def runs_queries(df: DataFrame) -> bool:
    """Return whether a stream's micro-batches come to this process; not so over Spark Connect."""
    return hasattr(df, "_jdf")


def start_query(
    df: DataFrame,
    process_batch: Callable[[DataFrame, int], None],
    checkpoint: str,
    trigger: Mapping[str, Any],
) -> StreamingQuery:
    """Start a stream that passes its micro-batches to `process_batch`, with their numbers.

    Raises BadInput for a trigger or a checkpoint that Spark refuses.
    """
    try:
        writer = df.writeStream.foreachBatch(process_batch).option("checkpointLocation", checkpoint)
        return (writer.trigger(**trigger) if trigger else writer).start()
    except (*SPARK_ERRORS, TypeError, ValueError) as error:
        raise BadInput(f"stream: cannot be started: {reason(error)}") from None


def await_query(query: StreamingQuery, timeout_s: float) -> bool:
    """Return whether a stream has ended, or ends within this time; does not raise its error."""
    try:
        return bool(query.awaitTermination(timeout_s))  # type: ignore[arg-type]  # seconds, any
    except SPARK_ERRORS:
        return True


def query_error(query: StreamingQuery) -> GiveUp | None:
    """The error that has ended a stream."""
    error = query.exception()
    return None if error is None else GiveUp(f"the stream failed: {reason(error)}")


def stop_query(query: StreamingQuery) -> None:
    """End a stream; one that has ended is left alone."""
    with suppress(*SPARK_ERRORS):
        query.stop()


def await_stop(df: DataFrame) -> NoReturn:
    """Wait, in the Java thread that has brought the micro-batch `df`, until its query is stopped.

    Stopping a query interrupts that thread. Spark takes the error that is raised then for the
    query's normal end, while any other error of a micro-batch is logged as a failure.
    """
    while True:
        df.sparkSession._jvm.java.lang.Thread.sleep(_SLEEP_MS)  # type: ignore[union-attr]
