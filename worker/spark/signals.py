"""Defers Ctrl-C to moments at which it is safe.

A KeyboardInterrupt may be raised between any two bytecodes: after records were collected and before
they are written, or inside a library that is starting a process, which then leaks. So while an
operation must not be interrupted the first Ctrl-C is only recorded. A second one interrupts it,
because a user that presses it twice is in a hurry. Code that ends processes is never interrupted,
as the processes would then keep running.

Only the main thread receives signals; in any other thread these functions change nothing. Where
Ctrl-C is ignored, as in the background of a shell, it stays ignored; a SIGTERM that counts as a
Ctrl-C still has its effect.
"""

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from threading import Event, Timer, current_thread, main_thread
from types import TracebackType

from shards.errors import DownpourError

_HURRY = 0.75
_STATUS = 130  # as after Ctrl-C


@contextmanager
def record_interrupt() -> Iterator[Event]:
    """An event that the first Ctrl-C sets, for the caller to poll; a second one interrupts."""
    pressed = Event()

    def press(*_: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    with _handle_interrupt(press):
        yield pressed


@contextmanager
def defer_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end of the context for a Ctrl-C within it."""
    with record_interrupt() as pressed:
        try:
            yield
        except DownpourError:
            # A terminal sends Ctrl-C to child processes, too, so their death is not an error.
            if pressed.is_set():
                raise KeyboardInterrupt from None
            raise
    if pressed.is_set():
        raise KeyboardInterrupt


@contextmanager
def sigterm_too(leave_s: float | None = None) -> Iterator[None]:
    """Treat SIGTERM, which stops services, and SIGHUP of a closed terminal as Ctrl-C.

    What sends SIGTERM kills what is still there after a while, so `leave_s` may set a deadline in
    seconds. When three quarters of it are over, a second Ctrl-C ends the waits for workers and
    snapshots. At the deadline this process exits, and with it what it has started.

    A closed terminal may send several SIGHUPs: only the first counts, and only if no Ctrl-C came
    before. From then on the output of this process to that terminal is discarded.
    """
    terminals = [number for number in range(3) if os.isatty(number)]

    def hang_up(*_: object) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        _discard(terminals)
        if not _interrupts:
            raise KeyboardInterrupt
        with suppress(KeyboardInterrupt):
            _interrupts[-1]()

    limits = (
        []
        if leave_s is None
        else [
            Timer(_HURRY * leave_s, os.kill, (os.getpid(), signal.SIGINT)),
            Timer(leave_s, os._exit, (_STATUS,)),
        ]
    )

    def terminate(*_: object) -> None:
        for limit in limits:
            if limit.ident is None:
                limit.daemon = True
                limit.start()
        _interrupt()

    with ExitStack() as stack:
        for limit in limits:
            stack.callback(limit.cancel)
        stack.enter_context(_handle_signal(terminate, signal.SIGTERM))
        stack.enter_context(_handle_signal(hang_up, signal.SIGHUP))
        yield


@contextmanager
def hangup_spares_children() -> Iterator[None]:
    """Let processes that are started within survive a closed terminal; a SIGHUP is delayed.

    The kernel sends SIGHUP to the whole process group. If the JVM or the Ray head died of it, no
    last snapshot could be taken. Children inherit that the signal is ignored; it is also blocked,
    so in this process it stays pending until the end of the context.
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


def end_at_hangup() -> None:
    """Let a SIGHUP end this process again, which has inherited from the JVM that it is blocked.

    That is how Spark's daemon ends its Python workers when the JVM has ended. A worker that trains
    would otherwise wait for shards that are gone, until its patience is over. A closed terminal
    does not reach these processes: the daemon has a process group of its own.
    """
    if current_thread() is main_thread():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


@contextmanager
def on_signal(number: signal.Signals, action: Callable[[], None]) -> Iterator[None]:
    """Call `action` at each signal of this number."""
    with _handle_signal(lambda *_: action(), number):
        yield


class SafeExitStack(ExitStack):
    """An exit stack that unwinds completely, and ignores Ctrl-C while it does."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        with _handle_interrupt(lambda *_: None):
            return super().__exit__(kind, error, trace)


def _discard(terminals: Iterable[int]) -> None:
    """Point the descriptors of closed terminals to /dev/null, because writing to them fails."""
    for number in terminals:
        if not os.isatty(number):
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_RDWR), number)


# The active interrupt handlers, innermost last.
_interrupts: list[Callable[..., None]] = []


def _interrupt(*_: object) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.raise_signal(signal.SIGINT)
    elif _interrupts:
        _interrupts[-1]()
    else:
        raise KeyboardInterrupt


@contextmanager
def _handle_interrupt(handler: Callable[..., None]) -> Iterator[None]:
    if current_thread() is not main_thread():
        yield
        return
    _interrupts.append(handler)
    try:
        with _handle_signal(handler, signal.SIGINT):
            yield
    finally:
        _interrupts.pop()


@contextmanager
def _handle_signal(handler: Callable[..., None], number: signal.Signals) -> Iterator[None]:
    ignored = signal.getsignal(number) in {signal.SIG_IGN, None}
    if ignored or current_thread() is not main_thread():
        yield
        return
    former = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, former)
