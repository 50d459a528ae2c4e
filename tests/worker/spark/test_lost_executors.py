"""An application of a standalone master that has lost its executors for good is noticed."""

from types import SimpleNamespace
from typing import Any

import pytest

from shards.errors import NoServer
from worker.spark import lost_executors
from worker.spark.lost_executors import WITHOUT_S, ExecutorWatch


def frame(master: str) -> Any:
    """A DataFrame of a classic session on `master`."""
    session = SimpleNamespace(sparkContext=SimpleNamespace(master=master))
    return SimpleNamespace(sparkSession=session, _jdf=None)


class Look:
    """Looks of a watch at times in seconds, with executors there or not."""

    def __init__(self, df: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self._watch = ExecutorWatch(df)
        self._present = False
        monkeypatch.setattr(lost_executors, "has_executors", lambda _: self._present)

    def finds_lost(self, now: float, *, present: bool) -> NoServer | None:
        """The error of a look, if it raises one."""
        self._present = present
        try:
            self._watch.check(now)
        except NoServer as lost:
            return lost
        return None


def test_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time without an executor counts from the last that was there; before the first, never."""
    look = Look(frame("spark://h:7077"), monkeypatch)
    for now, present in (
        (0.0, False),
        (10 * WITHOUT_S, False),
        (10 * WITHOUT_S + 1, True),
        (11 * WITHOUT_S, False),
        (11 * WITHOUT_S + 0.5, True),
        (12 * WITHOUT_S, False),
    ):
        assert look.finds_lost(now, present=present) is None, now
    lost = look.finds_lost(12 * WITHOUT_S + 1, present=False)
    assert lost is not None
    assert lost.retryable
    assert str(lost).startswith(
        "Spark at spark://h:7077: expected an executor, got none for 300 s: "
    )


@pytest.mark.parametrize("master", ["local[2]", "yarn", "k8s://https://h:443"])
def test_other_masters(monkeypatch: pytest.MonkeyPatch, master: str) -> None:
    """An embedded Spark has none but the driver, and others give new ones by themselves."""
    look = Look(frame(master), monkeypatch)
    assert look.finds_lost(0.0, present=True) is None
    assert look.finds_lost(2 * WITHOUT_S, present=False) is None


def test_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Spark Connect's server has is not known here."""
    look = Look(SimpleNamespace(sparkSession=None), monkeypatch)
    assert look.finds_lost(0.0, present=True) is None
    assert look.finds_lost(2 * WITHOUT_S, present=False) is None


def test_a_jvm_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its job's own error is the better one."""

    def fail(_: object) -> None:
        raise ConnectionRefusedError

    look = Look(frame("spark://h:7077"), monkeypatch)
    assert look.finds_lost(0.0, present=True) is None
    monkeypatch.setattr(lost_executors, "has_executors", fail)
    assert look.finds_lost(2 * WITHOUT_S, present=False) is None
