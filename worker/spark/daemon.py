"""The process from which Spark forks its Python workers, with what they need loaded.

Spark's own daemon imports nothing of a task, so each worker loads Arrow and this project's code
again. Forking is safe only while there is one thread and no socket. So a process that has more
after its imports starts again, at first without the modules that were named, then as Spark's own
daemon. Only the standard library is imported at the top, for another Python may run this file.
"""

import gc
import importlib
import os
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path

from worker.spark.head_start import AHEAD, OPTION, await_daemon, hand_over

PRELOADED = "DOWNPOUR_PRELOADED"
"""The variable with the names of further modules, which Python workers start with."""
NEEDED = ("pyspark.worker", "numpy.random", "pyarrow.compute", "pandas", "worker.spark.worker_task")
"""The modules that every worker imports: PyArrow loads Pandas to convert its first array."""
# PyArrow starts a thread of the allocator that it does not use.
_ONE_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}


def load() -> bool:
    """Import what a worker needs, and the modules of the user; returns whether to fork is safe.

    A module that fails here is imported again by the worker, which reports it. Each worker has
    random numbers of its own, as if it had imported NumPy and PyTorch itself.
    """
    os.environ |= _ONE_THREAD
    for module in (*NEEDED, *os.environ.get(PRELOADED, "").split()):
        # Spark reads the daemon's port from the standard output.
        with suppress(Exception), redirect_stdout(sys.stderr):
            importlib.import_module(module)
    if numpy := sys.modules.get("numpy"):
        os.register_at_fork(after_in_child=numpy.random.seed)
    if torch := sys.modules.get("torch"):
        os.register_at_fork(after_in_child=torch.default_generator.seed)
    gc.freeze()  # Spark has each worker collect garbage, which would copy all pages of the above
    threads = Path("/proc/self/task")
    return threads.is_dir() and len(list(threads.iterdir())) == 1


def main() -> None:
    """Serve Spark, as `pyspark.daemon` does; after a head start, when Spark's own daemon comes."""
    if sys.argv[1:2] == [OPTION]:
        if not await_daemon(Path(sys.argv[2]), load):
            return
    elif (address := os.environ.pop(AHEAD, "")) and hand_over(address):
        return
    elif not load():
        module = "pyspark.daemon"
        if modules := os.environ.pop(PRELOADED, ""):
            module = "worker.spark.daemon"
            sys.stderr.write(
                f"{modules}: not loaded ahead, for a process with threads is not safe to fork\n"
            )
            sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])
    from pyspark.daemon import manager

    manager()


if __name__ == "__main__":
    main()
