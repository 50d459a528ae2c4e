"""Virtual time: a heap of planned events, and a seeded random generator.

Nothing in a simulation waits. The next event is taken off the heap and sets the time, and the
events that it causes are added. Events of equal times keep the order in which they were planned, so
the seed alone decides a run.
"""

import heapq
import random
from collections.abc import Callable
from typing import Any

Action = Callable[..., object]


class Clock:
    """True time in seconds from the start, and all planned events."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self._planned: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._order = 0

    def after(self, delay_s: float, action: Action, *arguments: Any) -> None:
        """Run the action `delay_s` seconds from now."""
        self._order += 1
        heapq.heappush(self._planned, (self.now + delay_s, self._order, action, arguments))

    def at(self, time_s: float, action: Action, *arguments: Any) -> None:
        """Run the action at this time, which must not have passed."""
        assert time_s >= self.now, "time does not run backwards"
        self._order += 1
        heapq.heappush(self._planned, (time_s, self._order, action, arguments))

    def run(self, running: Callable[[], object], end: float) -> bool:
        """Process events while `running()` is true; False if it still is at the time `end`, or when
        nothing is planned."""
        planned, pop = self._planned, heapq.heappop
        while running():
            if not planned:
                return False
            self.now, _, action, arguments = pop(planned)
            action(*arguments)
            if self.now > end:
                return False
        return True
