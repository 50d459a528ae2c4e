"""The process from which an embedded Spark forks its Python workers, with what they need loaded.

Spark's own daemon imports nothing of a task, so each worker loads Arrow and this project's code
again. Forking is safe only while there is one thread and no socket, so a process that has more
after its imports becomes Spark's own daemon.
"""

import importlib
import os
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path

NEEDED = ("pyspark.worker", "numpy.random", "pyarrow.compute", "worker.spark.worker_task")
# PyArrow starts a thread of the allocator that it does not use.
_ONE_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}


def load() -> bool:
    """Import what a worker needs; returns whether to fork is still safe.

    A module that fails is left to the worker, which reports it. Each worker has random numbers of
    its own, as if it had imported NumPy itself.
    """
    os.environ |= _ONE_THREAD
    for module in NEEDED:
        # Spark reads the daemon's port from the standard output.
        with suppress(Exception), redirect_stdout(sys.stderr):
            importlib.import_module(module)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        os.register_at_fork(after_in_child=numpy.random.seed)
    threads = Path("/proc/self/task")
    return threads.is_dir() and len(list(threads.iterdir())) == 1


def main() -> None:
    """Serve Spark, as `pyspark.daemon` does."""
    if not load():
        os.execv(sys.executable, [sys.executable, "-m", "pyspark.daemon", *sys.argv[1:]])
    from pyspark.daemon import manager

    manager()


if __name__ == "__main__":
    main()
