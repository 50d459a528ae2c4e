"""Memory that one layer reuses in every step.

On the host, an array from `take` comes from a pool, and is its own for as long as anything refers
to it. Kernels' arrays have fixed places, as a captured step may not allocate at all: a workspace
returns the same memory for the same role each time, valid until the same role is taken again. Code
for both must follow the second rule.
"""

from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupy_kernels.backends import HOST, backend_of
from cupy_kernels.host_pool import HostPool
from cupy_kernels.types import AnyArray, Array


class Workspace:
    """Arrays by role; those of kernels grow to the largest size requested and never shrink.

    Arrays are on the backend of the array `like`; without it, on the host, from `pool`. A role that
    moves to another backend gets new memory there.
    """

    def __init__(self, pool: HostPool | None = None) -> None:
        self._pool = pool or HostPool()
        self._memory: dict[str, AnyArray] = {}

    def take(self, role: str, shape: tuple[int, ...], like: AnyArray | None = None) -> Array:
        """A C-contiguous float32 array of `shape` with undefined contents."""
        return self.take_as(role, shape, np.float32, like)

    def take_as(
        self, role: str, shape: tuple[int, ...], dtype: DTypeLike, like: AnyArray | None = None
    ) -> NDArray[Any]:
        """Like `take`, of any dtype; one role keeps one dtype."""
        if like is None or (backend := backend_of(like)) == HOST:
            return self._pool.take(shape, dtype)
        size = prod(shape)
        memory = self._memory.get(role)
        if memory is None or memory.size < size or backend_of(memory) != backend:
            memory = backend.empty((size,), dtype)
            self._memory[role] = memory
        assert memory.dtype == dtype, f"role {role} holds {memory.dtype}, asked for {dtype}"
        return memory[:size].reshape(shape)

    def zeros(self, role: str, shape: tuple[int, ...], like: AnyArray | None = None) -> Array:
        """Like `take`, filled with zeros."""
        array = self.take(role, shape, like)
        array.fill(0.0)
        return array
