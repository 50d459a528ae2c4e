"""A server's loop in a thread of its own, so that the hosting process stays responsive.

The loop waits at its sockets, and at one more over which it is asked to end.
"""

import threading
from abc import ABC, abstractmethod
from typing import Self

import zmq

from ps.logs import Logger
from ps.transport.socket_options import drop_with
from shards.errors import DownpourError


class ServerThread(ABC):
    """A loop in a thread; use it as a context manager, or call `start` and `stop`.

    A failure inside the loop ends it and is raised again by `stop` and by `check`.
    """

    empty = False  # a shard overrides it: True while it has no weights to serve

    def __init__(self, name: str, context: "zmq.Context[zmq.Socket[bytes]]", log: Logger) -> None:
        """`context` belongs to this thread: `stop` closes it, or garbage collection does."""
        self._context = context
        self._logger = log
        self._wake_out = context.socket(zmq.PAIR)
        self._wake_in = context.socket(zmq.PAIR)
        self._wake_in.bind("inproc://wake")
        self._wake_out.connect("inproc://wake")
        drop_with(self, context, (self._wake_out, self._wake_in))
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def _loop(self) -> None:
        """Serve until `_wake_in` can be read."""

    @abstractmethod
    def _let_go(self) -> None:
        """Release everything but the sockets; the loop has ended."""

    def start(self) -> Self:
        """Start the loop in its thread."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the loop, give outgoing messages a second to leave, and free the port."""
        if self._thread.is_alive():
            self.end()
            self.wait()
        self._context.destroy(linger=1000)
        self._let_go()
        self.check()

    def end(self) -> None:
        """Ask the loop to end, without waiting for it."""
        self._wake_out.send(b"")

    def wait(self) -> None:
        """Wait until the loop has ended, on request or because it failed."""
        self._thread.join()

    def check(self) -> None:
        """Raise the exception that ended the loop, if there is one."""
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            self._logger.info("%s serves", self._thread.name)
            self._loop()
            self._logger.info("%s has ended", self._thread.name)
        except DownpourError as error:
            self._logger.info("%s has failed: %s", self._thread.name, error)
            self._failure = error
        except BaseException as error:
            self._logger.exception("%s has failed", self._thread.name)
            self._failure = error
