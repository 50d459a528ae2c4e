"""A call in another thread, which does not keep the process when it ends."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


def begin(action: Callable[[], Result], name: str) -> "Future[Result]":
    """Start `action` in a thread of this name; the future has its result or its error."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(action())
        except BaseException as error:  # noqa: BLE001  # raised in the thread that waits
            done.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return done
