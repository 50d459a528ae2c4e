"""Ctrl-C at moments of our choosing.

A KeyboardInterrupt may come between any two bytecodes: after records were collected and before they
are written, inside a library that is starting a process which it then forgets. So while something
must not be cut in two the first Ctrl-C is only noted. A second one interrupts, for who presses it
twice is in a hurry; what ends processes is not interrupted at all, or they would run on.

Signals reach the main thread alone; in any other these change nothing. Where Ctrl-C is ignored, as
in the background of a shell, it stays so; a SIGTERM that is taken for one is heard all the same.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Event, current_thread, main_thread
from types import TracebackType

from shards.errors import DownpourError


@contextmanager
def noted() -> Iterator[Event]:
    """An event that the first Ctrl-C sets; the caller looks at it when it suits."""
    pressed = Event()

    def press(*_: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    with _interrupted_by(press):
        yield pressed


@contextmanager
def deferred() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end for a Ctrl-C within."""
    with noted() as pressed:
        try:
            yield
        except DownpourError:
            # A terminal sends it to child processes, too, whose end is then no error.
            if pressed.is_set():
                raise KeyboardInterrupt from None
            raise
    if pressed.is_set():
        raise KeyboardInterrupt


@contextmanager
def sigterm_too() -> Iterator[None]:
    """Take a SIGTERM, by which services are stopped, for a Ctrl-C."""
    with _handled(_interrupt, signal.SIGTERM):
        yield


@contextmanager
def asked_for(number: signal.Signals) -> Iterator[Event]:
    """An event that each signal of this number sets; the caller clears it."""
    asked = Event()
    with _handled(lambda *_: asked.set(), number):
        yield asked


class SafeExitStack(ExitStack):
    """An exit stack that unwinds to its end, whatever is pressed meanwhile."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        with _interrupted_by(lambda *_: None):
            return super().__exit__(kind, error, trace)


# What an interrupt does at present, the innermost last.
_interrupts: list[Callable[..., None]] = []


def _interrupt(*_: object) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.raise_signal(signal.SIGINT)
    elif _interrupts:
        _interrupts[-1]()
    else:
        raise KeyboardInterrupt


@contextmanager
def _interrupted_by(handler: Callable[..., None]) -> Iterator[None]:
    if current_thread() is not main_thread():
        yield
        return
    _interrupts.append(handler)
    try:
        with _handled(handler, signal.SIGINT):
            yield
    finally:
        _interrupts.pop()


@contextmanager
def _handled(handler: Callable[..., None], number: signal.Signals) -> Iterator[None]:
    ignored = signal.getsignal(number) in {signal.SIG_IGN, None}
    if ignored or current_thread() is not main_thread():
        yield
        return
    former = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, former)
