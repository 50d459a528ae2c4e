"""Each stage of a start has the whole time, and a start stops once its application has ended."""

from threading import Event
from types import SimpleNamespace

import pytest

from worker.spark import start_limit
from worker.spark.start_limit import StartLimit

SEVERAL_LOOKS_S = 0.1


class Start:
    """A start with a limit, on a clock that a test sets; and whether the limit stopped it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.given_up, self.times_given_up = 0.0, Event(), 0
        monkeypatch.setattr(start_limit, "_LOOK_S", 0.01)
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr(start_limit, "time", clock)

    def give_up(self) -> None:
        """Note the call."""
        self.times_given_up += 1
        self.given_up.set()

    def begin(self, seconds: float | None, *, has_ended: bool = False) -> StartLimit:
        """The limit of the start."""
        return StartLimit(seconds, self.give_up, lambda: has_ended)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """A start at 0 s."""
    return Start(monkeypatch)


def test_stages(start: Start) -> None:
    """The first task has the same seconds again, from the registration on; then nothing runs."""
    limit = start.begin(60.0)
    start.now_s = 59.0
    limit.register()
    start.now_s = 118.0
    assert not start.given_up.wait(SEVERAL_LOOKS_S)
    limit.end()
    start.now_s = 1000.0
    assert not start.given_up.wait(SEVERAL_LOOKS_S)
    assert (limit.registered, limit.late.is_set()) == (True, False)


@pytest.mark.parametrize("registered", [False, True])
def test_late(start: Start, *, registered: bool) -> None:
    """A stage that takes longer gives up once, and shows which it was."""
    limit = start.begin(60.0)
    if registered:
        limit.register()
    start.now_s = 60.0
    assert start.given_up.wait(60)
    assert limit.late.is_set()
    assert limit.registered == registered
    assert start.times_given_up == 1


def test_ended(start: Start) -> None:
    """Once the cluster has ended the application, a start gives up before its time."""
    limit = start.begin(60.0, has_ended=True)
    assert start.given_up.wait(60)
    assert not limit.late.is_set()


def test_no_limit(start: Start) -> None:
    """Without seconds nothing gives up."""
    limit = start.begin(None, has_ended=True)
    limit.register()
    assert not start.given_up.wait(SEVERAL_LOOKS_S)
