"""A shard's weights as a line of immutable versions.

An apply writes the next version into a buffer that nobody reads, so a pull, a snapshot and the next
apply can all hold the current version without a copy and without ever seeing half an update. A
buffer is free again once nothing but this list refers to it; the reference count says so, because
every view and every frame in flight keeps its base array alive.
"""

import sys

import numpy as np
from numpy.typing import NDArray


def _count_of_the_unshared() -> int:
    """References to a buffer that only a list holds, seen from such a loop as `take` has.

    The list, the loop variable and getrefcount's own argument, unless an interpreter borrows some.
    """
    for buffer in [np.zeros(1, np.float32)]:
        return sys.getrefcount(buffer)
    raise AssertionError("the list is not empty")


_UNSHARED = _count_of_the_unshared()


class Buffers:
    """Recycled float32 arrays of one size: lent by being handed out, returned by being dropped."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._all: list[NDArray[np.float32]] = []

    def take(self) -> NDArray[np.float32]:
        """A buffer to which nobody else refers; its contents are whatever it held last."""
        for buffer in self._all:
            if sys.getrefcount(buffer) == _UNSHARED:
                return buffer
        fresh = np.zeros(self.size, np.float32)
        self._all.append(fresh)
        return fresh

    def __len__(self) -> int:
        return len(self._all)
