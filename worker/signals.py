"""Ctrl-C at moments of our choosing.

A KeyboardInterrupt may come between any two bytecodes: after records were collected and before they
are written, inside a library that is starting a process which it then forgets. So while something
must not be cut in two the first Ctrl-C is only noted. A second one interrupts, for who presses it
twice is in a hurry; what ends processes is not interrupted at all, or they would run on.

Signals reach the main thread alone; in any other these change nothing. Where Ctrl-C is ignored, as
in the background of a shell, it stays so; a SIGTERM that is taken for one is heard all the same.
"""

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
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
    """Treat SIGTERM, by which services are stopped, and SIGHUP of a closed terminal as Ctrl-C.

    A closed terminal may send several SIGHUPs: only the first counts, and only where no Ctrl-C came
    before. From then on whatever this process writes to that terminal is discarded.
    """
    terminals = [number for number in range(3) if os.isatty(number)]

    def hang_up(*_: object) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        _discard(terminals)
        if not _interrupts:
            raise KeyboardInterrupt
        with suppress(KeyboardInterrupt):
            _interrupts[-1]()

    with _handled(_interrupt, signal.SIGTERM), _handled(hang_up, signal.SIGHUP):
        yield


@contextmanager
def hangup_spares_children() -> Iterator[None]:
    """Start processes within that outlive a closed terminal; a SIGHUP meanwhile comes at the end.

    The kernel sends it to the whole process group, and a JVM or a Ray head that dies of it would
    leave nothing to take the last snapshot with. Children inherit an ignored signal; one that is
    blocked as well waits.
    """
    if current_thread() is not main_thread():
        yield
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, former)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


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


def _discard(terminals: Iterable[int]) -> None:
    """Point the descriptors of terminals that are gone to /dev/null: writing to them fails."""
    for number in terminals:
        if not os.isatty(number):
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_RDWR), number)


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
