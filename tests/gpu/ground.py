"""Where races are run: a GPU with CuPy and PyTorch on one stream, or the emulator, for a dry run.

A dry run takes every contender of ours once, at sizes of a few hundred, on the CPU: it proves that
the races are put together right, and measures nothing.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupy_kernels import backends, cupy_device
from cupy_kernels.kernel_spec import Kernel, Role
from cupy_kernels.launch import launch
from cupy_kernels.registry import KERNELS

_FLUSH_BYTES = 256 << 20

Run = Callable[[], object]


class Ground:
    """Arrays, launches and clocks. Sizes pass through `size`, which a dry run shrinks."""

    dry = True
    torch: ModuleType | None = None

    def __init__(self, place: backends.Backend) -> None:
        self.place = place
        self.dice = np.random.default_rng(20)

    def size(self, full: int, dry: int) -> int:
        return dry if self.dry else full

    def normal(self, *shape: int) -> Any:
        """Fresh normal floats on the device."""
        return self.put(self.dice.standard_normal(shape, np.float32))

    def put(self, array: NDArray[Any]) -> Any:
        return backends.copy_to(np.ascontiguousarray(array), self.place)

    def struct(self, dtype: np.dtype[Any], **fields: float) -> Any:
        """One of a kernel's structs, as bytes on the device."""
        value = np.zeros(1, dtype)
        for name, number in fields.items():
            value[name] = number
        return self.put(value.view(np.uint8))

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> Any:
        return self.place.empty(shape, dtype)

    def kernel(self, name: str, **given: Any) -> Run:
        """A launch of a registered kernel; arrays that are not given get memory of their own."""
        row = KERNELS[name]
        arguments = {**self._outputs(row, given), **given}
        ordered = {p.name: arguments[p.name] for p in row.parameters}
        return lambda: launch(row, **ordered)

    def _outputs(self, row: Kernel, given: dict[str, Any]) -> dict[str, Any]:
        sizes = {
            p.name: given[p.name]
            for p in row.parameters
            if p.role is Role.SCALAR and p.dtype.kind in "iu"
        }
        return {
            p.name: self.empty((p.elements(sizes),), p.dtype)
            for p in row.arrays
            if p.name not in given
        }

    def stream(self) -> AbstractContextManager[Any]:
        """Everything inside is queued on one stream, PyTorch's work too."""
        return nullcontext()

    def captured(self, run: Run) -> Run:
        """The same work as a graph, replayed."""
        run()
        return run


class GpuGround(Ground):
    """The current CUDA device. PyTorch is raced against where it is installed and sees the GPU."""

    dry = False

    def __init__(self) -> None:
        super().__init__(backends.GPU)
        found = cupy_device.gpu()
        assert found is not None, "a GPU's ground needs a GPU"
        self.cupy: Any = found
        self.main = self.cupy.cuda.Stream(non_blocking=True)
        self._flush = self.cupy.empty(_FLUSH_BYTES, self.cupy.uint8)
        try:
            import torch
        except ImportError:
            return
        if torch.cuda.is_available():
            self.torch = torch

    def stream(self) -> AbstractContextManager[Any]:
        if self.torch is None:
            return self.main  # type: ignore[no-any-return]
        return _Both(self.main, self.torch.cuda.stream(self._torch_stream()))

    def _torch_stream(self) -> Any:
        assert self.torch is not None
        return self.torch.cuda.ExternalStream(self.main.ptr)

    def captured(self, run: Run) -> Run:
        run()  # what allocates does it now
        self.main.synchronize()
        self.main.begin_capture()
        try:
            run()
        finally:
            graph = self.main.end_capture()
        return lambda: graph.launch(self.main)

    def captured_by_torch(self, run: Run) -> Run:
        """The same, with PyTorch's allocator told of it."""
        torch: Any = self.torch
        run()
        self.main.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._torch_stream()):
            run()
        return graph.replay  # type: ignore[no-any-return]

    def settle(self) -> None:
        """Wait for everything that was queued on any stream while contenders were made."""
        self.cupy.cuda.runtime.deviceSynchronize()

    def flush(self) -> None:
        """Write more than the L2 cache holds, so that nothing is found in it."""
        self._flush.fill(1)

    def seconds(self, run: Run) -> float:
        """How long the device took for it, by events around it."""
        before, after = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        before.record(self.main)
        run()
        after.record(self.main)
        after.synchronize()
        return float(self.cupy.cuda.get_elapsed_time(before, after)) / 1e3

    def tensor(self, array: Any) -> Any:
        """PyTorch's view of an array's memory."""
        assert self.torch is not None
        return self.torch.from_dlpack(array)

    def facts(self) -> dict[str, str]:
        """Device and versions, which no figure is quoted without."""
        runtime = self.cupy.cuda.runtime
        properties = runtime.getDeviceProperties(self.cupy.cuda.Device().id)
        facts = {
            "device": properties["name"].decode(),
            "compute": f"{properties['major']}.{properties['minor']}",
            "driver": str(runtime.driverGetVersion()),
            "runtime": str(runtime.runtimeGetVersion()),
            "cupy": self.cupy.__version__,
        }
        if self.torch is not None:
            facts["torch"] = self.torch.__version__
        return facts


class _Both:
    """Two contexts as one."""

    def __init__(self, first: Any, second: Any) -> None:
        self._parts = (first, second)

    def __enter__(self) -> None:
        for part in self._parts:
            part.__enter__()

    def __exit__(self, *error: object) -> None:
        for part in reversed(self._parts):
            part.__exit__(*error)
