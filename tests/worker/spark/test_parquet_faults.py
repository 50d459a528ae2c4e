"""Parquet files of other tools that Spark cannot read: one line with the remedy."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shards.errors import BadInput
from worker.spark.failures import SPARK_ERRORS, task_error
from worker.spark.frames import read_table
from worker.spark.parquet_faults import parquet_fault

BROTLI = """An error occurred while calling o31.collectToPython.
: org.apache.spark.SparkException: [FAILED_READ_FILE.NO_HINT] Encountered error while reading file
Caused by: org.apache.parquet.hadoop.BadConfigurationException: Class org.apache.hadoop.io.compress.BrotliCodec was not found
Caused by: java.lang.ClassNotFoundException: org.apache.hadoop.io.compress.BrotliCodec"""  # noqa: E501  # Spark's words


def test_what_spark_reports() -> None:
    """Its words are found wherever they stand; those of other failures are left alone."""
    assert parquet_fault(BROTLI).startswith(
        "the Parquet file is compressed by Brotli, which Spark cannot read: rewrite it, as by"
    )
    assert parquet_fault(BROTLI.replace("BrotliCodec", "LzoCodec")).startswith(
        "the Parquet file is compressed by Lzo, which Spark cannot read"
    )
    half = "[PARQUET_TYPE_ILLEGAL] Illegal Parquet type: FIXED_LEN_BYTE_ARRAY (FLOAT16). SQLSTATE:"
    assert parquet_fault(half) == (
        "the Parquet file has a column of FIXED_LEN_BYTE_ARRAY (FLOAT16), which Spark cannot read:"
        " rewrite it with another type of this column"
    )
    assert parquet_fault("[PATH_NOT_FOUND] Path does not exist: file:/brotli.parquet") == ""
    error = task_error(BROTLI)
    assert type(error) is BadInput
    assert str(error) == parquet_fault(BROTLI)


@pytest.mark.slow
def test_what_spark_says_of_real_files(spark: Any, tmp_path: Path) -> None:
    """Brotli shows when rows are read, nanoseconds when the file is opened."""
    brotli, nanos = str(tmp_path / "b.parquet"), str(tmp_path / "n.parquet")
    pq.write_table(pa.table({"x": [1.0, 2.0]}), brotli, compression="brotli")
    pq.write_table(pa.table({"t": pa.array([1], pa.timestamp("ns"))}), nanos, version="2.6")
    with pytest.raises(SPARK_ERRORS) as caught:
        read_table(spark, "parquet", brotli).collect()
    assert "compressed by Brotli" in str(task_error(str(caught.value)))
    with pytest.raises(BadInput, match=r"n\.parquet: cannot be read: .*NANOS.*nanosAsLong=true"):
        read_table(spark, "parquet", nanos)
