"""What all tests share: one embedded Spark and one embedded Ray, and the proof that both end.
Some share clusters that an operator has started: a Ray head, a Spark master, a Connect server.

A start costs some ten seconds of a core, a warm job a tenth of one; so both start once, when the
first test asks, one after the other from the main thread, as Ray wants it. A test that starts,
kills or reconnects either does so in a process of its own.

`make test` runs four processes of tests (pytest-xdist), for many tests wait. A file's tests stay
together and in order, so that what a module shares is made once. Tests on the same clusters run in
one process, so that these start once too; they come first, for they take longest. Those on Ray and
those on Spark alone take so long that a process each is worth a second start of Spark.
"""

import gc
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from _pytest.assertion import rewrite
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.clusters import RunningRay
    from tests.support.replica_group import Group

# How long an example takes, or drawing it, is the machine's affair; and the same examples each time
# give the same verdict.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")

os.environ["KERAS_BACKEND"] = "jax"  # of every process of tests and of Spark's; Keras reads it once

_MARK = "DOWNPOUR_TEST_RUN"
# Fixtures that are clusters: one process runs all tests on those of a group, and starts them once.
# A test belongs to the first group that has one of its fixtures.
_CLUSTERS = {
    "Ray, with Spark or without": {"ray_local"},
    "Spark alone": {"spark"},
    "running clusters": {"running_ray", "spark_master", "connect_url"},
}


def _group(item: pytest.Item) -> str | None:
    fixtures: set[str] = set(getattr(item, "fixturenames", ()))
    return next((group for group, clusters in _CLUSTERS.items() if clusters & fixtures), None)


def pytest_configure(config: pytest.Config) -> None:
    """Rewrite the assertions of all tests once, for the processes of pytest-xdist to read.

    They start together, and each would rewrite all of them.
    """
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        return
    state = config.stash[rewrite.assertstate_key]
    for test in Path(__file__).parent.rglob("test_*.py"):
        cache = rewrite.get_cache_dir(test)
        compiled = cache / (test.stem + rewrite.PYC_TAIL)
        if rewrite._read_pyc(test, compiled) is None and rewrite.try_makedirs(cache):
            source_hash, code = rewrite._rewrite_test(test, config)
            rewrite._write_pyc(state, code, source_hash, compiled)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the collector of garbage from thousands of tests, which live as long as the process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests on the same clusters first, together, then the files with a slow test."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    order = [*_CLUSTERS, None]
    items.sort(key=lambda item: (order.index(_group(item)), item.path not in slow))


@pytest.hookimpl(wrapper=True)
def pytest_collection_finish(session: pytest.Session) -> Iterator[None]:
    """Report a group to pytest-xdist as a file of that name, for it gives one process a whole file.

    Its own mark, `xdist_group`, has no effect: release 3.8 renames items by an attribute that
    pytest 9.2 no longer reads.
    """
    items = session.items
    if hasattr(session.config, "workerinput"):  # in a process of pytest-xdist
        session.items = [_Reported(item) for item in items]  # type: ignore[misc]
    try:
        return (yield)
    finally:
        session.items = items


class _Reported:
    """A test under the name that pytest-xdist groups it by."""

    def __init__(self, item: pytest.Item) -> None:
        group = _group(item)
        self.nodeid = f"{group}::{item.nodeid}" if group else item.nodeid


@pytest.fixture(scope="session")
def spark() -> Iterator["SparkSession"]:
    """An embedded Spark session of two slots, shared by the whole run."""
    from deploy.clusters.java import spark_environment
    from worker.spark import start_session

    with start_session(None, 2, app="tests", env=spark_environment()) as session:
        yield session


@pytest.fixture(scope="session")
def ray_local() -> Iterator[str]:
    """The address of an embedded Ray of four CPUs that this process is connected to."""
    from deploy.clusters.ray_cluster import connect
    from tests.support.slow_ray_start import patient

    with patient(), connect(None, 4) as address:
        yield address


@pytest.fixture(scope="session")
def running_ray() -> Iterator["RunningRay"]:
    """A Ray head of two CPUs, with a token."""
    from tests.support.clusters import RunningRay, ray_head
    from tests.support.ports import free_port

    # Its path must be short, for it holds sockets.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        file = Path(folder) / "token"
        file.write_text("0123456789abcdef" * 4)
        file.chmod(0o600)
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}
        port = free_port()
        with ray_head(Path(folder) / "r", token, port) as address:
            yield RunningRay(address, f"ray://127.0.0.3:{port}", token)


@pytest.fixture(scope="session")
def spark_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A standalone master's URL; its worker has two cores, and believes in two GPUs."""
    from tests.support.clusters import standalone_spark

    with standalone_spark(tmp_path_factory.mktemp("spark"), gpus=2) as url:
        yield url


@pytest.fixture(scope="session")
def connect_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The sc:// URL of a Spark Connect server with two slots."""
    from tests.support.clusters import connect_server

    with connect_server(tmp_path_factory.mktemp("connect")) as url:
        yield url


@pytest.fixture(scope="session", autouse=True)
def quick_start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes start without numba; Spark's Java, and its Python workers, start sooner, too."""
    from ps.launch import processes
    from tests.support.quick_start import preload_spark_workers, without_numba

    folder = without_numba(tmp_path_factory.mktemp("quick") / "start")
    before = os.environ.get("PYTHONPATH")
    with pytest.MonkeyPatch.context() as patch:
        paths = os.pathsep.join([folder, processes._import_path()])
        patch.setattr(processes, "_import_path", lambda: paths)
        patch.setenv("PYTHONPATH", os.pathsep.join([folder, before] if before else [folder]))
        patch.setenv("JAVA_TOOL_OPTIONS", preload_spark_workers(Path(folder)))
        yield


@pytest.fixture
def compiled_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes start with numba, as they do for users."""
    from ps.launch import processes

    monkeypatch.setattr(processes, "_import_path", lambda: os.pathsep.join(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


@pytest.fixture
def group(tmp_path: Path) -> Iterator["Group"]:
    """A shard's primary, boot 1, and its backup, boot 2, in sync, before any weights."""
    from tests.support.replica_group import Group

    group = Group(tmp_path)
    for copies in ((1,), (1, 2)):
        group.join()
        group.await_holders(*copies)
    yield group
    group.stop()


@pytest.fixture
def emulated() -> None:
    """Skips a test that executes kernels where nothing can compile them for the CPU."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: kernels can't be executed on the CPU")


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A CuPy whose only GPU is the emulator."""
    from cupy_kernels import cupy_device
    from tests.support.fake_cupy import fake_cupy

    fake = fake_cupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    caches = (cupy_device.gpu, cupy_device._function, cupy_device._module)
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
    from tests.support.eventually import eventually

    eventually(lambda: not _marked(mark), because=lambda: f"no process is left: {_marked(mark)}")


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
