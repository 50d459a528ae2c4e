"""Starting a shard's process again when it has died, for shards that go on from a log or a save.

A process that is killed, or that the kernel ends for want of memory, is started again at once, on
the same endpoint; its workers find it there, learn from its boot number that it is another life,
and send what it did not acknowledge. A process that says what failed, such as a full disk, is not:
that would fail again. Nor is one whose machine is gone, nor any while deaths are not `followed`:
a shard that goes on from a save has forgotten what it was told since, and that may be more than it
can be told anew (worker/job_shards.py).

A process that does not come to serve, or fails as soon as it does, is given up after a few times in
a row, each after a longer pause, with what it died of. What counts is how long it has served, and
not how long ago it was started, which on a busy machine takes seconds. One that served and was then
killed from outside has not failed: however often and however soon that happens, another follows.
"""

import threading
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from shards.errors import DownpourError, GiveUp

QUICK_S = 1.0
"""One that failed after serving for less than this, or that never served, died quickly;"""
MOST_QUICK = 5
"""so many quick deaths in a row are enough;"""
PAUSE_S = 0.1
"""and this, doubled each time, is the pause between them."""


class Stranded(GiveUp):
    """Where it would have to be started again there is nothing any more; trying is of no use."""


class ExitReason(NamedTuple):
    """How a process ended; `told` if it said itself why, `killed` if others ended it."""

    text: str
    told: bool
    killed: bool = False


class RestartableProcess(Protocol):
    """One process of a shard."""

    name: str

    def wait(self) -> ExitReason:
        """Return when it has ended, with how."""
        ...

    def endpoint(self, until: float) -> str:
        """Where it listens; raises a DownpourError when it does not, Stranded if none can."""
        ...

    def ask_to_end(self) -> None: ...

    def stop(self) -> None:
        """Wait until it has ended; kill it when that takes long."""
        ...

    def close(self) -> None:
        """Let go of what leads to one that has ended."""
        ...


class CrashLoop:
    """How often one process after another has died, and how often quickly without a break."""

    def __init__(self) -> None:
        self.all = 0
        self.quick = 0

    def died(self, served_s: float | None, *, killed: bool = False) -> None:
        """One has died that served for so long; None: that never did. `killed` by others."""
        self.all += 1
        quick = served_s is None or (served_s < QUICK_S and not killed)
        self.quick = self.quick + 1 if quick else 0

    @property
    def too_many(self) -> bool:
        """Whether another one would only die, too."""
        return self.quick >= MOST_QUICK

    @property
    def pause_s(self) -> float:
        """How long to wait before the next."""
        return PAUSE_S * 2 ** (self.quick - 1) if self.quick else 0.0


C = TypeVar("C", bound=RestartableProcess)


class RestartingProcess(Generic[C]):
    """One shard, in one process after another; `restart` makes the next, without waiting for it.

    `child` is the present one; one that has just died, until the next is started. While `followed`
    is not set, no next one is started.
    """

    def __init__(self, child: C, restart: Callable[[], C], start_s: float) -> None:
        """`child` serves by now; a later one is waited for `start_s`."""
        self.child = child
        self._restart = restart
        self._start_s = start_s
        self._since = time.monotonic()
        self._deaths = CrashLoop()
        self._lock = threading.Lock()  # between starting a process and ending the last one
        self._ending = threading.Event()
        self._followed = True
        self._failure: str | None = None
        self._losses: list[str] = []
        name = f"keeps-{child.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def deaths(self) -> int:
        """How many of its processes have died, serving or about to."""
        return self._deaths.all

    @property
    def restart_enabled(self) -> bool:
        return self._followed

    @restart_enabled.setter
    def restart_enabled(self, whether: bool) -> None:
        # Once it is unset and this returns, no process is started. One that is about to serve by
        # then may: it was told nothing yet, and all that it will be told it remembers until it
        # dies, which is the end. To wait for it here would hold up whoever looks after the others.
        with self._lock:
            self._followed = whether

    def lost_updates(self) -> list[str]:
        """How those died in whose place another was started since this was last asked."""
        told = len(self._losses)  # another may be added meanwhile
        losses, self._losses[:told] = self._losses[:told], []
        return losses

    def check(self) -> None:
        """Raise GiveUp when it has been given up."""
        if self._failure is not None:
            raise GiveUp(self._failure)

    def ask_to_end(self) -> None:
        with self._lock:
            self._ending.set()
        self.child.ask_to_end()

    def end(self) -> None:
        """Wait until its process has ended; kill it when that takes long."""
        self.child.stop()
        self._thread.join()
        self.child.close()

    def _run(self) -> None:
        try:
            self._keep()
        except BaseException as error:  # noqa: BLE001  # whatever it is, `check` tells it
            what = f"{type(error).__name__}: {error}"
            self._failure = f"{self.child.name} is not followed by another: {what}"

    def _keep(self) -> None:
        name = self.child.name
        while True:
            fate = self.child.wait()
            if self._ending.is_set():
                return
            if fate.told:
                self._failure = f"{name} has {fate.text}"
                return
            self._deaths.died(time.monotonic() - self._since, killed=fate.killed)
            if not self._again(f"{name} has {fate.text}", fate.text):
                return

    def _again(self, died: str, how: str) -> bool:
        """Have it serve again; False if it is to end, or is given up."""
        first = True
        while not self._deaths.too_many:
            if self._ending.wait(self._deaths.pause_s):
                return False
            try:
                return self._started(died, first=first)
            except Stranded as error:
                self._failure = str(error)
                return False
            except DownpourError as error:
                how, first = str(error), False
                self.child.stop()  # one that still reads the log would not let another have it
                self._deaths.died(None)
        self._failure = (
            f"{self.child.name} has died {self._deaths.quick} times in a row, each before it had"
            f" served for {QUICK_S:g} s; the last time: {how}"
        )
        return False

    def _started(self, died: str, *, first: bool) -> bool:
        """Start the next process and wait until it serves; False if none is wanted any more."""
        with self._lock:
            if self._ending.is_set():
                return False
            if not self._followed:
                self._failure = died
                return False
            if first:  # of perhaps several; and before anybody can have heard from it
                self._losses.append(died)
            former, self.child = self.child, self._restart()
        former.close()
        self.child.endpoint(time.monotonic() + self._start_s)
        self._since = time.monotonic()
        return True
