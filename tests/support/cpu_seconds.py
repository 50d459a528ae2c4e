"""The CPU seconds of a tree of processes, read while they live.

Those of Spark's Python workers are in no account once they have ended: their daemon ignores
SIGCHLD, so the kernel adds them to nobody's children. `getrusage` and `wait4` miss them.
"""

from contextlib import suppress

import psutil


def read_tree(pid: int) -> dict[int, float]:
    """The CPU seconds of a process and of each below it, by process id, without ended children."""
    seconds: dict[int, float] = {}
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                seconds[process.pid] = times.user + times.system
    return seconds


def count_with_ended(pid: int) -> float:
    """The CPU seconds of a process and all below it, and of children that were waited for."""
    total = 0.0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:4])
    return total
