"""What each program that starts a local Spark gives it: a JVM that is up sooner.

A run lasts a minute or two, which is less than the second compiler takes to repay its time.
"""

from typing import Any

QUICK_SPARK: dict[str, Any] = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
}
