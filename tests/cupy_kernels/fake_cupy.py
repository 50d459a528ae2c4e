"""A stand-in for CuPy on a machine without a GPU: its arrays are NumPy's, its GPU the emulator.

It has what `cupy_kernels.device` and the GPU scripts use, and refuses what CuPy 14 refuses: arrays
of structs, scalars that are not NumPy's, a grid below 1, more dynamic shared memory than was asked
for.
"""

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from cupy_kernels import sources
from cupy_kernels.emulator import Emulator
from cupy_kernels.kernel import Role
from cupy_kernels.registry import KERNELS


class FakeArray(np.ndarray[Any, Any]):
    """NumPy memory that says of itself what CuPy's arrays say."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


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
    """A module to stand in `sys.modules["cupy"]`; `modules` and `calls` note what was done."""
    cupy: Any = ModuleType("cupy")
    cupy.modules, cupy.calls, cupy.ndarray = [], [], FakeArray

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

    cupy.RawModule, cupy.asarray, cupy.asnumpy = RawModule, asarray, np.array
    cupy.empty = lambda shape, dtype=float: np.empty(shape, dtype).view(FakeArray)
    stream = SimpleNamespace(synchronize=lambda: None)
    cupy.cuda = SimpleNamespace(
        runtime=SimpleNamespace(getDeviceCount=lambda: 1),
        Device=lambda: SimpleNamespace(id=0),
        get_current_stream=lambda: stream,
    )
    return cupy
