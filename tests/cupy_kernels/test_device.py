"""The detection of CuPy, and the memory that layers reuse."""

import subprocess
import sys

import numpy as np
import pytest

from cupy_kernels import device
from cupy_kernels.workspace import Workspace


def test_importing_the_kernels_imports_no_cupy() -> None:
    """Only asking for the GPU does; the answer here is the module or None, never an exception."""
    code = (
        "import sys; import cupy_kernels.device, cupy_kernels.convolution, cupy_kernels.pooling;"
        "assert not any(name.startswith('cupy') and not name.startswith('cupy_kernels')"
        " for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    answer = device.gpu()
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
    device.gpu.cache_clear()
    try:
        assert device.gpu() is None
    finally:
        device.gpu.cache_clear()


def test_a_workspace_hands_out_the_same_memory_for_the_same_role() -> None:
    """Smaller requests reuse the largest; other roles are other memory."""
    work = Workspace()
    large, small = work.take("a", (4, 5)), work.take("a", (3, 2))
    assert np.shares_memory(large, small)
    assert small.shape == (3, 2)
    assert small.flags.c_contiguous
    assert not np.shares_memory(large, work.take("b", (4, 5)))
    assert work.zeros("a", (2, 2)).tolist() == [[0, 0], [0, 0]]
