"""The detection of CuPy, and the memory that layers reuse."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_kernels import cupy_device
from cupy_kernels.host_pool import HostPool
from cupy_kernels.workspace import Workspace


def test_importing_the_kernels_imports_no_cupy() -> None:
    """Only asking for the GPU does; the answer here is the module or None, never an exception."""
    code = (
        "import sys; import cupy_kernels.cupy_device, cupy_kernels.ops.convolution;"
        "import cupy_kernels.ops.pooling;"
        "assert not any(name.startswith('cupy') and not name.startswith('cupy_kernels')"
        " for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    answer = cupy_device.gpu()
    assert answer is None or answer.cuda.runtime.getDeviceCount() > 0


def test_a_broken_cupy_means_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CuPy that imports and fails at its first device call is no GPU."""

    class Runtime:
        @staticmethod
        def getDeviceCount() -> int:  # noqa: N802  # CUDA's own name
            raise RuntimeError("no driver")

    class Broken:
        class cuda:  # noqa: N801  # CuPy's own name
            runtime = Runtime

    monkeypatch.setitem(sys.modules, "cupy", Broken)
    cupy_device.gpu.cache_clear()
    try:
        assert cupy_device.gpu() is None
    finally:
        cupy_device.gpu.cache_clear()


def test_memory_of_the_host_is_reused_once_nothing_refers_to_it() -> None:
    """A view keeps an array's memory; after that the next array has it, of any role and type."""
    work = Workspace()
    large = work.take("a", (4, 5))
    address, view = large.ctypes.data, large[1:].reshape(-1)
    assert not np.shares_memory(view, work.take("a", (4, 5)))
    del large
    assert not np.shares_memory(view, work.take_as("b", (3, 2), np.uint8))
    del view
    small = work.take_as("b", (3, 2), np.uint8)
    assert small.ctypes.data == address
    assert small.flags.c_contiguous
    assert work.zeros("a", (2, 2)).tolist() == [[0, 0], [0, 0]]


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 5)), max_size=40))
def test_arrays_of_a_pool_never_overlap(steps: list[tuple[int, int]]) -> None:
    """Whatever is taken and dropped, in whatever order; in the end all memory is one piece."""
    pool, held = HostPool(), list[np.ndarray]()
    start = pool.take((1,), np.int32).ctypes.data
    for number, (size, dropped) in enumerate(steps):
        held.append(pool.take((size,), np.int32))
        held[-1].fill(number)
        if dropped < len(held):
            del held[dropped]
        assert all(len(set(array.tolist())) <= 1 for array in held)
    held.clear()
    assert pool.take((64 * 2**20,), np.uint8).ctypes.data == start
