"""Backends: the device of an array, which selects the implementation of an operation.

A NumPy array is on the host, where NumPy code computes. A CuPy array is on its GPU, and an
`Emulated` one in the emulator; there the CUDA kernels compute. `backend_of` is the only function of
this project that inspects an array for this. A backend allocates arrays, and copies arrays to
itself and back to the host. An operation selects one of its two implementations, so that callers do
not depend on the device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupy_kernels import cupy_device
from cupy_kernels.types import AnyArray

P = ParamSpec("P")
R = TypeVar("R")


class Backend(Protocol):
    """A kind of memory and the code that computes on it.

    Backends are equal if a kernel may use arrays of both.
    """

    def __hash__(self) -> int: ...

    @property
    def runs_kernels(self) -> bool:
        """True if the CUDA kernels compute here, rather than NumPy."""

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> AnyArray:
        """A new C-contiguous array with undefined contents."""

    def load(self, source: NDArray[Any], out: AnyArray) -> None:
        """Fill `out`, which is on this backend, from a host array of its shape."""

    def as_host(self, array: AnyArray) -> NDArray[Any]:
        """The array's values in NumPy; a copy, unless it is on the host."""

    def store(self, source: AnyArray, out: NDArray[Any]) -> None:
        """Fill the host array `out` from an array of its shape on this backend."""

    def staging(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """A new zeroed host array, in memory that is fastest to copy to and from this backend."""


@dataclass(frozen=True)
class CpuBackend:
    """NumPy's memory."""

    runs_kernels = False

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> AnyArray:
        return np.empty(shape, dtype)

    def load(self, source: NDArray[Any], out: AnyArray) -> None:
        out[...] = source

    def as_host(self, array: AnyArray) -> NDArray[Any]:
        return array

    def store(self, source: AnyArray, out: NDArray[Any]) -> None:
        out[...] = source

    def staging(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        return np.zeros(shape, dtype)


@dataclass(frozen=True)
class GpuBackend:
    """CuPy's current device."""

    runs_kernels = True

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> AnyArray:
        array: AnyArray = _cupy().empty(shape, dtype)
        return array

    def load(self, source: NDArray[Any], out: AnyArray) -> None:
        target: Any = out
        target.set(np.ascontiguousarray(source, out.dtype))

    def as_host(self, array: AnyArray) -> NDArray[Any]:
        """Waits for the current stream, as every read does."""
        values: NDArray[Any] = _cupy().asnumpy(array)
        return values

    def store(self, source: AnyArray, out: NDArray[Any]) -> None:
        """Waits as well; copies directly into `out` if no cast is needed."""
        if source.dtype == out.dtype and out.flags.c_contiguous:
            array: Any = source
            array.get(out=out)
        else:
            out[...] = self.as_host(source)

    def staging(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        return cupy_device.allocate_pinned(shape, dtype)


@dataclass(frozen=True)
class EmulatorBackend:
    """The arrays of one emulator; `engine` runs their kernels."""

    engine: Any
    runs_kernels = True

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> AnyArray:
        from cupy_kernels.emulator import array  # only tests and developers need it

        return array.empty(shape, dtype, self.engine)

    def load(self, source: NDArray[Any], out: AnyArray) -> None:
        out[...] = source

    def as_host(self, array: AnyArray) -> NDArray[Any]:
        return np.array(array, subok=False)

    def store(self, source: AnyArray, out: NDArray[Any]) -> None:
        out[...] = self.as_host(source)

    def staging(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        return np.zeros(shape, dtype)


HOST = CpuBackend()
GPU = GpuBackend()


def backend_of(array: Any) -> Backend:
    """The backend of an array; numbers are on the host."""
    if type(array) is np.ndarray:
        return HOST
    if (engine := getattr(array, "engine", None)) is not None:
        return EmulatorBackend(engine)
    cupy = cupy_device.gpu()
    return GPU if cupy is not None and isinstance(array, cupy.ndarray) else HOST


@dataclass(frozen=True)
class HostOperation(Generic[P, R]):
    """The implementation of an operation on the host; `with_kernels` adds the other one."""

    cpu: Callable[P, R]

    def with_kernels(self, gpu: Callable[P, R]) -> Callable[P, R]:
        """The function to call: it computes on the backend of its first argument.

        That is an array, or a sequence of arrays of one backend, and is passed by position. Both
        implementations have the name, the parameters and the result that the CPU's has.
        """
        cpu = self.cpu

        @wraps(cpu)
        def compute(*args: P.args, **kwargs: P.kwargs) -> R:
            first = args[0]
            if type(first) is np.ndarray:  # most calls, so without the calls below
                return cpu(*args, **kwargs)
            array = first[0] if isinstance(first, tuple | list) else first
            body = gpu if backend_of(array).runs_kernels else cpu
            return body(*args, **kwargs)

        return compute


def empty(shape: tuple[int, ...], dtype: DTypeLike, like: AnyArray) -> AnyArray:
    """A new array on the backend of `like`, with undefined contents."""
    return backend_of(like).empty(shape, dtype)


def zeros(shape: tuple[int, ...], dtype: DTypeLike, like: AnyArray) -> AnyArray:
    """A new array on the backend of `like`, filled with zeros."""
    array = empty(shape, dtype, like)
    array.fill(0)
    return array


def copy_to(array: AnyArray, to: Backend) -> AnyArray:
    """A C-contiguous copy of an array of any backend, on the backend `to`."""
    out = to.empty(array.shape, array.dtype)
    copy(array, out)
    return out


def copy(source: AnyArray, out: AnyArray) -> None:
    """Fill `out` with `source`, of the same shape, each on any backend, cast as NumPy assigns.

    A copy within a GPU is queued on the current stream. A copy from the host has read `source` when
    this returns, and needs a contiguous `out`. A copy to the host waits for the work queued before.
    """
    origin, target = backend_of(source), backend_of(out)
    if origin == target:
        out[...] = source
    elif target == HOST:
        origin.store(source, out)
    else:
        target.load(origin.as_host(source), out)


def as_host(array: AnyArray) -> NDArray[Any]:
    """An array's values in NumPy: the array itself if it is on the host, else a copy."""
    return backend_of(array).as_host(array)


def _cupy() -> Any:
    cupy = cupy_device.gpu()
    assert cupy is not None, "asked for a GPU's array where there is none"
    return cupy
