"""A service in this process, with runners that train nothing, and a client for it."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy.service.app import ServeOptions, Service, application
from deploy.service.launcher import LocalLauncher
from deploy.service.tables import DATABASE, open_database
from tests.support import tiny_job
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


@pytest.fixture(scope="session")
def blank_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with all migrations and no rows: they cost more than most tests here."""
    path = tmp_path_factory.mktemp("blank") / DATABASE
    engine = open_database(path)
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    engine.dispose()
    return path


@pytest.fixture
def start(home: Path, solver: Path, blank_database: Path) -> Start:
    """Start a service on the home; the end of the context stops it, and no job.

    A service that is not `driven` starts no job, follows none, and sends no webhook.
    """

    @contextmanager
    def started(*, driven: bool = True, **options: Any) -> Iterator[Running]:
        choice = ServeOptions(home=home, **{"slots": 8, "retry_s": 0.1, **options})
        if not (home / DATABASE).exists():
            shutil.copy(blank_database, home / DATABASE)
        engine = open_database(home / DATABASE)
        launcher = LocalLauncher((sys.executable, str(STUB)))
        service = Service(choice, engine, launcher)
        if not driven:
            service.supervisor.look = lambda: None  # type: ignore[method-assign]
            service.webhooks.send_due = lambda: None  # type: ignore[method-assign]
        with TestClient(application(service), base_url="http://127.0.0.1") as http:
            yield Running(service, http, solver)
        engine.dispose()

    return started


@pytest.fixture
def service(start: Start) -> Iterator[Running]:
    """A running service. Jobs that a test leaves are ended."""
    with start() as running:
        yield running
        for row in running.service.store.unfinished():
            if running.ask(row.id, "cancel").status_code == 202:
                running.await_state(row.id, "CANCELLED", "SUCCEEDED", "FAILED")
