"""CuPy's streams, events, graphs and devices for `tests.support.fake_cupy`, as strict as CuPy.

Two devices. What is queued runs at once, so this says nothing about order (`fake_device.py` does);
it says whether CuPy is called as it wants to be: each array, stream and event on the device that is
current, copies of one shape and dtype, captures on a non-blocking stream and without a copy to or
from the host. A graph repeats the kernels and the moves that were captured, and nothing else.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.support.fake_cupy import FakeArray, FakeKernel, fake_cupy

DEVICES = 2


class State:
    """What is current, and the capture that runs."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Any] = {}
        self.capture: list[Callable[[], None]] | None = None
        self.log: list[str] = []

    def do(self, work: Callable[[], None]) -> None:
        """Run it, or put it into the graph."""
        if self.capture is not None:
            self.capture.append(work)
        else:
            work()


class OnDevice(FakeArray):
    """An array that knows its device. Moves into it are captured."""

    state: State
    device_id: int

    def __array_finalize__(self, source: Any) -> None:
        if isinstance(source, OnDevice):
            self.state, self.device_id = source.state, source.device_id

    @property
    def data(self) -> Any:
        return _Pointer(self)

    def set(self, source: Any, stream: Any = None) -> None:
        self.host_copy(stream)
        assert type(source) is np.ndarray
        assert (source.shape, source.dtype) == (self.shape, self.dtype)
        assert source.flags.c_contiguous
        assert self.flags.c_contiguous
        np.ndarray.__setitem__(self, ..., source)

    def get(
        self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True
    ) -> Any:
        self.host_copy(stream)
        assert type(out) is np.ndarray
        assert (out.shape, out.dtype) == (self.shape, self.dtype)
        assert out.flags.c_contiguous
        out[...] = self.view(np.ndarray)
        return out

    def host_copy(self, stream: Any) -> None:
        """A copy to or from the host on a stream of this array's device."""
        if self.state.capture is not None:
            raise RuntimeError("the current stream is capturing, so copies are disallowed")
        assert stream is None or stream.device_id == self.device_id

    def fill(self, value: Any) -> None:
        self[...] = value

    def __setitem__(self, key: Any, value: Any) -> None:
        assert isinstance(value, OnDevice | int | float), "CuPy converts nothing in silence"
        assert self.device_id == self.state.device
        into = self.view(np.ndarray)
        source = value.view(np.ndarray) if isinstance(value, OnDevice) else value
        self.state.do(lambda: into.__setitem__(key, source))


class _Pointer:
    """`ndarray.data`, CuPy's MemoryPointer."""

    def __init__(self, array: OnDevice) -> None:
        self.array, self.ptr = array, array.ctypes.data

    def copy_from_device_async(self, source: "_Pointer", size: int, stream: Any) -> None:
        assert stream.device_id == self.array.device_id == source.array.device_id
        into, out_of = (p.array.view(np.ndarray).reshape(-1).view(np.uint8) for p in (self, source))
        assert self.array.flags.c_contiguous
        assert source.array.flags.c_contiguous
        self.array.state.do(lambda: into[:size].__setitem__(..., out_of[:size]))


def fake_cuda() -> Any:
    """A module to stand in `sys.modules["cupy"]`; `state.log` notes captures and launches."""
    cupy, state = fake_cupy(), State()

    class Device:
        def __init__(self, index: int | None = None) -> None:
            self.id = state.device if index is None else index
            assert 0 <= self.id < DEVICES

        def __enter__(self) -> None:
            self._before, state.device = state.device, self.id

        def __exit__(self, *_: object) -> None:
            state.device = self._before

    class Stream:
        def __init__(self, *, non_blocking: bool = False) -> None:
            self.device_id, self.non_blocking = state.device, non_blocking

        def __enter__(self) -> None:
            assert self.device_id == state.device
            self._before = state.streams.get(state.device)
            state.streams[state.device] = self

        def __exit__(self, *_: object) -> None:
            state.streams[self.device_id] = self._before

        def synchronize(self) -> None:
            assert state.capture is None

        def wait_event(self, event: Any) -> None:
            assert event.recorded

        def begin_capture(self) -> None:
            assert self.non_blocking
            assert state.capture is None
            state.log.append("capture")
            state.capture = []

        def end_capture(self) -> Any:
            works, state.capture = state.capture, None
            assert works is not None
            return Graph(works, self.device_id)

    class Graph:
        def __init__(self, works: list[Callable[[], None]], device_id: int) -> None:
            self._works, self._device_id = works, device_id

        def launch(self) -> None:
            assert state.device == self._device_id
            state.log.append("launch")
            for work in self._works:
                work()

    class Event:
        def __init__(self, *, disable_timing: bool = False) -> None:
            self._device, self.recorded = state.device, False

        def record(self, stream: Any) -> None:
            assert self._device == stream.device_id == state.device
            self.recorded = True

        def synchronize(self) -> None:
            assert self.recorded
            assert state.capture is None

    def empty(shape: Any, dtype: Any = float) -> OnDevice:
        array: OnDevice = np.empty(shape, dtype).view(OnDevice)
        array.state, array.device_id = state, state.device
        return array

    def zeros(shape: Any, dtype: Any = float) -> OnDevice:
        array = empty(shape, dtype)
        array.fill(0)
        return array

    def asnumpy(array: OnDevice) -> Any:
        array.host_copy(None)
        return np.array(array, subok=False)

    @contextmanager
    def using_allocator(malloc: Any) -> Iterator[None]:
        assert malloc == "malloc"
        yield

    default = Stream()
    cupy.state, cupy.ndarray, cupy.empty, cupy.zeros = state, OnDevice, empty, zeros
    cupy.asnumpy = asnumpy
    cupy.cuda = SimpleNamespace(
        runtime=SimpleNamespace(getDeviceCount=lambda: DEVICES),
        Device=Device,
        Stream=Stream,
        Event=Event,
        MemoryPool=lambda: SimpleNamespace(malloc="malloc"),
        using_allocator=using_allocator,
        alloc_pinned_memory=bytearray,
        get_current_stream=lambda: state.streams.get(state.device) or default,
    )
    return cupy


def launches_are_captured(state: State, monkeypatch: Any) -> None:
    """Let kernels go where moves go, and only on their arrays' device."""
    run = FakeKernel.__call__

    def call(self: FakeKernel, grid: Any, block: Any, arguments: Any, **more: Any) -> None:
        for value in arguments:
            assert not isinstance(value, OnDevice) or value.device_id == state.device
        state.do(lambda: run(self, grid, block, arguments, **more))

    monkeypatch.setattr(FakeKernel, "__call__", call)
