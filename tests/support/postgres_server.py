"""A PostgreSQL of the system's packages, private to a test: a folder, a socket, a password."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

PASSWORD = "pl4nted-p4ssword"
"""Of every connection, so that tests can look for it where it must not be."""
_USERS = ("postgres", "nobody")  # its programs refuse to run as root


def programs() -> Path | None:
    """The folder with initdb and pg_ctl; None where PostgreSQL is not installed."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return folders[-1].parent if folders else None


class PostgresServer:
    """A server that listens on a socket in its folder. Each database begins as a copy of one."""

    def __init__(self, folder: Path, bin_folder: Path, owner: dict[str, Any]) -> None:
        self.folder = folder
        self._bin = bin_folder
        self._owner = owner
        self._count = 0
        password = folder / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        options = ("--auth=scram-sha-256", "--username=downpour", f"--pwfile={password}")
        self._run("initdb", *options, "--no-sync", "--encoding=UTF8", "--locale=C.UTF-8")
        self.start()

    def start(self) -> None:
        options = f"-c listen_addresses='' -c unix_socket_directories={self.folder}"
        options += " -c fsync=off -c full_page_writes=off -c max_connections=60"
        log = f"--log={self.folder}/log"
        self._run("pg_ctl", "start", "--wait", "--silent", log, f"--options={options}")

    def stop(self) -> None:
        """Stop it as a restart of its machine would: open connections are broken."""
        self._run("pg_ctl", "stop", "--wait", "--silent", "--mode=immediate")

    def url(self, database: str = "postgres", *, password: str = PASSWORD) -> sa.URL:
        return sa.URL.create(
            "postgresql+psycopg", "downpour", password, database=database,
            query={"host": str(self.folder)},
        )  # fmt: skip

    def text(self, database: str) -> str:
        """The URL as a user writes it, with its password."""
        return self.url(database).set(drivername="postgresql").render_as_string(hide_password=False)

    def new_database(self, template: str = "template0", options: str = "") -> str:
        """The name of a new database: empty, or a copy of another one."""
        self._count += 1
        name = f"test_{self._count}"
        engine = sa.create_engine(self.url(), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE {name} TEMPLATE {template} {options}")
        engine.dispose()
        return name

    def _run(self, program: str, *words: str) -> None:
        data = {"PGDATA": str(self.folder / "data"), "PATH": os.defpath, "LC_ALL": "C.UTF-8"}
        done = subprocess.run(
            [self._bin / program, *words], cwd=self.folder, env=data, capture_output=True,
            text=True, check=False, **self._owner,
        )  # fmt: skip
        assert done.returncode == 0, f"{program}: {done.stdout} {done.stderr}"


@contextmanager
def postgres_server() -> Iterator[PostgresServer | str]:
    """A server that runs until the end of the context, or why there can be none here."""
    found, owner = programs(), dict[str, Any]()
    if found is None:
        yield "PostgreSQL is not installed: apt-get install postgresql"
        return
    with tempfile.TemporaryDirectory(prefix="downpour-pg-", dir="/tmp") as text:
        folder = Path(text)
        if os.geteuid() == 0:
            user = next((name for name in _USERS if _exists(name)), None)
            if user is None:
                yield f"PostgreSQL refuses to run as root, and there is no user {_USERS[0]}"
                return
            entry = pwd.getpwnam(user)
            os.chown(folder, entry.pw_uid, entry.pw_gid)
            owner = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        server = PostgresServer(folder, found, owner)
        try:
            yield server
        finally:
            server.stop()


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True
