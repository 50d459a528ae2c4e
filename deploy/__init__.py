"""What assembles and runs whole jobs: the command line, the run folder, the simulator.

`spark_environment` finds the Java and the Python for a Spark session of your own.
"""

from typing import Any

from deploy.clusters.java import spark_environment

__all__ = ["spark_environment"]


def __getattr__(name: str) -> Any:
    if name == "java_environment":
        raise AttributeError("deploy.java_environment is now deploy.spark_environment")
    raise AttributeError(f"module deploy has no attribute {name}")
