"""The time and memory that one trial may take; a trial beyond them has failed."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec

from shards import argument_checks

_PAGE = resource.getpagesize()


class TrialLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The seconds and the memory in MB that each trial may take beyond those of its process;
    None: no limit."""

    time_s: float | None = None
    memory_mb: int | None = None

    def __post_init__(self) -> None:
        if self.time_s is not None:
            argument_checks.number(
                "limits: time_s", self.time_s, least=0.001, expected="0.001 or more"
            )
        if self.memory_mb is not None:
            argument_checks.whole("limits: memory_mb", self.memory_mb, 1)

    @contextmanager
    def enforce(self) -> Iterator[None]:
        """Enforce the limits on the code inside, in the main thread of a process.

        Raises TimeoutError or MemoryError beyond them.
        """
        with self._limit_time(), self._limit_memory():
            yield

    @contextmanager
    def _limit_time(self) -> Iterator[None]:
        if self.time_s is None:
            yield
            return

        def raise_timeout(_: int, __: FrameType | None) -> None:
            raise TimeoutError(f"limits: time_s: expected at most {self.time_s:g} s, got more")

        former = signal.signal(signal.SIGALRM, raise_timeout)
        signal.setitimer(signal.ITIMER_REAL, self.time_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, former)

    @contextmanager
    def _limit_memory(self) -> Iterator[None]:
        if self.memory_mb is None:
            yield
            return
        former, most = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
        resource.setrlimit(resource.RLIMIT_AS, (used + self.memory_mb * 1_000_000, most))
        try:
            yield
        except MemoryError:
            raise MemoryError(
                f"limits: memory_mb: expected at most {self.memory_mb} MB, got more"
            ) from None
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (former, most))
