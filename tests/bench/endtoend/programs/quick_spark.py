"""What each program that starts a Spark gives it: JVMs that are up sooner, also of executors.

A run lasts a minute or two, which is less than the second compiler takes to repay its time.
"""

from typing import Any

_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
QUICK_SPARK: dict[str, Any] = {
    "spark.driver.extraJavaOptions": _OPTIONS,
    "spark.executor.extraJavaOptions": _OPTIONS,
}
