"""Assembles and runs whole jobs: the command line, the run folder, the simulator.

`spark_environment` finds the Java and the Python for a Spark session of your own.
"""

from deploy.clusters.java import spark_environment

__all__ = ["spark_environment"]
