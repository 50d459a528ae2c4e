"""What all tests share: one embedded Spark and one embedded Ray, and the proof that both end.

A start costs some ten seconds of a core, a warm job a tenth of one; so both start once, when the
first test asks, one after the other from the main thread, as Ray wants it. A test that starts,
kills or reconnects either does so in a process of its own.
"""

import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MARK = "DOWNPOUR_TEST_RUN"
_GONE_S = 60.0


@pytest.fixture(scope="session")
def spark() -> Iterator["SparkSession"]:
    """An embedded Spark session of two slots, shared by the whole run."""
    from deploy.java import java_environment
    from worker.spark import start_session

    with start_session(None, 2, app="tests", env=java_environment()) as session:
        yield session


@pytest.fixture(scope="session")
def ray_local() -> Iterator[str]:
    """The address of an embedded Ray of four CPUs that this process is connected to."""
    from deploy.ray_cluster import connect

    with connect(None, 4) as address:
        yield address


@pytest.fixture
def emulated() -> None:
    """Skips a test that executes kernels where nothing can compile them for the CPU."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: kernels can't be executed on the CPU")


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A CuPy whose only GPU is the emulator."""
    from cupy_kernels import device
    from tests.cupy_kernels.fake_cupy import fake_cupy

    fake = fake_cupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    caches = (device.gpu, device._function, device._module)
    for cache in caches:
        cache.cache_clear()
    yield fake
    for cache in caches:
        cache.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Fail the run when a process that descends from it, however detached, outlives its fixtures.

    Descendants are told by a variable that they inherit, for an orphan has lost its parent.
    """
    mark = os.environ[_MARK] = secrets.token_hex(8)
    yield
    end_by = time.monotonic() + _GONE_S
    while (left := _marked(mark)) and time.monotonic() < end_by:
        time.sleep(0.2)
    assert not left, f"left running: {left}"


def _marked(mark: str) -> list[str]:
    """The command lines of the living processes, but this one, that carry the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            marked = process.environ().get(_MARK) == mark and process.pid != os.getpid()
            command = " ".join(process.cmdline())
            # The tracker of multiprocessing ends with this very process.
            if marked and command and "multiprocessing.resource_tracker" not in command:
                found.append(f"{process.pid} {command[:120]}")
        except psutil.Error:
            continue  # It has just ended, or is another user's.
    return found
