"""Ctrl-C is recorded, deferred or unchanged, as requested; the handler is always restored."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shards.errors import BadInput
from worker.spark.signals import (
    SafeExitStack,
    defer_interrupt,
    hangup_spares_children,
    on_signal,
    record_interrupt,
    sigterm_too,
)


@pytest.fixture(autouse=True)
def plain_handler() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, as in a user's process, before each test and after it.

    Nor is a closed terminal ignored, as it is where the tests run under nohup.
    """
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    former_hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    assert signal.signal(signal.SIGHUP, former_hangup) is signal.SIG_DFL
    assert signal.signal(signal.SIGINT, former) is signal.default_int_handler


def press(number: signal.Signals = signal.SIGINT) -> None:
    signal.raise_signal(number)


def test_the_first_press_is_noted() -> None:
    """The first Ctrl-C only sets the event; without one the event stays clear."""
    with record_interrupt() as pressed:
        assert not pressed.is_set()
        press()
        assert pressed.is_set()


def test_the_second_press_interrupts() -> None:
    """A second Ctrl-C interrupts."""
    with record_interrupt():
        press()
        with pytest.raises(KeyboardInterrupt):
            press()


def deferring(
    done: list[str],
    *,
    pressed: bool,
    error: type[Exception] | None = None,
    by: signal.Signals = signal.SIGINT,
) -> None:
    with defer_interrupt():
        if pressed:
            press(by)
        if error is not None:
            raise error("within")
        done.append("done")


def test_a_press_is_put_off_to_the_end() -> None:
    """The context completes before the interrupt is raised; without a Ctrl-C nothing is raised."""
    done: list[str] = []
    deferring(done, pressed=False)
    with pytest.raises(KeyboardInterrupt):
        deferring(done, pressed=True)
    assert done == ["done", "done"]


@pytest.mark.parametrize(
    ("error", "pressed", "raised"),
    [
        (BadInput, True, KeyboardInterrupt),
        (BadInput, False, BadInput),
        (ZeroDivisionError, True, ZeroDivisionError),
    ],
)
def test_errors_within(error: type[Exception], pressed: bool, raised: type[BaseException]) -> None:
    """After a Ctrl-C an error of ours comes from a killed child; any other error is raised."""
    with pytest.raises(raised):
        deferring([], pressed=pressed, error=error)


def unwinding(done: list[str]) -> None:
    def end(name: str) -> None:
        press()
        done.append(name)

    with SafeExitStack() as stack:
        stack.callback(end, "first")
        stack.callback(end, "second")
        raise ZeroDivisionError


def test_unwinding_is_left_alone() -> None:
    """However often Ctrl-C is pressed, every exit completes, and the error propagates."""
    done: list[str] = []
    with pytest.raises(ZeroDivisionError):
        unwinding(done)
    assert done == ["second", "first"]


def test_sigterm_stops_as_ctrl_c_does() -> None:
    """SIGTERM acts like Ctrl-C at that moment; after the context it ends the process again."""
    former = signal.getsignal(signal.SIGTERM)
    with sigterm_too(), record_interrupt() as pressed:
        signal.raise_signal(signal.SIGTERM)
        assert pressed.is_set()
    assert signal.getsignal(signal.SIGTERM) is former


def test_sigterm_is_heard_where_ctrl_c_is_ignored() -> None:
    """A run in the background of a script obeys SIGTERM: recorded, deferred, or at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with sigterm_too():
            with record_interrupt() as pressed:
                press()
                assert not pressed.is_set()
                signal.raise_signal(signal.SIGTERM)
                assert pressed.is_set()
            done: list[str] = []
            with pytest.raises(KeyboardInterrupt):
                deferring(done, pressed=True, by=signal.SIGTERM)
            assert done == ["done"]
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_elsewhere_nothing_changes() -> None:
    """Other threads get no signals; where Ctrl-C is ignored it stays ignored."""

    def enter() -> object:
        with sigterm_too(), record_interrupt(), defer_interrupt(), SafeExitStack():
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(enter).result() is signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert enter() is signal.SIG_IGN
        with defer_interrupt():
            press()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_request_is_heard_where_ctrl_c_is_ignored() -> None:
    """A shell that starts a run in the background has it ignore Ctrl-C, and that alone: a signal
    that asks for something would end the run if nobody took it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        asked: list[bool] = []
        with on_signal(signal.SIGUSR1, lambda: asked.append(True)):
            signal.raise_signal(signal.SIGUSR1)
        assert asked == [True]
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_closed_terminal_stops_as_ctrl_c_does() -> None:
    """Only the first SIGHUP counts: the kernel and the shell each send one, and nobody hurries."""
    former = signal.getsignal(signal.SIGHUP)
    with sigterm_too(), record_interrupt() as pressed:
        signal.raise_signal(signal.SIGHUP)
        assert pressed.is_set()
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is former


def test_a_closed_terminal_after_ctrl_c_is_no_second_press() -> None:
    """A save in progress completes; without one the signal interrupts at once."""
    with sigterm_too(), record_interrupt() as pressed:
        press()
        signal.raise_signal(signal.SIGHUP)
        assert pressed.is_set()
    with pytest.raises(KeyboardInterrupt), sigterm_too():
        signal.raise_signal(signal.SIGHUP)


def test_children_outlive_a_closed_terminal() -> None:
    """A process that is started within ignores SIGHUP; one that comes meanwhile is not lost."""
    with sigterm_too(), record_interrupt() as pressed:
        with hangup_spares_children():
            script = "import signal; print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)"
            done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
            signal.raise_signal(signal.SIGHUP)
            assert not pressed.is_set()
        assert pressed.is_set()
    assert done.stdout == b"True\n"


def test_what_is_written_to_a_closed_terminal_is_dropped() -> None:
    """Writing to it would fail, and end what must still be saved."""
    parent, child = pty.openpty()
    kept = os.dup(1)
    try:
        os.dup2(child, 1)
        with sigterm_too(), record_interrupt():
            os.close(child)
            os.close(parent)
            with pytest.raises(OSError, match="Input/output error"):
                os.write(1, b"lost")
            signal.raise_signal(signal.SIGHUP)
            os.write(1, b"dropped")
    finally:
        os.dup2(kept, 1)
        os.close(kept)


_LEAVES = """
import os, signal, sys, time
from worker.spark.signals import record_interrupt, sigterm_too
with sigterm_too(2.0), record_interrupt():
    print("ready", flush=True)
    while True:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            print("hurried", flush=True)
"""


def test_sigterm_has_a_deadline() -> None:
    """After SIGTERM a second interrupt comes before the deadline, and at it the process exits."""
    command = [sys.executable, "-c", _LEAVES]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.stdout.read() == "hurried\n"
    assert process.wait() == 130
    process.stdout.close()
