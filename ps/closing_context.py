"""The base class of context managers with an `__exit__` that calls `close`."""

from abc import ABC, abstractmethod
from typing import Self


class ClosingContext(ABC):
    """A context manager that calls its own `close` on leaving, with or without an error."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
