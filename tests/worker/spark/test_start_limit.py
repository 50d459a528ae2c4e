"""Each stage of a start has the whole time."""

from collections.abc import Callable
from unittest.mock import Mock

import pytest

from worker.spark import start_limit
from worker.spark.start_limit import StartLimit


class Clock:
    """Timers by hand: the one that runs, if any."""

    def __init__(self) -> None:
        self.started = 0
        self.running: tuple[float, Callable[[], None]] | None = None

    def timer(self, seconds: float, end: Callable[[], None]) -> Mock:
        """A stand-in for threading.Timer."""

        def start() -> None:
            self.started += 1
            self.running = seconds, end

        def cancel() -> None:
            self.running = None

        return Mock(start=start, cancel=cancel)

    def ring(self) -> None:
        """The time of the timer that runs is over."""
        assert self.running is not None
        self.running[1]()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What the limits of a test run on."""
    clock = Clock()
    monkeypatch.setattr(start_limit, "Timer", clock.timer)
    return clock


def test_stages(clock: Clock) -> None:
    """The first task has the same seconds again, from the registration on; then nothing runs."""
    give_up = Mock()
    limit = StartLimit(60.0, give_up)
    limit.register()
    assert (clock.started, clock.running and clock.running[0]) == (2, 60.0)
    limit.end()
    assert clock.running is None
    assert (limit.registered, limit.late.is_set(), give_up.called) == (True, False, False)


@pytest.mark.parametrize("registered", [False, True])
def test_late(clock: Clock, *, registered: bool) -> None:
    """A stage that takes longer gives up once, and shows which it was."""
    give_up = Mock()
    limit = StartLimit(60.0, give_up)
    if registered:
        limit.register()
    clock.ring()
    assert limit.late.is_set()
    assert limit.registered == registered
    give_up.assert_called_once_with()


def test_no_limit(clock: Clock) -> None:
    """Without seconds no timer runs."""
    limit = StartLimit(None, Mock())
    limit.register()
    limit.end()
    assert clock.running is None
