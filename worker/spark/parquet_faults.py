"""Faults that Spark finds in Parquet files of other tools, in one line with the remedy."""

import re

_REWRITE = (
    "rewrite it, as by pyarrow.parquet.write_table(pyarrow.parquet.read_table(PATH), NEW,"
    " compression='zstd')"
)
_CODEC = re.compile(r"\b(Brotli|Lzo)Codec\b", re.IGNORECASE)
_TYPE = re.compile(r"Illegal Parquet type: ([^\n]*?)\.?(?: SQLSTATE|\s*$)", re.MULTILINE)


def parquet_fault(text: str) -> str:
    """The reason, found in Spark's report of a failure; empty for any other failure."""
    if match := _CODEC.search(text):
        return f"the Parquet file is compressed by {match[1]}, which Spark cannot read: {_REWRITE}"
    if match := _TYPE.search(text):
        remedy = "rewrite it with another type of this column"
        if "NANOS" in match[1]:
            remedy = (
                "set spark.sql.legacy.parquet.nanosAsLong=true to read whole numbers, or rewrite it"
                " with coerce_timestamps='us'"
            )
        return f"the Parquet file has a column of {match[1]}, which Spark cannot read: {remedy}"
    return ""
