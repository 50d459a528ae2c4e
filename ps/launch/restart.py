"""Restarts a shard's process after its death, for shards that recover from a WAL or an autosave.

A process that is killed, also by the kernel for want of memory, is restarted at once on the same
endpoint. Its workers find it there, see from its boot number that it is a new process, and send the
pushes that were not acknowledged. There is no restart in three cases:

- The process reported a failure, such as a full disk or a damaged autosave: the next process would
  fail as well.
- Its machine is gone.
- `restart_enabled` is off. A shard that recovers from an autosave has lost the updates since then,
  and its workers may be unable to repeat them all (worker/job/shards.py).

A shard is given up after a few crashes in a row, each followed by a longer pause (`RestartPolicy`,
which replicated shards share); the error names the last cause. A process that never serves, or
ends soon after it began to serve, has crashed. The time since its start does not count: on a busy
machine a start takes seconds. A process that was killed from outside has not crashed, whether it
served or was starting: it is restarted however often and however soon that happens.
"""

import threading
import time
from collections.abc import Callable
from math import inf

from ps.launch.process_handle import ExitReason, ProcessHandle, Stranded
from ps.logs import Logger
from shards.errors import DownpourError, GiveUp

QUICK_S = 1.0
"""A process that exits after serving for fewer seconds than this, or never serves, crashed."""
MAX_QUICK = 5
"""Consecutive crashes before a shard is given up."""
MAX_KILLED_PAUSES = 6
"""How often the pause doubles while processes are killed as they start: up to 3 s."""
PAUSE_S = 0.1
"""Initial pause in seconds before a restart; it doubles with each consecutive crash."""


class RestartPolicy:
    """Counts the deaths of successive processes with one task, and their consecutive crashes.

    It says how long to wait before the next start, and when to give up. Replicated shards are never
    given up, because they serve without the missing process.
    """

    def __init__(self, pause_s: float | None = None, longest_s: float = inf) -> None:
        """`pause_s` (default: PAUSE_S) doubles with each crash in a row, up to `longest_s`."""
        self.all = 0
        self.quick = 0
        self._killed_starts = 0  # in a row
        self._first_s = PAUSE_S if pause_s is None else pause_s
        self._longest_s = longest_s

    def count_death(self, served_s: float | None, *, killed: bool = False) -> None:
        """Count a death after `served_s` seconds of service; None if the process never served.

        `killed`: from outside, which is no crash. If that happens while processes start, the pauses
        grow, because the kernel may do it for want of memory.
        """
        self.all += 1
        if served_s is None and killed:
            self._killed_starts += 1
            return
        self._killed_starts = 0
        quick = served_s is None or (served_s < QUICK_S and not killed)
        self.quick = self.quick + 1 if quick else 0

    @property
    def too_many(self) -> bool:
        """True if to give up, because another process would crash as well."""
        return self.quick >= MAX_QUICK

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next start."""
        in_a_row = self.quick + min(self._killed_starts, MAX_KILLED_PAUSES)
        if not in_a_row:
            return 0.0
        return min(self._longest_s, self._first_s * 2.0 ** min(in_a_row - 1, 60))


class RestartingProcess:
    """One shard that runs in a sequence of processes.

    `child` is the current process, or one that has just died until the next is started. While
    `restart_enabled` is off, a death is final.
    """

    def __init__(
        self,
        child: ProcessHandle,
        restart: Callable[[], ProcessHandle],
        start_s: float,
        log: Logger,
        *,
        restart_enabled: bool = True,
        given_up: Callable[[str, ProcessHandle], None] = lambda *_: None,
    ) -> None:
        """`child` serves already; `restart` starts the next process without waiting for it.

        Each later process has `start_s` seconds to serve. `given_up` is called with the cause and
        the last process when there will be no other.
        """
        self._given_up = given_up
        self.child = child
        self._restart = restart
        self._start_s = start_s
        self._logger = log
        assert child.pid is not None, "it serves, so it has reported its process id"
        self._pid = child.pid
        self._since = time.monotonic()
        self._deaths = RestartPolicy()
        self._lock = threading.Lock()  # guards starting a process against `ask_to_end`
        self._ending = threading.Event()
        self._restart_enabled = restart_enabled
        self._failure: str | None = None
        self._losses: list[str] = []
        name = f"restarts-{child.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The id of the current process; that of its predecessor until it has reported its own."""
        if (pid := self.child.pid) is not None:
            self._pid = pid
        return self._pid

    @property
    def deaths(self) -> int:
        """The number of the shard's processes that have died, while serving or starting."""
        return self._deaths.all

    @property
    def restart_enabled(self) -> bool:
        return self._restart_enabled

    @restart_enabled.setter
    def restart_enabled(self, whether: bool) -> None:
        # After a call with False has returned, no process is started. One that is starting by then
        # may still serve: it has received nothing yet, loses nothing that it receives, and its own
        # death is final. Waiting for it here would delay the caller's other shards.
        with self._lock:
            self._restart_enabled = whether

    def lost_updates(self) -> list[str]:
        """The deaths since the last call that were followed by a restart, in words."""
        count = len(self._losses)  # the thread may append another meanwhile
        losses, self._losses[:count] = self._losses[:count], []
        return losses

    def check(self) -> None:
        """Raise GiveUp if the shard has been given up."""
        if self._failure is not None:
            raise GiveUp(self._failure)

    def ask_to_end(self) -> None:
        with self._lock:
            self._ending.set()
        self.child.ask_to_end()

    def end(self) -> None:
        """Wait until the current process has ended; kill it if that takes too long."""
        self.child.stop()
        self._thread.join()
        self.child.close()

    def _run(self) -> None:
        try:
            while self._restart_until_served(self.child.wait()):
                pass
            if self._failure is not None and not self._ending.is_set():
                self._given_up(self._failure, self.child)
        except BaseException as error:  # whatever it is, `check` raises it
            cause = f"{type(error).__name__}: {error}"
            self._failure = f"{self.child.name} is not restarted: {cause}"
            self._logger.exception("%s is not restarted", self.child.name)

    def _restart_until_served(self, fate: ExitReason) -> bool:
        """Restart until a process serves; False if the shard is to end, or is given up."""
        if self._ending.is_set():
            return False
        first, how, died = True, fate.text, f"{self.child.name} has {fate.text}"
        if fate.reported:
            self._failure = died
            return False
        self._deaths.count_death(time.monotonic() - self._since, killed=fate.killed)
        while not self._deaths.too_many:
            if self._ending.wait(self._deaths.pause_s):
                return False
            try:
                return self._start_next(died, first=first)
            except Stranded as error:
                self._failure = str(error)
                return False
            except DownpourError as error:
                how, first = str(error), False
                self._logger.warning("%s; trying again", how)
                hangs = self.child.alive
                self.child.stop()  # while it reads the WAL, it holds the lock of the folder
                fate = self.child.wait()
                if fate.reported:
                    self._failure = how
                    return False
                self._deaths.count_death(None, killed=fate.killed and not hangs)
        self._failure = (
            f"{self.child.name} has died {self._deaths.quick} times in a row, each before it had"
            f" served for {QUICK_S:g} s; the last time: {how}"
        )
        return False

    def _start_next(self, died: str, *, first: bool) -> bool:
        """Start the next process and wait until it serves; False if no restart is wanted."""
        with self._lock:
            if self._ending.is_set():
                return False
            if not self._restart_enabled:
                self._failure = died
                return False
            if first:  # once for all attempts, and before a worker can notice
                self._losses.append(died)
                self._logger.warning("%s; restarting it", died)
            former, self.child = self.child, self._restart()
        former.close()
        self.child.endpoint(time.monotonic() + self._start_s)
        self._since = time.monotonic()
        self._logger.info("%s serves again", self.child.name)
        return True
