"""The processes of a job of the service, as a test counts and ends them."""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress

from deploy.service.launcher import is_subreaper, processes_with


def processes_of(job: str) -> list[int]:
    """The ids of a job's processes, but for the subreaper that waits for them."""
    marked = processes_with({f"DOWNPOUR_JOB={job}"})
    return [pid for pid in marked if not is_subreaper(pid)]


def kill_processes(jobs: Iterable[str]) -> None:
    """Kill every process of these jobs, and return when none is left."""
    marks = {f"DOWNPOUR_JOB={job}" for job in jobs}
    # Again and again: a subreaper may start its runner after the look that saw only itself.
    while pids := processes_with(marks):
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)  # where this process is its parent, as the service was
        time.sleep(0.01)
