"""Buffers for a shard's weights, which are a sequence of immutable versions.

An apply writes the next version into a buffer that nobody reads. So a pull, a snapshot and the next
apply can all hold the current version without a copy and without ever seeing half an update. A
buffer is free again once only its list refers to it. The reference count shows this, because every
view and every frame in flight keeps its base array alive.
"""

import mmap
import sys
from collections.abc import Callable
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.backends import HOST, Backend

Allocator = Callable[[int], NDArray[np.float32]]
"""Makes a zeroed float32 array of the given size, in the memory that its owner chooses."""


def heap_allocator(size: int) -> NDArray[np.float32]:
    """Allocate zeroed float32 on the host's heap."""
    return np.zeros(size, np.float32)


def allocator(backend: Backend) -> Allocator:
    """The allocator of a backend: the host's heap, or a device's memory."""

    def allocate_zeroed(size: int) -> NDArray[np.float32]:
        array = backend.empty((size,), np.float32)
        array.fill(0)
        return array

    return heap_allocator if backend == HOST else allocate_zeroed


def staging(backend: Backend) -> Allocator:
    """An allocator of host arrays that are fast to fill from a backend's memory."""
    return lambda size: backend.staging((size,), np.float32)


def reserve(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """A zeroed array in memory that is reserved, not taken: unwritten pages cost nothing.

    It may be larger than the machine's memory. Linux takes it in huge pages where it can: rows are
    read in no order, and each small page would miss the processor's table of pages.
    """
    size = max(prod(shape) * np.dtype(dtype).itemsize, 1)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    if size >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype, prod(shape)).reshape(shape)


def _count_of_the_unshared() -> int:
    """The reference count of a buffer that only a list holds, measured in a loop as in `take`.

    It includes the list, the loop variable and getrefcount's own argument, but some interpreters
    borrow references. So it is measured instead of assumed.
    """
    for buffer in [np.zeros(1, np.float32)]:
        return sys.getrefcount(buffer)
    raise AssertionError("the list is not empty")


_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # Python 3.11 does not name it

_HUGE_PAGE = 2 << 20

_LATELY = 64  # calls of `take` between two checks for surplus buffers

UNSHARED = _count_of_the_unshared()
"""The reference count of an array in a list, in a loop over it, that nothing else refers to."""


def are_unshared(arrays: list[NDArray[np.float32]]) -> bool:
    """Return whether only this list refers to each of its arrays."""
    for array in arrays:  # noqa: SIM110  # a generator would hold one more reference
        if sys.getrefcount(array) != UNSHARED:
            return False
    return True


class Buffers:
    """A pool of float32 arrays of one size; a user returns an array by dropping its references.

    The pool keeps one array more than were recently in use at the same time.
    """

    def __init__(self, size: int, allocate: Allocator = heap_allocator) -> None:
        self.size = size
        self._allocate = allocate
        self._all: list[NDArray[np.float32]] = []
        self._takes = 0
        self._idle: int | None = None  # the fewest unused at any recent `take`

    def take(self) -> NDArray[np.float32]:
        """A buffer that nothing else refers to, with arbitrary contents."""
        free = []
        # The loop variable is a reference, as it was when `UNSHARED` was measured.
        for buffer in self._all:
            if sys.getrefcount(buffer) == UNSHARED:
                free.append(buffer)  # noqa: PERF401  # a comprehension is a call
        if not free:
            free.append(self._allocate(self.size))
            self._all.append(free[0])
        idle = len(free) - 1
        if self._idle is None or idle < self._idle:
            self._idle = idle
        self._takes += 1
        if self._takes % _LATELY == 0:
            self._shrink(free[1:][: max(0, self._idle - 1)])
        return free[0]

    def _shrink(self, surplus: list[NDArray[np.float32]]) -> None:
        """Drop the buffers that stayed unused in the last `_LATELY` calls of `take`, except one."""
        # By identity, because `in` would compare the elements of arrays.
        dropped = [id(buffer) for buffer in surplus]
        self._all = [buffer for buffer in self._all if id(buffer) not in dropped]
        self._idle = None

    def __len__(self) -> int:
        return len(self._all)
