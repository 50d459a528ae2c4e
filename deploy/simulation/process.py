"""A process of a simulated cluster: it may end or pause, and its own clock may be skewed."""

from typing import Any

from deploy.virtual_clock import Action, Clock


class SimulatedProcess:
    """One simulated process, with pauses and a clock of its own."""

    def __init__(self, clock: Clock, name: str) -> None:
        """`name` is the process's name in faults and on links."""
        self.name = name
        self.alive = True
        self.frozen_until = 0.0
        self._clock = clock
        self._rate, self._since, self._then = 1.0, 0.0, 0.0

    @property
    def now(self) -> float:
        """The time in seconds of its own monotonic clock."""
        return self._then + self._rate * (self._clock.now - self._since)

    def skew(self, rate: float) -> None:
        """Run its clock at `rate` from now on, without a jump."""
        self._then, self._since, self._rate = self.now, self._clock.now, rate

    def at(self, action: Action, *arguments: Any) -> None:
        """Run the action in this process: after a pause if it is stopped, never if it is dead."""
        if self.alive:
            if self.frozen_until <= self._clock.now:
                action(*arguments)
            else:
                self._clock.after(self.frozen_until - self._clock.now, self.at, action, *arguments)

    def after(self, delay_s: float, action: Action, *arguments: Any) -> None:
        """Run the action in this process, `delay_s` seconds from now."""
        self._clock.after(delay_s, self.at, action, *arguments)

    def every(self, period_s: float, action: Action) -> None:
        """Repeat the action while this process lives; after a pause it is run only once."""

        def again() -> None:
            action()
            self._clock.after(period_s, self.at, again)

        self._clock.after(self._clock.random.random() * period_s, self.at, again)
