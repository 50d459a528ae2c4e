"""An application of a standalone master that has lost its executors for good is noticed."""

from types import SimpleNamespace
from typing import Any

import pytest

from shards.errors import NoServer
from worker.spark import lost_executors
from worker.spark.lost_executors import WITHOUT_S, ExecutorWatch

ONE = {"driver": ("h", 1), "0": ("h", 2)}
NONE = {"driver": ("h", 1)}


def frame(master: str) -> Any:
    """A DataFrame of a classic session on `master`."""
    session = SimpleNamespace(sparkContext=SimpleNamespace(master=master))
    return SimpleNamespace(sparkSession=session, _jdf=None)


def look(
    watch: ExecutorWatch, monkeypatch: pytest.MonkeyPatch, managers: dict[str, Any], now: float
) -> None:
    """Have a watch look at these block managers."""
    monkeypatch.setattr(lost_executors, "block_managers", lambda _: managers)
    watch.check(now)


def test_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time without an executor counts from the last that was there; before the first, never."""
    watch = ExecutorWatch(frame("spark://h:7077"))
    for now, managers in (
        (0.0, NONE),
        (10 * WITHOUT_S, NONE),
        (10 * WITHOUT_S + 1, ONE),
        (11 * WITHOUT_S, NONE),
        (11 * WITHOUT_S + 0.5, ONE),
        (12 * WITHOUT_S, NONE),
    ):
        look(watch, monkeypatch, managers, now)
    with pytest.raises(
        NoServer, match=r"^Spark at spark://h:7077: expected an executor, got none for 300 s: "
    ) as lost:
        look(watch, monkeypatch, NONE, 12 * WITHOUT_S + 1)
    assert lost.value.retryable


@pytest.mark.parametrize("master", ["local[2]", "yarn", "k8s://https://h:443"])
def test_other_masters(monkeypatch: pytest.MonkeyPatch, master: str) -> None:
    """An embedded Spark has none but the driver, and others give new ones by themselves."""
    watch = ExecutorWatch(frame(master))
    look(watch, monkeypatch, ONE, 0.0)
    look(watch, monkeypatch, NONE, 2 * WITHOUT_S)


def test_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Spark Connect's server has is not known here."""
    watch = ExecutorWatch(SimpleNamespace(sparkSession=None))  # type: ignore[arg-type]
    look(watch, monkeypatch, ONE, 0.0)
    look(watch, monkeypatch, NONE, 2 * WITHOUT_S)


def test_a_jvm_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its job's own error is the better one."""

    def fail(_: object) -> None:
        raise ConnectionRefusedError

    watch = ExecutorWatch(frame("spark://h:7077"))
    look(watch, monkeypatch, ONE, 0.0)
    monkeypatch.setattr(lost_executors, "block_managers", fail)
    watch.check(2 * WITHOUT_S)
