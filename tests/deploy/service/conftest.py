"""A service in this process, with runners that train nothing, and a client for it.

A module with DATABASES = ("sqlite", "postgresql") has its tests with a service run over both, but
those with parameters of their own: these are about input, which no database sees.
"""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deploy.service import database
from deploy.service.app import ServeOptions, Service, application
from deploy.service.database import VARIABLE
from deploy.service.database_tables import BUSY_S, DATABASE, DatabasePlace, open_database
from deploy.service.job_store import JOBS
from deploy.service.launcher import LocalLauncher
from tests.support import tiny_job
from tests.support.job_processes import kill_processes
from tests.support.postgres_server import PostgresServer, postgres_server
from tests.support.service_in_process import STUB, Running, Start, TestClient


@pytest.fixture
def solver(tmp_path: Path) -> Path:
    """The solver of the tiny job."""
    folder = tmp_path / "input"
    folder.mkdir()
    return tiny_job.write_job(folder)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The home of the service."""
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    return folder


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "place" in metafunc.fixturenames:
        databases = getattr(metafunc.module, "DATABASES", ("sqlite",))
        markers = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
        if "place" in markers:
            return
        if markers:
            databases = databases[:1]
        metafunc.parametrize("place", databases, indirect=True)


@pytest.fixture(scope="session")
def blank_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with all migrations and no rows: they cost more than most tests here."""
    path = tmp_path_factory.mktemp("blank") / DATABASE
    engine = open_database(path)
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    engine.dispose()
    return path


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server of PostgreSQL; a test that needs it is skipped where there is none."""
    with postgres_server() as found:
        if isinstance(found, str):
            pytest.skip(found)
        yield found


@pytest.fixture(scope="session")
def blank_postgres(postgres: PostgresServer) -> str:
    """The name of a database with all migrations and no rows."""
    name = postgres.new_database()
    open_database(postgres.url(name)).dispose()
    return name


@pytest.fixture
def place(
    request: pytest.FixtureRequest, home: Path, monkeypatch: pytest.MonkeyPatch
) -> DatabasePlace:
    """The database of the home, without rows: of SQLite, or of PostgreSQL."""
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("blank_database"), home / DATABASE)
        return home / DATABASE
    server: PostgresServer = request.getfixturevalue("postgres")
    name = server.new_database(request.getfixturevalue("blank_postgres"))
    monkeypatch.setenv(VARIABLE, server.text(name))
    return server.url(name)


@pytest.fixture
def start(home: Path, solver: Path, place: DatabasePlace) -> Iterator[Start]:
    """Start a service on the home; the end of the context stops it, and no job.

    A service that is not `driven` starts no job, follows none and sends no webhook. A locked
    database is waited for `busy_s` seconds; `clock` is the time. The end of the test kills the
    runners that are left, as of one that has failed.
    """

    @contextmanager
    def started(
        *,
        driven: bool = True,
        busy_s: float = BUSY_S,
        clock: Callable[[], float] | None = None,
        **options: Any,
    ) -> Iterator[Running]:
        stubs = partial(LocalLauncher, (sys.executable, str(STUB)))
        usual = {"slots": 8, "retry_s": 0.1, "launcher": stubs}
        choice = ServeOptions(home=home, **{**usual, **options})
        engine = database.open_for_home(home, place, busy_s=busy_s)
        service = Service(choice, engine, clock=clock)
        if not driven:
            service.supervisor.reconcile = lambda: None  # type: ignore[method-assign]
            service.webhooks.send_due = lambda: None  # type: ignore[method-assign]
        with TestClient(application(service), base_url="http://127.0.0.1") as http:
            yield Running(service, http, solver)
        engine.dispose()

    yield started
    jobs = home / JOBS
    if jobs.is_dir():
        kill_processes(job.name for job in jobs.iterdir())


@pytest.fixture
def service(start: Start) -> Iterator[Running]:
    """A running service."""
    with start() as running:
        yield running
