"""Memory that one layer uses again in every step.

Fresh megabyte arrays come from the kernel page by page, and the page faults cost a training step
more than its arithmetic on small networks; a captured step may not allocate at all. A workspace
hands out the same memory for the same role each time. The rule: what `take` returns is valid until
the same role is taken again, so an array that must outlive the step is copied by whoever keeps it.
"""

from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupy_kernels.backends import HOST, backend_of
from cupy_kernels.types import AnyArray, Array


class Workspace:
    """Arrays by role; each grows to the largest size asked for and never shrinks.

    It lives where its latest arrays do: `like` is any array of that place, and without it the host
    is meant. A role that moves to another place starts anew there.
    """

    def __init__(self) -> None:
        self._memory: dict[str, AnyArray] = {}

    def take(self, role: str, shape: tuple[int, ...], like: AnyArray | None = None) -> Array:
        """A C-contiguous float32 array of `shape` with undefined contents."""
        return self.take_as(role, shape, np.float32, like)

    def take_as(
        self, role: str, shape: tuple[int, ...], dtype: DTypeLike, like: AnyArray | None = None
    ) -> NDArray[Any]:
        """Like `take`, of any dtype; one role keeps one dtype."""
        size = prod(shape)
        place = HOST if like is None else backend_of(like)
        held = self._memory.get(role)
        if held is None or held.size < size or backend_of(held) != place:
            held = place.empty((size,), dtype)
            self._memory[role] = held
        assert held.dtype == dtype, f"role {role} holds {held.dtype}, asked for {dtype}"
        return held[:size].reshape(shape)

    def zeros(self, role: str, shape: tuple[int, ...], like: AnyArray | None = None) -> Array:
        """Like `take`, filled with zeros."""
        array = self.take(role, shape, like)
        array.fill(0.0)
        return array
