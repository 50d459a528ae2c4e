"""Processes that start sooner than a user's: without numba; and Spark's Python workers, with
libraries loaded.

To load numba takes most of a start. A Python worker of Spark lives for a task or two, and loads
pandas and PyArrow in each; here it is forked from a process that has them. On a cluster it loads
this project's code itself; the embedded Spark has a daemon of its own (worker/spark/daemon.py).
"""

import os
from pathlib import Path

# C1 alone and the serial collector halve what a start of a driver costs. To verify the bytecode of
# Spark's ten thousand classes takes an eighth of one.
QUICK_JAVA = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    " -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)
_DAEMON_NAME = "preloaded_spark_daemon"
_DAEMON = """\
import importlib

from pyspark.daemon import manager

for library in ("pyspark.worker", "pandas", "pyarrow", "structlog", "zmq", "msgspec"):
    try:
        importlib.import_module(library)
    except ImportError:
        pass  # an executor's Python may have fewer
manager()
"""


def preload_spark_workers(folder: Path) -> str:
    """Write Spark's daemon into a folder of the import path; gives the options of a Java that uses
    it, and starts sooner.
    """
    (folder / f"{_DAEMON_NAME}.py").write_text(_DAEMON)
    return f"{QUICK_JAVA} -Dspark.python.daemon.module={_DAEMON_NAME}"


def without_numba(folder: Path) -> str:
    """Make a folder that hides numba from every process with it first on its import path."""
    folder.mkdir()
    (folder / "numba.py").write_text('raise ImportError("left out")\n')
    return str(folder)


def import_path(*folders: Path) -> dict[str, str]:
    """The environment of a Python that imports from `folders`, after those of PYTHONPATH."""
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([*([before] if before else []), *map(str, folders)])}
