"""The timeline of a run's start: when each part was ready, in seconds since the process began.

A start has parts that overlap, so it is a list of moments, not of durations. It is in the summary
and, at level `info`, in the log.
"""

import os
import time
from pathlib import Path

from ps.logs import logger

_LOG = logger(__name__)


class StartTimes:
    """The moments so far, by name; each counts once. Threads may note theirs."""

    def __init__(self) -> None:
        self._zero = time.monotonic() - process_age()
        self.moments: dict[str, float] = {}

    def note(self, name: str) -> None:
        """Note that a part is ready now."""
        if name not in self.moments:
            self.moments[name] = round(time.monotonic() - self._zero, 3)
            _LOG.info("start: %s after %.2f s", name, self.moments[name])


def process_age() -> float:
    """The seconds since this process was started; 0 where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # since the system was started
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began
