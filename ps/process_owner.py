"""Resources that belong to the process that opened them: it alone uses them, and ends them.

A process that is forked off (`os.fork`, `multiprocessing` with the start method `fork`) begins with
copies of all objects of its parent, but with none of its threads, and its connections are its
parent's. If it leaves a block of its parent, or drops its last reference to an object, the copy
must not end what the parent still uses. So whatever ends shards, removes files or says farewell is
a callback of an `OwnerStack`, or asks its `Opener` first; and what a user calls asks its `Opener`,
because a copy would wait for ever for answers that reach the parent.
"""

import atexit
import os
from contextlib import ExitStack
from threading import RLock
from types import TracebackType
from typing import NoReturn

from shards.errors import BadInput


class Opener:
    """The process that has opened something."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_this_process(self) -> bool:
        return os.getpid() == self.pid

    def check(self, subject: str, remedy: str) -> None:
        """Raise BadInput in a forked process, with the remedy there."""
        if os.getpid() != self.pid:  # not through the property: a call more for each update
            raise BadInput(
                f"{subject} was opened in process {self.pid}, and this is its fork {os.getpid()}:"
                f" {remedy}"
            )


SECOND_THREAD = "it is in use by another thread; make one for each thread"


class OneUser:
    """A lock that refuses a thread while another one has it.

    Two threads that receive on the same connections would take each other's answers, and then wait
    for ever.
    """

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._lock = RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise BadInput(f"{self._subject}: {SECOND_THREAD}")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class OwnerStack(ExitStack):
    """An exit stack of the process that makes it: in a forked process leaving it does nothing.

    If it is still open when the interpreter exits, it is closed then, while threads still run.
    A generator that is suspended in such a block would be closed later, when a wait for a thread or
    a child may last for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._opener = Opener()
        atexit.register(self.close)

    @property
    def is_this_process(self) -> bool:
        """True in the process that made the stack."""
        return self._opener.is_this_process

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        if not self.is_this_process:
            return False
        atexit.unregister(self.close)
        return super().__exit__(kind, error, trace)


class BoundToProcess:
    """An object with connections of this process, which cannot be sent to another one.

    A subclass says what it is, and what to do in the other process.
    """

    _is_a = "a job"
    _instead = "call ps.connect there"

    def __reduce__(self) -> NoReturn:
        """Raise BadInput: `pickle`, `copy`, multiprocessing, joblib, Ray and Spark come here."""
        raise BadInput(
            f"{self._is_a} cannot be sent to another process: send job.address and job.token, and"
            f" {self._instead}"
        )
