"""SQLite and PostgreSQL: the schema, which database a home uses, copies, passwords."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import produce_migrations
from alembic.migration import MigrationContext
from alembic.operations import ops
from alembic.script import ScriptDirectory

from deploy.service import database, database_tables, server
from deploy.service import postgres as driver
from deploy.service.access import exposure_of
from deploy.service.access_store import AccessStore
from deploy.service.app import ServeOptions
from deploy.service.database_tables import REVISION, DatabasePlace, open_database
from deploy.service.launcher import LocalLauncher
from deploy.service.server import Listen
from deploy.service.tokens import TokenRole
from shards.errors import BadInput
from tests.support.eventually import eventually
from tests.support.ports import free_port
from tests.support.postgres_server import PASSWORD, PostgresServer
from tests.support.service_in_process import Running, Start

DATABASES = ("sqlite", "postgresql")
MIGRATIONS = Path(database_tables.__file__).parent / "migrations"


@pytest.fixture(params=DATABASES)
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> DatabasePlace:
    """A database without tables."""
    if request.param == "sqlite":
        return tmp_path / "empty.db"
    found: PostgresServer = request.getfixturevalue("postgres")
    return found.url(found.new_database())


def serve(home: Path, text: str | None = None) -> None:
    exposure = exposure_of("127.0.0.1", tls=False, proxy=None, require_tokens=False)
    options = ServeOptions(home=home, slots=1, exposure=exposure, database=text)
    server.serve(options, Listen(host="127.0.0.1", port=free_port()))


def test_a_new_database_has_the_tables_of_the_code(empty: DatabasePlace) -> None:
    """The migrations together create the tables that the code declares, and no others."""
    engine = open_database(empty)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection)
        revision = context.get_current_revision()
        changes = produce_migrations(context, database_tables.metadata).upgrade_ops
    engine.dispose()
    assert revision == REVISION == ScriptDirectory(str(MIGRATIONS)).get_current_head()
    assert changes is not None
    kinds = (ops.CreateTableOp, ops.DropTableOp, ops.ModifyTableOps)
    assert [change for change in changes.ops if isinstance(change, kinds)] == []


def test_a_database_without_an_encoding(postgres: PostgresServer) -> None:
    """It holds the service's tables and texts all the same."""
    name = postgres.new_database(options="ENCODING 'SQL_ASCII' LOCALE 'C'")
    engine = open_database(postgres.url(name))
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT 'Zürich'").scalar() == "Zürich"
        assert MigrationContext.configure(connection).get_current_revision() == REVISION
    engine.dispose()


@pytest.mark.parametrize("revision", ["0004_home", "9999"])
def test_a_database_of_another_version(empty: DatabasePlace, revision: str) -> None:
    """A database of an earlier or a later schema is refused, named, and not changed."""
    engine = open_database(empty)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{revision}'")
    refusal = f"expected the schema {REVISION}, got the schema {revision} of another version"
    with pytest.raises(BadInput, match=f"{refusal}.*downpour service reindex") as caught:
        open_database(empty)
    assert PASSWORD not in str(caught.value)
    with engine.connect() as connection:
        assert MigrationContext.configure(connection).get_current_revision() == revision
    engine.dispose()


def test_a_home_with_an_empty_database(start: Start, home: Path, empty: DatabasePlace) -> None:
    """Jobs whose database has no tables: no start, and a sentence that names `reindex`."""
    with start(driven=False) as running:
        running.submit()
    with pytest.raises(BadInput, match="rebuild it with: downpour service reindex"):
        open_database(empty, filled=True)
    assert home.is_dir()


def test_a_database_belongs_to_one_home(start: Start, place: DatabasePlace, tmp_path: Path) -> None:
    """Another home is refused, for it would find these jobs without a process; reindex moves it."""
    with start(driven=False) as running:
        running.submit()
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(BadInput, match="got that of another home"):
        database.open_for_home(other, place)
    database.take_over(other, place).dispose()
    database.open_for_home(other, place).dispose()


def test_a_copy_goes_back(
    start: Start, home: Path, place: DatabasePlace, empty: DatabasePlace, tmp_path: Path
) -> None:
    """A copy of either database fills either one: jobs, tokens and events are the same, and ids
    continue after the last one."""
    with start() as running:
        job = running.submit()
        running.await_state(job, "SUCCEEDED")
        access, store = running.service.access, running.service.store
        _, token = access.create_token("alice", TokenRole.OPERATOR, ["a"], 86400.0)
        events, row = store.events([job]), store.get(job)
        copy = tmp_path / "copy.db"
        server.backup(home, copy)
        with pytest.raises(BadInput, match="expected a new file"):
            server.backup(home, copy)
    assert copy.stat().st_mode & 0o077 == 0
    database.restore_from(copy, empty)
    engine = open_database(empty)
    restored = type(store)(home, engine)
    assert (restored.get(job), restored.events([job])) == (row, events)
    principal = AccessStore(engine).of_token(token)
    assert principal is not None
    assert principal.projects == frozenset({"a"})
    restored.note(row, "remark")
    assert restored.events([job])[-1]["id"] == events[-1]["id"] + 1
    engine.dispose()
    with pytest.raises(BadInput, match="without rows"):
        database.restore_from(copy, empty)
    with pytest.raises(BadInput, match="expected a copy"):
        database.restore_from(tmp_path / "none.db", empty)


def test_one_name_has_one_token_at_a_time(start: Start, place: DatabasePlace) -> None:
    """Of tokens that are created in the same moment with one name, one is."""
    refused: list[str] = []
    with start(driven=False) as running:

        def create() -> None:
            try:
                running.service.access.create_token("alice", TokenRole.VIEWER, None, 60.0)
            except BadInput as error:
                refused.append(str(error))

        threads = [threading.Thread(target=create) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(running.service.access.tokens()) == 1
    assert len(refused) == 5


def test_text_with_nul_characters(service: Running) -> None:
    """A NUL in a log, a query or an id is no error of the database."""
    job = service.submit("nul")
    service.await_state(job, "SUCCEEDED")
    log = service.http.get(f"/api/v1/jobs/{job}/attempts").json()["attempts"][0]["log_tail"]
    assert log.endswith("nul\ufffd")
    assert service.http.get("/api/v1/jobs?q=%00").status_code == 422
    assert service.http.get("/api/v1/jobs/%00").status_code == 422


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("mysql://db/x", "got mysql://"),
        ("postgresql://u:sesame@h:port/x", "cannot be read"),
        ("sesame", "cannot be read"),
        ("postgresql://u@h", "name of a database"),
        ("postgresql://u:sesame@h/x", "without a password.*DOWNPOUR_DATABASE"),
        ("postgresql://u@h/x?password=sesame", "without a password"),
    ],
)
def test_wrong_urls(tmp_path: Path, text: str, refusal: str) -> None:
    """A URL that is no good is refused, and never repeated: it may hold a password."""
    with pytest.raises(BadInput, match=refusal) as caught:
        database.database_of(tmp_path, text)
    assert "sesame" not in str(caught.value)


def test_which_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option wins over the variable, and that over what the home remembers: no password."""
    assert database.database_of(tmp_path) == tmp_path / database_tables.DATABASE
    bare, full = "postgresql://u@h/one", "postgresql://u:sesame@h/one"
    monkeypatch.setenv(database.VARIABLE, full)
    place = database.database_of(tmp_path)
    assert isinstance(place, sa.URL)
    assert (place.password, database.describe(place)) == ("sesame", bare)
    assert database.database_of(tmp_path, bare) == place  # the variable knows the password
    other = database.database_of(tmp_path, "postgresql://u@h/two")
    assert isinstance(other, sa.URL)
    assert (other.database, other.password) == ("two", None)
    assert database.database_of(tmp_path, "sqlite") == tmp_path / database_tables.DATABASE
    database.remember(tmp_path, place)
    monkeypatch.delenv(database.VARIABLE)
    kept = database.database_of(tmp_path)
    assert isinstance(kept, sa.URL)
    assert (kept.database, kept.password) == ("one", None)
    assert "sesame" not in (tmp_path / database.HOME).read_text()
    database.remember(tmp_path, tmp_path / database_tables.DATABASE)
    assert database.database_of(tmp_path) == tmp_path / database_tables.DATABASE


def test_a_job_does_not_inherit_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of a job does not have the variable with the password."""
    monkeypatch.setenv(database.VARIABLE, "postgresql://u:sesame@h/one")
    (tmp_path / "logs").mkdir()
    script = f"import os; assert {database.VARIABLE!r} not in os.environ"
    launcher = LocalLauncher((sys.executable, "-c", script))
    launcher.launch(tmp_path, 1, "nonce")
    eventually(lambda: launcher.exit_status("nonce") is not None, because="its end")
    assert launcher.exit_status("nonce") == 0


@pytest.fixture
def server_process(
    postgres: PostgresServer, blank_postgres: str, home: Path, tmp_path: Path
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `downpour serve` over PostgreSQL as users do, with the password in the variable."""
    url = postgres.text(postgres.new_database(blank_postgres))
    children = []

    def started(*words: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", "from deploy.cli.app import main; main()", *words],
            env=os.environ | {"DOWNPOUR_HOME": str(home), database.VARIABLE: url},
            cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        children.append(child)
        return child

    yield started
    for child in children:
        child.kill()
        child.wait()


def test_a_password_is_shown_nowhere(
    server_process: Callable[..., subprocess.Popen[str]], home: Path
) -> None:
    """Neither the list of processes, nor the home, nor what is printed has the password."""
    child = server_process("serve", "--port", str(free_port()))
    assert child.stdout is not None
    output = child.stdout.readline()
    assert output.startswith("serving http://")
    second = server_process("service", "token", "create", "--name", "a", "--role", "viewer")
    output += second.communicate()[0]
    assert second.returncode == 0, output
    command_line = Path("/proc", str(child.pid), "cmdline").read_bytes()
    child.terminate()
    output += child.communicate()[0]
    assert json.loads((home / database.HOME).read_text())["database"].startswith("postgresql://")
    files = b"".join(path.read_bytes() for path in home.rglob("*") if path.is_file())
    assert PASSWORD not in output
    assert PASSWORD.encode() not in files + command_line
    assert not (home / database_tables.DATABASE).exists()


def test_a_second_service_with_one_database(
    postgres: PostgresServer, blank_postgres: str, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    """A copy of a home is no way around: the database itself is locked."""
    name = postgres.new_database(blank_postgres)
    monkeypatch.setenv(database.VARIABLE, postgres.text(name))
    engine = open_database(postgres.url(name))
    with (
        driver.hold_database(engine, postgres.url(name)),
        pytest.raises(BadInput, match="no other service with this database") as caught,
    ):
        serve(home)
    assert PASSWORD not in str(caught.value)
    engine.dispose()


def test_a_server_that_does_not_answer(
    postgres: PostgresServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong password, or no server: no start, one sentence, without the password."""
    wrong = postgres.url(password="sesame").set(drivername="postgresql")
    nowhere = wrong.set(query={"host": "/nowhere"})
    for url, words in ((wrong, "authentication failed"), (nowhere, "/nowhere")):
        monkeypatch.setenv(database.VARIABLE, url.render_as_string(hide_password=False))
        with pytest.raises(BadInput, match=words) as caught:
            serve(home)
        assert "sesame" not in str(caught.value)
        assert "\n" not in str(caught.value)
