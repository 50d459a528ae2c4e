"""Java's reports in one line: the innermost cause, not the first line."""

import pytest

from worker.spark.failures import root_cause

_TRACE = """\
WARNING: something else
Exception in thread "main" java.lang.ExceptionInInitializerError
\tat org.apache.spark.SparkConf$.<init>(SparkConf.scala:714)
Caused by: java.net.UnknownHostException: driver: driver: Name or service not known
\tat java.base/java.net.InetAddress.getLocalHost(InetAddress.java:1936)
Caused by: java.net.UnknownHostException: driver: Name or service not known
\t... 16 more
"""


@pytest.mark.parametrize(
    ("printed", "cause"),
    [
        (_TRACE, "java.net.UnknownHostException: driver: Name or service not known"),
        ("x\n Error: no room\nbye", "Error: no room"),
        ("all is well", None),
    ],
)
def test_root_cause(printed: str, cause: str | None) -> None:
    """The last `Caused by:`, else the first line with an error, else nothing."""
    assert root_cause(printed) == cause
