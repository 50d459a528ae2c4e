"""The time that a cluster's Spark has for its start."""

import time
from collections.abc import Callable
from threading import Event, Thread

_LOOK_S = 0.5  # between two looks at whether the application has ended


class StartLimit:
    """Seconds, or None, for each stage of a start: the registration, then the first task.

    The stage at which a start stops shows whether a cluster is busy or not there. Each stage has
    the whole time: the first waits for a master, the next one for free machines. A start also
    stops once `has_ended` says that the cluster has ended the application: Spark waits for ever
    for a job that is submitted while its context stops.
    """

    def __init__(
        self, seconds: float | None, give_up: Callable[[], None], has_ended: Callable[[], bool]
    ) -> None:
        self.registered, self.late = False, Event()
        self._seconds, self._give_up, self._has_ended = seconds, give_up, has_ended
        self._stage_ended = self._watch_stage()

    def register(self) -> None:
        """The application is registered: the time of the first task begins."""
        self.registered = True
        self.end()
        self._stage_ended = self._watch_stage()

    def end(self) -> None:
        """Stop the clock."""
        self._stage_ended.set()

    def _watch_stage(self) -> Event:
        """Start the clock of a stage; returns what stops it."""
        stage_ended = Event()
        if self._seconds is not None:
            watch = (stage_ended, time.monotonic() + self._seconds)
            Thread(target=self._watch, args=watch, name="spark-start-limit", daemon=True).start()
        return stage_ended

    def _watch(self, stage_ended: Event, until: float) -> None:
        while not stage_ended.wait(min(_LOOK_S, max(0.0, until - time.monotonic()))):
            if self._has_ended():
                return self._give_up()
            if time.monotonic() >= until:
                self.late.set()
                return self._give_up()
        return None
