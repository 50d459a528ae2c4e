"""The only file that imports CuPy; it detects whether there is a working GPU.

`import cupy` succeeds without a driver and fails at the first device call, so only a device call
can detect a GPU. It is made once, at the first request; importing this package imports no CuPy.
"""

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupy_kernels import sources

FREE_SHARED_BYTES = 48 * 1024  # of dynamic shared memory, without asking


@cache
def gpu() -> ModuleType | None:
    """The `cupy` module if it is installed and its first device answers, else None."""
    try:
        cupy = import_module("cupy")
        usable = cupy.cuda.runtime.getDeviceCount() > 0
    except Exception:  # noqa: BLE001  CuPy raises its own runtime errors, an absent one ImportError
        return None
    return cupy if usable else None


def function(source: str, name: str, shared_bytes: int = 0) -> Any:
    """The compiled kernel `name` of a source for the current device, compiled on first use.

    It is called like CuPy's RawKernel. This also sets the attribute that CUDA needs for more than
    48 KB of dynamic shared memory.
    """
    cupy = gpu()
    assert cupy is not None, "asked for a kernel where there is no GPU"
    kernel = _function(source, name, cupy.cuda.Device().id)
    if shared_bytes > FREE_SHARED_BYTES:
        kernel.max_dynamic_shared_size_bytes = shared_bytes
    return kernel


def allocate_pinned(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Zeroed page-locked host memory, which a GPU copies asynchronously."""
    cupy = gpu()
    assert cupy is not None, "asked for pinned memory where there is no GPU"
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    memory = cupy.cuda.alloc_pinned_memory(max(size, 1))
    array: NDArray[Any] = np.ndarray(shape, dtype, buffer=memory)
    array.fill(0)
    return array


@cache
def _function(source: str, name: str, device: int) -> Any:
    return _module(source, device).get_function(name)


@cache
def _module(source: str, device: int) -> Any:  # noqa: ARG001  # one module a device
    cupy = gpu()
    assert cupy is not None
    return cupy.RawModule(code=sources.text(source), options=sources.NVRTC_OPTIONS)
