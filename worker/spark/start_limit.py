"""The time that a cluster's Spark has for its start."""

from collections.abc import Callable
from threading import Event, Timer


class StartLimit:
    """Seconds, or None, for each stage of a start: the registration, then the first task.

    The stage at which a start stops shows whether a cluster is busy or not there. Each stage has
    the whole time: the first waits for a master, the next one for free machines.
    """

    def __init__(self, seconds: float | None, give_up: Callable[[], None]) -> None:
        self.registered, self.late = False, Event()
        self._seconds, self._give_up = seconds, give_up
        self._timer = self._start_timer()

    def register(self) -> None:
        """The application is registered: the time of the first task begins."""
        self.registered = True
        self.end()
        self._timer = self._start_timer()

    def end(self) -> None:
        """Stop the clock."""
        if self._timer:
            self._timer.cancel()

    def _start_timer(self) -> Timer | None:
        if self._seconds is None:
            return None
        timer = Timer(self._seconds, self._end_late)
        timer.start()
        return timer

    def _end_late(self) -> None:
        self.late.set()
        self._give_up()
