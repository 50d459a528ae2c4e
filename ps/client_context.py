"""The base class of a worker's client: a context manager that its own process alone uses."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from ps.process_owner import BoundToProcess, Opener
from shards.errors import BadInput


class ClientContext(BoundToProcess, ABC):
    """Leaves the job at the end of a block; after an error it drops the connections as a crash."""

    _is_a, _instead = "a client", "make a worker of ps.connect there"

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.opener = Opener()
        self._closed = False

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def abort(self) -> None: ...

    @property
    def closed(self) -> bool:
        """True if the connections are dropped."""
        return self._closed

    def check_process(self) -> None:
        """Raise BadInput in a fork of the process that opened the client."""
        try:
            self.opener.check(f"worker {self.worker}", "open another with job.worker(...)")
        except BadInput as error:
            error.worker = self.worker
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise self._misuse_error("it is closed")

    def _misuse_error(self, text: str) -> BadInput:
        error = BadInput(f"worker {self.worker}: {text}")
        error.worker = self.worker
        return error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()
