"""A worker's interface to a GPU: memory on both sides of the bus, streams, events, captured work.

`Device` is the minimum that the pipeline (worker/training/device_pipeline.py) needs, so that the
pipeline's rules can be tested without a GPU. `Gpu` implements it with CuPy, and is the only place
of this package that calls CuPy. Nothing here waits unless its docstring says so: copies and kernels
are queued on streams, and an array on either side must not be used until an event shows that they
are done with it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

from numpy.typing import DTypeLike, NDArray

from cupy_kernels import cupy_device
from cupy_kernels.types import AnyArray
from shards.errors import BadInput

Stream = Any
"""A queue of copies and kernels, which run in order."""

Mark = Any
"""A point in a stream that other streams, and the host, can wait for."""


class CannotCapture(RuntimeError):
    """The work to be captured did something that no graph can repeat; the message says what."""


class Device(Protocol):
    """One accelerator. All calls but `use` are made within `use`."""

    def use(self, stream: Stream | None = None) -> AbstractContextManager[None]:
        """Allocate arrays on this device, and queue kernels on `stream`, in this thread."""
        ...

    def stream(self) -> Stream: ...

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> AnyArray:
        """Device memory that is zero for all work queued after this call, on any stream."""
        ...

    def allocate_pinned(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Zeroed page-locked host memory, the only kind that is copied asynchronously."""
        ...

    def upload(self, source: NDArray[Any], target: AnyArray, stream: Stream) -> None:
        """Queue a copy of contiguous host memory, which must not change until that is done."""
        ...

    def copy(self, source: AnyArray, target: AnyArray, stream: Stream) -> None:
        """Queue a copy within the device."""
        ...

    def download(self, source: AnyArray, target: NDArray[Any], stream: Stream) -> None:
        """Queue a copy to host memory, which must live until that is done."""
        ...

    def mark(self, stream: Stream) -> Mark:
        """A mark behind all work that is queued on `stream` so far."""
        ...

    def wait(self, stream: Stream, mark: Mark) -> None:
        """Make all work that is queued on `stream` from now on wait for a mark."""
        ...

    def join(self, mark: Mark) -> None:
        """Wait, on the host, for a mark."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record what `work` queues on the stream in use; returns a function that queues it again.

        `work` is called once, and none of its kernels runs. The function keeps the memory that
        `work` allocates. Raises CannotCapture.
        """
        ...


class Gpu:
    """A CUDA device, given by its index among those that this process sees."""

    def __init__(self, index: int = 0) -> None:
        cupy = cupy_device.gpu()
        if cupy is None:
            raise BadInput(
                f"device gpu:{index}",
                expected="a GPU that answers, and CuPy (the extra `gpu`) installed",
                got="none",
            )
        count = gpu_count()
        if not 0 <= index < count:
            raise BadInput(f"device gpu:{index}", expected=f"a number below {count}, the GPUs here")
        self.index = index
        self._cupy: Any = cupy

    def __str__(self) -> str:
        return f"gpu:{self.index}"

    @contextmanager
    def use(self, stream: Stream | None = None) -> Iterator[None]:
        with self._cupy.cuda.Device(self.index):
            if stream is None:
                yield
            else:
                with stream:
                    yield

    def stream(self) -> Stream:
        # Only a stream that does not synchronise with the default stream can be captured.
        return self._cupy.cuda.Stream(non_blocking=True)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> AnyArray:
        array: AnyArray = self._cupy.zeros(shape, dtype)
        # CuPy zeroes on the stream in use, but another stream may be the first to use the array.
        self._cupy.cuda.get_current_stream().synchronize()
        return array

    def allocate_pinned(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        return cupy_device.allocate_pinned(shape, dtype)

    def upload(self, source: NDArray[Any], target: AnyArray, stream: Stream) -> None:
        assert source.flags.c_contiguous, "CuPy would copy a temporary, gone before it is read"
        target.set(source, stream=stream)  # type: ignore[attr-defined]

    def copy(self, source: AnyArray, target: AnyArray, stream: Stream) -> None:
        assert source.nbytes == target.nbytes
        into: Any = target.data
        into.copy_from_device_async(source.data, source.nbytes, stream)

    def download(self, source: AnyArray, target: NDArray[Any], stream: Stream) -> None:
        source.get(stream=stream, out=target, blocking=False)  # type: ignore[attr-defined]

    def mark(self, stream: Stream) -> Mark:
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def wait(self, stream: Stream, mark: Mark) -> None:
        stream.wait_event(mark)

    def join(self, mark: Mark) -> None:
        mark.synchronize()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        cuda = self._cupy.cuda
        stream, pool = cuda.get_current_stream(), cuda.MemoryPool()
        stream.begin_capture()
        try:
            # A graph writes to the same temporaries each time, so no other array may use them.
            with cuda.using_allocator(pool.malloc):
                work()
        except BaseException as error:
            with suppress(RuntimeError):  # The capture is invalid, but it must still be ended.
                stream.end_capture()
            if isinstance(error, RuntimeError):  # the base class of CuPy's errors
                raise CannotCapture(f"{type(error).__name__}: {error}") from None
            raise
        try:
            graph = stream.end_capture()
        except RuntimeError as error:
            raise CannotCapture(str(error)) from None
        return _Graph(graph, pool)


class _Graph:
    """An instantiated graph, and the memory that it uses."""

    def __init__(self, graph: Any, pool: Any) -> None:
        self._graph = graph
        self._pool = pool

    def __call__(self) -> None:
        self._graph.launch()


def gpu_count() -> int:
    """The number of GPUs that this process sees; 0 if none answers or CuPy is not installed."""
    cupy = cupy_device.gpu()
    return 0 if cupy is None else int(cupy.cuda.runtime.getDeviceCount())
