"""Memory that one layer uses again in every step.

Fresh megabyte arrays come from the kernel page by page, and the page faults cost a training step
more than its arithmetic on small networks. A workspace hands out the same memory for the same
role each time. The rule: what `take` returns is valid until the same role is taken again, so an
array that must outlive the step is copied by whoever keeps it.
"""

from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupy_kernels.types import Array


class Workspace:
    """Arrays by role; each grows to the largest size asked for and never shrinks."""

    def __init__(self) -> None:
        self._memory: dict[str, NDArray[Any]] = {}

    def take(self, role: str, shape: tuple[int, ...]) -> Array:
        """A C-contiguous float32 array of `shape` with undefined contents."""
        return self.take_as(role, shape, np.float32)

    def take_as(self, role: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Like `take`, of any dtype; one role keeps one dtype."""
        size = prod(shape)
        held = self._memory.get(role)
        if held is None or held.size < size:
            held = np.empty(size, dtype)
            self._memory[role] = held
        assert held.dtype == dtype, f"role {role} holds {held.dtype}, asked for {dtype}"
        return held[:size].reshape(shape)

    def zeros(self, role: str, shape: tuple[int, ...]) -> Array:
        """Like `take`, filled with zeros."""
        array = self.take(role, shape)
        array.fill(0.0)
        return array

    def padded(self, role: str, array: Array, pad: tuple[int, int], fill: float) -> Array:
        """(n, h, w, c) with `pad` rows and columns of `fill` on every side; itself without pad."""
        if pad == (0, 0):
            return array
        n, h, w, c = array.shape
        ph, pw = pad
        wide = self.take(role, (n, h + 2 * ph, w + 2 * pw, c))
        wide.fill(fill)
        wide[:, ph : ph + h, pw : pw + w] = array
        return wide
