"""What the kernels' tests need of the machine."""

import shutil

import pytest


@pytest.fixture
def emulated() -> None:
    """Skips a test that executes kernels where nothing can compile them for the CPU."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: kernels can't be executed on the CPU")
