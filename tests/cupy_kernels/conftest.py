"""What the kernels' tests need of the machine."""

import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from cupy_kernels import device
from tests.cupy_kernels.fake_cupy import fake_cupy


@pytest.fixture
def emulated() -> None:
    """Skips a test that executes kernels where nothing can compile them for the CPU."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: kernels can't be executed on the CPU")


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A CuPy whose only GPU is the emulator."""
    fake = fake_cupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    caches = (device.gpu, device._function, device._module)
    for cache in caches:
        cache.cache_clear()
    yield fake
    for cache in caches:
        cache.cache_clear()
