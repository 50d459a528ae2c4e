"""A shard's weights as a line of immutable versions.

An apply writes the next version into a buffer that nobody reads, so a pull, a snapshot and the next
apply can all hold the current version without a copy and without ever seeing half an update. A
buffer is free again once nothing but this list refers to it; the reference count says so, because
every view and every frame in flight keeps its base array alive.
"""

import sys
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.backends import HOST, Backend

Allocator = Callable[[int], NDArray[np.float32]]
"""A new zeroed array of so many float32, in whatever memory its owner wants it."""


def heap_allocator(size: int) -> NDArray[np.float32]:
    """The ordinary allocator."""
    return np.zeros(size, np.float32)


def allocator(place: Backend) -> Allocator:
    """The one of a place: the host's heap, or a device's memory."""

    def zeroed(size: int) -> NDArray[np.float32]:
        array = place.empty((size,), np.float32)
        array.fill(0)
        return array

    return heap_allocator if place == HOST else zeroed


def staging(place: Backend) -> Allocator:
    """Arrays on the host that are quick to fill from a place's."""
    return lambda size: place.staging((size,), np.float32)


def _count_of_the_unshared() -> int:
    """References to a buffer that only a list holds, seen from such a loop as `take` has.

    The list, the loop variable and getrefcount's own argument, unless an interpreter borrows some.
    """
    for buffer in [np.zeros(1, np.float32)]:
        return sys.getrefcount(buffer)
    raise AssertionError("the list is not empty")


_LATELY = 64  # takings

_UNSHARED = _count_of_the_unshared()


def unshared(arrays: list[NDArray[np.float32]]) -> bool:
    """Whether nothing but this list refers to any of its arrays."""
    for array in arrays:  # noqa: SIM110  # a generator would hold one more reference
        if sys.getrefcount(array) != _UNSHARED:
            return False
    return True


class Buffers:
    """Recycled float32 arrays of one size: lent by being handed out, returned by being dropped.

    As many are kept as were lent at once of late, and one more.
    """

    def __init__(self, size: int, allocate: Allocator = heap_allocator) -> None:
        self.size = size
        self._allocate = allocate
        self._all: list[NDArray[np.float32]] = []
        self._taken = 0
        self._idle: int | None = None  # the fewest that lay unused at a taking, of late

    def take(self) -> NDArray[np.float32]:
        """A buffer to which nobody else refers; its contents are whatever it held last."""
        free = [buffer for buffer in self._all if sys.getrefcount(buffer) == _UNSHARED]
        if not free:
            free.append(self._allocate(self.size))
            self._all.append(free[0])
        self._shrink(free)
        return free[0]

    def _shrink(self, free: list[NDArray[np.float32]]) -> None:
        """Let go of those that nobody has wanted in the last takings, but one."""
        idle = len(free) - 1
        self._idle = idle if self._idle is None else min(self._idle, idle)
        self._taken += 1
        if self._taken % _LATELY == 0:
            surplus = [id(buffer) for buffer in free[1:][: max(0, self._idle - 1)]]
            self._all = [buffer for buffer in self._all if id(buffer) not in surplus]
            self._idle = None

    def __len__(self) -> int:
        return len(self._all)
