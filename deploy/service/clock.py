"""The service's clock: that of the system, but it never goes back while the service runs.

Tokens, keys, retries and graces end at times of this clock. If the system's clock is set back, an
expired token stays expired, and nothing waits for the hour to pass once more.
"""

import time
from collections.abc import Callable

_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # that one counts a suspend


class SteadyClock:
    """Seconds since 1970: the system's, or, if that is less, its start plus the time since."""

    def __init__(
        self,
        system: Callable[[], float] = time.time,
        since_boot: Callable[[], float] = lambda: time.clock_gettime(_SINCE_BOOT),
    ) -> None:
        self._system = system
        self._since_boot = since_boot
        self._base = system() - since_boot()

    def __call__(self) -> float:
        return max(self._system(), self._base + self._since_boot())
