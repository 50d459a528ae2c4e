"""A stand-in for CuPy on a machine without a GPU: its arrays are NumPy's, its GPU the emulator.

It has what `cupy_kernels.cupy_device` and the GPU scripts use, and refuses what CuPy 14 refuses:
arrays of structs, scalars that are not NumPy's, a grid below 1, more dynamic shared memory than was
asked for.
"""

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from cupy_kernels import sources
from cupy_kernels.emulator import Emulator
from cupy_kernels.kernel_spec import Role
from cupy_kernels.registry import KERNELS


class FakeArray(np.ndarray[Any, Any]):
    """NumPy memory that says of itself what CuPy's arrays say."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)

    def set(self, source: Any) -> None:
        """CuPy's way to copy from the host: one shape, one dtype, contiguous."""
        assert type(source) is np.ndarray
        assert (source.shape, source.dtype) == (self.shape, self.dtype)
        assert source.flags.c_contiguous
        assert self.flags.c_contiguous
        self[...] = source

    def get(self, *, out: Any) -> Any:
        """CuPy's way to copy to the host, into memory that is there."""
        assert type(out) is np.ndarray
        assert (out.shape, out.dtype) == (self.shape, self.dtype)
        assert out.flags.c_contiguous
        out[...] = self
        return out


class FakeKernel:
    """A compiled kernel; a call runs its source in the emulator."""

    def __init__(self, source: str, name: str, calls: list[Any]) -> None:
        self.max_dynamic_shared_size_bytes = 48 * 1024
        self._source, self._name, self._calls = source, name, calls

    def __call__(
        self, grid: Any, block: Any, arguments: tuple[Any, ...], *, shared_mem: int = 0
    ) -> None:
        row = KERNELS[self._name]
        assert min(grid) >= 1
        assert shared_mem <= self.max_dynamic_shared_size_bytes
        values = []
        for parameter, value in zip(row.parameters, arguments, strict=True):
            scalar = parameter.role is Role.SCALAR
            null = not scalar and isinstance(value, np.uint64) and value == 0
            assert null or isinstance(value, np.generic if scalar else FakeArray), parameter
            values.append(None if null else value)
        self._calls.append((self._name, grid, block, arguments, shared_mem))
        Emulator(source=self._source).run(row, grid, block, shared_mem, values)


def fake_cupy() -> Any:
    """A module to stand in `sys.modules["cupy"]`; `modules`, `calls` and `pinned_bytes` note
    what was done."""
    cupy: Any = ModuleType("cupy")
    cupy.modules, cupy.calls, cupy.ndarray, cupy.pinned_bytes = [], [], FakeArray, []

    class RawModule:
        def __init__(self, *, code: str, options: tuple[str, ...]) -> None:
            cupy.modules.append((code, options))
            self._code = code

        def get_function(self, name: str) -> FakeKernel:
            assert name in sources.kernel_names(self._code)
            return FakeKernel(self._code, name, cupy.calls)

    def asarray(array: Any) -> Any:
        if array.dtype.names:
            raise ValueError(f"Unsupported dtype {array.dtype}")
        return np.array(array).view(FakeArray)

    def pinned(size: int) -> bytearray:
        cupy.pinned_bytes.append(size)
        return bytearray(size)

    cupy.RawModule, cupy.asarray, cupy.asnumpy = RawModule, asarray, np.array
    cupy.empty = lambda shape, dtype=float: np.empty(shape, dtype).view(FakeArray)
    stream = SimpleNamespace(synchronize=lambda: None)
    cupy.cuda = SimpleNamespace(
        runtime=SimpleNamespace(getDeviceCount=lambda: 1),
        Device=lambda: SimpleNamespace(id=0),
        get_current_stream=lambda: stream,
        alloc_pinned_memory=pinned,
    )
    return cupy
