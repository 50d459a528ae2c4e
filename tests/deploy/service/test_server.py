"""What `downpour serve` refuses to start on, what it loads, and how its database is kept."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

from deploy.run.folder import lock_folder
from deploy.service import database_tables, server
from deploy.service.access import exposure_of
from deploy.service.app import ServeOptions
from deploy.service.database_tables import DATABASE, open_database
from deploy.service.server import Listen
from shards.errors import BadInput, GiveUp
from tests.support.service_in_process import Running, Start


def serve(home: Path, port: int = 1, host: str = "127.0.0.1") -> None:
    exposure = exposure_of(host, tls=False, proxy=None, require_tokens=False)
    server.serve(ServeOptions(home=home, slots=1, exposure=exposure), Listen(host=host, port=port))


def test_a_second_service_on_one_home(home: Path) -> None:
    """The home is locked, and the refusal says what to do."""
    lock = lock_folder(home)
    with pytest.raises(BadInput, match="no other service with this home"):
        serve(home)
    os.close(lock)


def test_a_used_port(home: Path) -> None:
    """A port that is taken is named."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=f"--port {port}.*choose another"):
            serve(home, port)


def test_a_root_that_is_not_there(home: Path, tmp_path: Path) -> None:
    """A --root that is no folder is refused by name, before the service listens."""
    for root in (tmp_path / "none", tmp_path / "file"):
        (tmp_path / "file").touch()
        options = ServeOptions(home=home, slots=1, roots=(tmp_path, root))
        with pytest.raises(BadInput, match=f"^--root: expected a folder that exists, got {root}$"):
            server.serve(options, Listen(host="127.0.0.1", port=1))


def test_a_root_in_the_home(home: Path, tmp_path: Path) -> None:
    """Jobs may name no file there, so a --root in it would allow nothing: it is refused."""
    home.mkdir(exist_ok=True)
    (tmp_path / "link").symlink_to(home)
    for root in (home, tmp_path / "link"):
        options = ServeOptions(home=home, slots=1, roots=(root,))
        with pytest.raises(BadInput, match=r"^--root: expected a folder outside the home"):
            server.serve(options, Listen(host="127.0.0.1", port=1))


def test_an_address_that_others_can_reach(home: Path) -> None:
    """Without TLS the service serves this machine only."""
    with pytest.raises(BadInput, match="--host: expected a loopback address"):
        serve(home, host="0.0.0.0")


def test_a_lost_database(start: Start, home: Path) -> None:
    """Jobs without a database: no start, until it is rebuilt."""
    with start(driven=False) as running:
        job = running.submit("train")
    for path in home.glob(f"{DATABASE}*"):
        path.unlink()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(BadInput, match="downpour service reindex"):
        serve(home, port)
    assert server.reindex(home) == 1
    with start(driven=False) as running:
        assert running.get(job)["state"] == "QUEUED"


def test_a_torn_database(home: Path) -> None:
    """A file that is no database is refused with the way to rebuild it."""
    (home / DATABASE).write_bytes(b"SQLite format 3\0" + b"torn" * 100)
    with pytest.raises(BadInput, match="downpour service reindex"):
        open_database(home / DATABASE)


def test_a_copy_of_the_database(service: Running, home: Path, tmp_path: Path) -> None:
    """A backup taken while the service runs holds its jobs, and overwrites nothing."""
    job = service.submit()
    service.await_state(job, "SUCCEEDED")
    target = tmp_path / "copy.db"
    server.backup(home, target)
    engine = sa.create_engine(f"sqlite:///{target}")
    with engine.connect() as connection:
        assert connection.execute(sa.select(database_tables.job.c.id)).scalar() == job
    engine.dispose()
    with pytest.raises(BadInput, match="expected a new file"):
        server.backup(home, target)
    target = tmp_path / "missing" / "copy.db"
    with pytest.raises(GiveUp, match=f"^{target}: No such file or directory$"):
        server.backup(home, target)


def test_the_service_loads_no_cluster() -> None:
    """The service imports no Ray, Spark, Arrow, compiler or plots: it weighs little. PostgreSQL and
    OpenTelemetry are imported only where they are configured."""
    heavy = {"ray", "pyspark", "pyarrow", "pandas", "numba", "matplotlib", "torch"}
    heavy |= {"psycopg", "opentelemetry.sdk", "opentelemetry.exporter"}
    script = f"import sys, deploy.service.server; print(*set(sys.modules) & {heavy!r})"
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_folders_are_private(service: Running, home: Path) -> None:
    """Other users of the machine can read neither the database nor a job's files."""
    job = service.submit()
    service.await_state(job, "SUCCEEDED")
    assert (home / DATABASE).stat().st_mode & 0o077 == 0
    assert (home / "jobs" / job).stat().st_mode & 0o077 == 0
