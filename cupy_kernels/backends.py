"""Where an array lives, and so which body of an operation runs on it.

A NumPy array lives on the host, where the CPU twin computes. A CuPy array lives on its GPU, and an
`Emulated` one in the emulator; there the CUDA kernels compute. `place_of` asks the array, and
nothing else in this project does. A place allocates, and moves arrays to itself and back to the
host; `pick` chooses between an operation's two bodies, so that whoever calls it need not know.
"""

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupy_kernels import device
from cupy_kernels.types import AnyArray

Body = TypeVar("Body")


class Backend(Protocol):
    """Memory and what computes on it. Places are equal where their arrays may meet in a kernel."""

    def __hash__(self) -> int: ...

    @property
    def runs_kernels(self) -> bool:
        """Whether the CUDA kernels compute here, and not NumPy."""

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> AnyArray:
        """A new C-contiguous array with undefined contents."""

    def load(self, source: NDArray[Any], out: AnyArray) -> None:
        """Fill `out`, which lives here, from a host's array of its shape."""

    def as_host(self, array: AnyArray) -> NDArray[Any]:
        """The array's values in NumPy; a copy, unless it lives on the host."""

    def store(self, source: AnyArray, out: NDArray[Any]) -> None:
        """Fill the host's `out`, of its shape, from an array that lives here."""

    def staging(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """A new zeroed array on the host, of the memory that is quickest to copy to and from."""


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
        """Waits as well; straight into `out` where no cast is needed."""
        if source.dtype == out.dtype and out.flags.c_contiguous:
            held: Any = source
            held.get(out=out)
        else:
            out[...] = self.as_host(source)

    def staging(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        return device.pinned(shape, dtype)


@dataclass(frozen=True)
class EmulatorBackend:
    """The emulator's arrays, by the engine that runs their kernels."""

    engine: Any
    runs_kernels = True

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> AnyArray:
        from cupy_kernels.emulator import array  # which only tests and developers have a use for

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
    """Where an array lives; numbers live on the host."""
    if type(array) is np.ndarray:
        return HOST
    if (engine := getattr(array, "engine", None)) is not None:
        return EmulatorBackend(engine)
    cupy = device.gpu()
    return GPU if cupy is not None and isinstance(array, cupy.ndarray) else HOST


def pick(array: Any, host: Body, kernels: Body) -> Body:
    """The one of an operation's two bodies that computes where `array` lives."""
    return kernels if backend_of(array).runs_kernels else host


def empty(shape: tuple[int, ...], dtype: DTypeLike, like: AnyArray) -> AnyArray:
    """A new array where `like` lives, with undefined contents."""
    return backend_of(like).empty(shape, dtype)


def zeros(shape: tuple[int, ...], dtype: DTypeLike, like: AnyArray) -> AnyArray:
    """A new array where `like` lives, filled with zeros."""
    array = empty(shape, dtype, like)
    array.fill(0)
    return array


def copied(array: AnyArray, to: Backend) -> AnyArray:
    """A copy of an array of any place, C-contiguous, in the place `to`."""
    found = to.empty(array.shape, array.dtype)
    copy(array, found)
    return found


def copy(source: AnyArray, out: AnyArray) -> None:
    """Fill `out` with `source`, of one shape; each of any place, cast as NumPy assigns.

    A copy within a GPU is queued on the current stream; one from the host has left `source` when
    this returns (and wants a contiguous `out`), one to the host waits for what was queued before.
    """
    here, there = backend_of(source), backend_of(out)
    if here == there:
        out[...] = source
    elif there == HOST:
        here.store(source, out)
    else:
        there.load(here.as_host(source), out)


def as_host(array: AnyArray) -> NDArray[Any]:
    """An array's values in NumPy: itself if it lives on the host, else a copy."""
    return backend_of(array).as_host(array)


def _cupy() -> Any:
    cupy = device.gpu()
    assert cupy is not None, "asked for a GPU's array where there is none"
    return cupy
