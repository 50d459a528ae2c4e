"""Virtual time: one heap of what is to happen, one seeded generator, and clocks that run askew.

Nothing in a simulation waits. The next thing to happen is taken off the heap, time is what it says,
and whatever it causes is put back. Equal times keep the order in which they were planned, so a seed
alone decides a run.
"""

import heapq
import random
from collections.abc import Callable
from typing import Any

Action = Callable[..., object]


class Clock:
    """True time, in seconds from the start, and everything that is still to happen."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self._planned: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._order = 0

    def after(self, delay_s: float, action: Action, *arguments: Any) -> None:
        """Do it so many seconds from now."""
        self._order += 1
        heapq.heappush(self._planned, (self.now + delay_s, self._order, action, arguments))

    def run(self, goes_on: Callable[[], object], end: float) -> bool:
        """Let things happen while `goes_on` says so; False if it still does at `end`."""
        planned, pop = self._planned, heapq.heappop
        while goes_on():
            self.now, _, action, arguments = pop(planned)
            action(*arguments)
            if self.now > end:
                return False
        return True


class Party:
    """One process: its life, its pauses, and its own idea of the time."""

    def __init__(self, clock: Clock, name: str) -> None:
        """`name` is what faults call its end of a link."""
        self.name = name
        self.alive = True
        self.frozen_until = 0.0
        self._clock = clock
        self._rate, self._since, self._then = 1.0, 0.0, 0.0

    @property
    def now(self) -> float:
        """What its monotonic clock shows."""
        return self._then + self._rate * (self._clock.now - self._since)

    def skew(self, rate: float) -> None:
        """Its clock runs at `rate` from now on; it does not jump."""
        self._then, self._since, self._rate = self.now, self._clock.now, rate

    def at(self, action: Action, *arguments: Any) -> None:
        """Do it here: when it thaws, if it is stopped like a process; never, if it is dead."""
        if self.alive:
            if self.frozen_until <= self._clock.now:
                action(*arguments)
            else:
                self._clock.after(self.frozen_until - self._clock.now, self.at, action, *arguments)

    def after(self, delay_s: float, action: Action, *arguments: Any) -> None:
        """Do it here, so many seconds from now."""
        self._clock.after(delay_s, self.at, action, *arguments)

    def every(self, period_s: float, action: Action) -> None:
        """Repeat it while this process lives; what falls into a pause is done once, after it."""

        def again() -> None:
            action()
            self._clock.after(period_s, self.at, again)

        self._clock.after(self._clock.random.random() * period_s, self.at, again)
