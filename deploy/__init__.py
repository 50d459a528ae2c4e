"""Assembles and runs whole jobs: the command line, the run folder, the simulator.

`spark_environment` finds the Java and the Python for a Spark session of your own; the settings of
`spark_settings` start its workers sooner. `record` and `Recorder` record a run of a program of
yours, which `downpour plot` draws.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from deploy.clusters.java import spark_environment, spark_settings

if TYPE_CHECKING:
    from deploy.run.recording import Recorder, record

__all__ = ["Recorder", "record", "spark_environment", "spark_settings"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("deploy.run.recording"), name)
    raise AttributeError(f"module deploy has no attribute {name}")
