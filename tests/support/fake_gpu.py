"""The fake device with arrays that the emulator computes on: whole networks run on it, late.

A kernel's launch is queued with the arrays that its row says it reads and writes, and so is a move
within the device, `out[...] = x`, `out.fill(x)` or `np.copyto`. While a step is captured, they are
recorded; a replay queues just them again, with the very arrays and numbers of then. So whatever a
captured step did on the host, or took from it, is missing or stale in a replay, as on a GPU.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from cupy_kernels.backends import EmulatorBackend
from cupy_kernels.emulator import Emulator
from cupy_kernels.emulator.array import Emulated, empty
from cupy_kernels.kernel_spec import Dim3, Kernel, Role
from cupy_kernels.types import AnyArray
from tests.support.fake_device import FakeDevice, Work


class Engine(Emulator):
    """Runs kernels when the device's queues come to them."""

    def __init__(self, device: "FakeGpu") -> None:
        super().__init__()
        self.device = device

    def run(
        self, kernel: Kernel, grid: Dim3, block: Dim3, shared_bytes: int, arguments: list[Any]
    ) -> None:
        """Queue a checked launch on the stream in use."""

        def run() -> None:
            Emulator.run(self, kernel, grid, block, shared_bytes, arguments)

        pairs = [
            (parameter.role, value)
            for parameter, value in zip(kernel.parameters, arguments, strict=True)
            if parameter.role is not Role.SCALAR and value is not None
        ]
        reads = [value for role, value in pairs if role is not Role.WRITTEN]
        writes = [value for role, value in pairs if role is not Role.READ]
        self.device.queue(Work(kernel.name, run, reads, writes))


class FakeGpu(FakeDevice):
    """A `FakeDevice` for networks. Its arrays' moves are queued once `queue_moves` was called."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(self)

    def __str__(self) -> str:
        return "fake:0"

    def allocate(self, shape: tuple[int, ...], dtype: DTypeLike) -> AnyArray:
        return empty(shape, dtype, self.engine)

    @property
    def queues(self) -> bool:
        """Whether a stream is in use, so that what happens now is to be queued."""
        return bool(self._current) and self._current[-1] is not None

    def wait_for_stream(self) -> None:
        """Run what is queued on the stream in use."""
        assert not self.captures_now, "a read in a capture"
        stream = self._current[-1]
        assert stream is not None
        self.join(self.mark(stream))


def queue_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let moves between a `FakeGpu`'s arrays be queued like its kernels, while a stream is used.

    A read of an array waits for its stream, as on a GPU.
    """
    real_function, real_read = Emulated.__array_function__, EmulatorBackend.as_host

    def setitem(self: Emulated, key: Any, value: Any) -> None:
        _move(self, key, value)

    def fill(self: Emulated, value: Any) -> None:
        _move(self, ..., value)

    def function(self: Emulated, func: Callable[..., Any], types: Any, args: Any, kw: Any) -> Any:
        if func is np.copyto and isinstance(args[0], Emulated) and not kw:
            return _move(args[0], ..., args[1])
        return real_function(self, func, types, args, kw)

    def as_host(self: EmulatorBackend, array: AnyArray) -> NDArray[Any]:
        device = getattr(self.engine, "device", None)
        if device is not None and device.queues:
            device.wait_for_stream()
        return real_read(self, array)

    monkeypatch.setattr(EmulatorBackend, "as_host", as_host)
    monkeypatch.setattr(Emulated, "__setitem__", setitem)
    monkeypatch.setattr(Emulated, "fill", fill, raising=False)
    monkeypatch.setattr(Emulated, "__array_function__", function)


def _move(array: Emulated, key: Any, value: Any) -> None:
    into = array[key].view(np.ndarray)
    within = isinstance(value, Emulated)
    source = value.view(np.ndarray) if within else value

    def run() -> None:
        into[...] = source

    device = getattr(array.engine, "device", None)
    if device is None or not device.queues:
        run()
        return
    assert within or np.ndim(value) == 0 or not device.captures_now, (
        "a copy from the host in a capture"
    )
    device.queue(Work("move", run, [value] if within else [], [array[key]]))
