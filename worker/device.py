"""A GPU as a worker uses it: memory on both sides of the bus, streams, events, captured work.

`Device` is what the arena (worker/step_pipeline.py) asks of one, and no more, so that its rules can
be tested where there is no GPU; `Gpu` is CuPy's, and the one place of this package that calls it.
Nothing here waits unless it says so: copies and kernels are queued on streams, and an array of
either side must be left alone until an event says that they are through with it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

from numpy.typing import DTypeLike, NDArray

from cupy_kernels import device
from cupy_kernels.types import AnyArray
from shards.errors import BadInput

Stream = Any
"""A queue of copies and kernels; they run in its order."""

Mark = Any
"""A place in a stream's order that other streams, and the host, can wait for."""


class CannotCapture(RuntimeError):
    """What was to be captured did something that no graph can repeat; says what."""


class Device(Protocol):
    """One accelerator. All calls but `use` are made within `use`."""

    def use(self, stream: Stream | None = None) -> AbstractContextManager[None]:
        """Make it, and `stream`, where arrays are made and kernels queued, in this thread."""
        ...

    def stream(self) -> Stream: ...

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> AnyArray:
        """Memory of the device; zeroed for whatever is queued from now on."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Zeroed page-locked memory of the host, the only one that copies run beside."""
        ...

    def upload(self, source: NDArray[Any], target: AnyArray, stream: Stream) -> None:
        """Queue a copy of contiguous host memory; it must not change before that is done."""
        ...

    def copy(self, source: AnyArray, target: AnyArray, stream: Stream) -> None:
        """Queue a copy within the device."""
        ...

    def download(self, source: AnyArray, target: NDArray[Any], stream: Stream) -> None:
        """Queue a copy to host memory, which must live until that is done."""
        ...

    def mark(self, stream: Stream) -> Mark:
        """What is queued on `stream` so far."""
        ...

    def wait(self, stream: Stream, mark: Mark) -> None:
        """Let what is queued on `stream` from now on wait for a mark."""
        ...

    def join(self, mark: Mark) -> None:
        """Wait, on the host, for a mark."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """What `work` queues on the stream in use, to be queued again and again by one call.

        `work` is called once, and nothing of it runs. What comes back holds the memory that `work`
        allocated meanwhile. Raises CannotCapture.
        """
        ...


class Gpu:
    """A CUDA device, by its number among those that this process sees."""

    def __init__(self, index: int = 0) -> None:
        cupy = device.gpu()
        if cupy is None:
            raise BadInput(
                f"device gpu:{index}: expected a GPU that answers, and CuPy (the extra `gpu`)"
                " installed; got none"
            )
        count = gpu_count()
        if not 0 <= index < count:
            raise BadInput(f"device gpu:{index}: expected a number below {count}, the GPUs here")
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
        # One that the default stream does not wait for; only such a stream can be captured.
        return self._cupy.cuda.Stream(non_blocking=True)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> AnyArray:
        array: AnyArray = self._cupy.zeros(shape, dtype)
        # Zeroed on the stream in use; another stream may be the first to touch it.
        self._cupy.cuda.get_current_stream().synchronize()
        return array

    def pinned(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        return device.pinned(shape, dtype)

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
            # A graph writes to its temporaries' addresses each time: they must stay its own.
            with cuda.using_allocator(pool.malloc):
                work()
        except BaseException as error:
            with suppress(RuntimeError):  # The capture is invalid; the stream must leave it.
                stream.end_capture()
            if isinstance(error, RuntimeError):  # CuPy's errors are.
                raise CannotCapture(f"{type(error).__name__}: {error}") from None
            raise
        try:
            graph = stream.end_capture()
        except RuntimeError as error:
            raise CannotCapture(str(error)) from None
        return _Graph(graph, pool)


class _Graph:
    """An instantiated graph, and the memory that it works in."""

    def __init__(self, graph: Any, pool: Any) -> None:
        self._graph = graph
        self._pool = pool

    def __call__(self) -> None:
        self._graph.launch()


def gpu_count() -> int:
    """How many GPUs this process sees; 0 where none answers or CuPy is not installed."""
    cupy = device.gpu()
    return 0 if cupy is None else int(cupy.cuda.runtime.getDeviceCount())
