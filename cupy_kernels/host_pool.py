"""Memory of the host for arrays of a network, given back as soon as nothing refers to it.

The kernel provides large new arrays page by page, and on small networks the page faults cost more
than a step's arithmetic. A pool keeps its memory, and reuses it within a step, too: a layer's
temporaries, and gradients that have been used, make room for those of the next layer.
"""

from bisect import bisect_left, insort
from collections import deque
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_SEGMENT = 64 * 2**20  # reserved at a time; only what is written to is resident
_ALIGN = 64


class HostPool:
    """Arrays in a few large segments, which live as long as the pool or any of its arrays.

    It serves one thread; its arrays may be dropped by any.
    """

    def __init__(self) -> None:
        self._segments: list[NDArray[np.uint8]] = []
        self._free: list[tuple[int, int]] = []  # (start, end), addresses, in order, never adjacent
        # Arrays may be dropped at any moment, even within `take`: noted here, merged there.
        self._returned: deque[tuple[int, int]] = deque()

    def take(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """A C-contiguous array with undefined contents, its own until the last view is dropped."""
        kind = np.dtype(dtype)
        size = max(1, -(-prod(shape) * kind.itemsize // _ALIGN)) * _ALIGN
        while self._returned:
            self._merge(*self._returned.popleft())
        start = self._cut(size)
        return np.asarray(_Lease(self, start, size, shape, kind))

    def _cut(self, size: int) -> int:
        """The lowest address with `size` free bytes, which are taken."""
        for number, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[number : number + 1] = [(start + size, end)] * (end - start > size)
                return start
        segment = np.empty(max(size, _SEGMENT) + _ALIGN, np.uint8)
        self._segments.append(segment)
        start = -(-segment.ctypes.data // _ALIGN) * _ALIGN
        insort(self._free, (start + size, start + max(size, _SEGMENT)))
        return start

    def _merge(self, start: int, end: int) -> None:
        at = bisect_left(self._free, (start, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at > 0 and self._free[at - 1][1] == start:
            start = self._free.pop(at - 1)[0]
            at -= 1
        self._free.insert(at, (start, end))


class _Lease:
    """The owner of an array's memory, which NumPy keeps as long as the array and its views."""

    def __init__(
        self, pool: HostPool, start: int, size: int, shape: tuple[int, ...], kind: np.dtype[Any]
    ) -> None:
        self.__array_interface__ = {
            "data": (start, False), "shape": shape, "typestr": kind.str, "version": 3,
        }  # fmt: skip
        self._pool, self._span = pool, (start, start + size)

    def __del__(self) -> None:
        self._pool._returned.append(self._span)
