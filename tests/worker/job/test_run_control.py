"""The orders to a run: each is taken once, in sequence, and has one answer."""

import signal
import threading
import time
import weakref

import pytest

from shards.errors import BadInput, DownpourError
from worker.job.run_control import (
    ORDERS,
    PendingOrder,
    ReshardOrder,
    RunControl,
    SettingsOrder,
    SnapshotOrder,
)

RESHARD = ReshardOrder(3)


def test_orders_are_taken_in_sequence() -> None:
    """Those that were submitted come first, then those of the inbox."""
    control = RunControl()
    inbox = [PendingOrder(SnapshotOrder())]
    control.read_inbox(lambda: inbox.pop() if inbox else None)
    control.submit(RESHARD)
    control.submit(SettingsOrder({"staleness": 1}))
    taken = []
    while (pending := control.take()) is not None:
        taken.append(pending.order)
    assert taken == [RESHARD, SettingsOrder({"staleness": 1}), SnapshotOrder()]


def test_every_order_has_one_answer() -> None:
    """The first answer counts. At the end, orders that wait, orders that were taken and not
    answered, and later ones get the answer that they were not carried out."""
    answers: list[tuple[str, DownpourError | None, str]] = []

    def submit(name: str) -> None:
        control.submit(RESHARD, lambda error, text: answers.append((name, error, text)))

    with RunControl() as control:
        for name in ("done", "taken", "waiting"):
            submit(name)
        done, _ = control.take(), control.take()
        assert done is not None
        done.answer(None, "moved")
    submit("late")
    control.close()
    assert answers[0] == ("done", None, "moved")
    assert [(name, str(error)) for name, error, _ in answers[1:]] == [
        (name, "reshard: the run ended before it had 3 shards")
        for name in ("waiting", "taken", "late")
    ]


def test_answered_orders_are_forgotten() -> None:
    """A run that trains for weeks keeps no order that it has answered."""
    control = RunControl()
    control.submit(RESHARD)
    control.submit(RESHARD)
    answered = control.take()
    assert answered is not None
    reference = weakref.ref(answered)
    answered.answer(None, "moved")
    del answered
    control.take()
    assert reference() is None


def test_no_order_is_lost_at_the_end() -> None:
    """Orders that other threads submit while the run ends are answered once each."""
    answers: list[int] = []
    control, begun = RunControl(), threading.Barrier(5)

    def submit(thread: int) -> None:
        begun.wait(60)
        for number in range(500):
            value = 500 * thread + number
            control.submit(RESHARD, lambda *_, value=value: answers.append(value))

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    begun.wait(60)
    for _ in range(100):
        control.take()
    control.close()
    for thread in threads:
        thread.join(60)
    assert sorted(answers) == list(range(2000))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "set: expected staleness or rate_factor, which may change .*, got none"),
        ({"shards": 2}, "set: expected staleness or rate_factor, which may change .*, got shards"),
        ({"staleness": -1}, "staleness: expected .*, got -1"),
        ({"rate_factor": 0}, "rate_factor: expected more than 0, .*, got 0"),
    ],
)
def test_settings_that_cannot_change(changes: dict[str, object], line: str) -> None:
    """Other options, and values that are none, are refused by name."""
    with pytest.raises(BadInput, match=line):
        SettingsOrder(changes).check()


def test_orders_have_names() -> None:
    """The names are those of the service's journal, and of the files in a run folder."""
    assert list(ORDERS) == ["snapshot", "reshard", "set"]


def test_orders_to_stop_interrupt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second signal would end the training without the snapshot that the first one asked for."""
    sent: list[tuple[int | None, int]] = []
    monkeypatch.setattr(signal, "pthread_kill", lambda *arguments: sent.append(arguments))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    once, control = (threading.main_thread().ident, signal.SIGTERM), RunControl()
    control.stop()
    control.stop()
    assert sent == [once]
    control.stop(now=True)
    assert sent == [once] * 2
