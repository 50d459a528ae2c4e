"""Arrays for kernels in the emulator: they replace a GPU's arrays on a machine without one.

An `Emulated` array is NumPy memory that carries its engine, and passes it to its views, slices and
copies; so `launch` finds the engine from the arrays alone, as it finds a GPU. It is as strict as
device memory: kernels compute on it, NumPy does not, and its values are read through
`backends.as_host`. So code that works here does not secretly compute on the host on a GPU machine.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike

from cupy_kernels.emulator import Emulator

ALIGNMENT = 256  # of every allocation, as CUDA's

# The functions that are allowed: views, allocation and copies, without arithmetic on values.
_ALLOWED = frozenset({
    np.copyto, np.empty_like, np.expand_dims, np.may_share_memory, np.moveaxis, np.ndim,
    np.reshape, np.shape, np.shares_memory, np.size, np.squeeze, np.swapaxes, np.transpose,
    np.zeros_like,
})  # fmt: skip


class Emulated(np.ndarray[Any, Any]):
    """An array made by `empty`; `made` counts those that own memory."""

    engine: Emulator
    allocations: ClassVar[int] = 0

    def __array_finalize__(self, source: Any) -> None:
        if isinstance(source, Emulated):
            self.engine = source.engine
            Emulated.allocations += self.base is None

    def __array_ufunc__(self, ufunc: Any, method: str, *_: Any, **__: Any) -> Any:
        raise _access_error(f"np.{ufunc.__name__}" + ("" if method == "__call__" else f".{method}"))

    def __array_function__(
        self, func: Callable[..., Any], types: Any, args: Any, kwargs: Any
    ) -> Any:
        from_device = func is np.copyto and not isinstance(args[0], Emulated)
        if func not in _ALLOWED or from_device:
            raise _access_error(f"np.{func.__name__}")
        return super().__array_function__(func, types, args, kwargs)

    def __getitem__(self, key: Any) -> Any:
        """A view; it has no axes where NumPy would return a number."""
        view = super().__getitem__(key)
        if isinstance(view, np.ndarray):
            return view
        return super().__getitem__((*key, ...) if isinstance(key, tuple) else (key, ...))

    def __repr__(self) -> str:
        return f"Emulated(shape={self.shape}, dtype={self.dtype})"

    def _unreadable(self, *_: Any) -> Any:
        raise _access_error("a look at values")

    __bool__ = __complex__ = __float__ = __index__ = __int__ = __str__ = _unreadable
    item = tolist = _unreadable


def empty(shape: tuple[int, ...], dtype: DTypeLike, engine: Emulator) -> Emulated:
    """A C-contiguous array with undefined contents, for kernels that run in `engine`."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    array = memory[start : start + size].view(kind).reshape(shape).view(Emulated)
    array.engine = engine
    Emulated.allocations += 1
    return array


def _access_error(action: str) -> TypeError:
    return TypeError(f"{action}: expected kernels to use an Emulated array; as_host() reads it")
