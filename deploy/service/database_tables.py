"""The service's database: an index of the job folders that can be rebuilt from them.

SQLite in WAL mode, or PostgreSQL. Schema changes are alembic migrations, in the folder migrations.
A list of jobs reads the table `job` alone; series and logs are never in the database. A column's
default is its value in a new row.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.pool import ConnectionPoolEntry

from deploy.service import postgres
from deploy.service.states import JobState
from shards.errors import BadInput

DATABASE = "service.db"
REVISION = "0001_tables"
"""The newest migration."""
BUSY_S = 30.0
"""How long a statement waits for another process that has locked what it needs."""
_MIGRATIONS = Path(__file__).parent / "migrations"

DatabasePlace = Path | sa.URL
"""Where a database is: a file of SQLite, or the URL of PostgreSQL."""


class PlainText(sa.types.TypeDecorator[str]):
    """Text without NUL characters, which PostgreSQL refuses: a log or a path may have some."""

    impl = sa.String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        return value.replace("\0", "\ufffd") if value is not None else None


class LongText(PlainText):
    """Plain text of any length, as SQL spells it."""

    impl = sa.Text
    cache_ok = True


LargeId = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
"""A number of which there may be thousands a second. SQLite counts in a column INTEGER only."""

metadata = sa.MetaData()

job = sa.Table(
    "job",
    metadata,
    sa.Column("id", PlainText, primary_key=True),
    sa.Column("name", PlainText, nullable=False),
    sa.Column("project", PlainText, nullable=False),
    sa.Column("owner", PlainText, nullable=False),
    sa.Column("labels", sa.JSON, nullable=False),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("slots", sa.Integer, nullable=False),
    sa.Column("settings", sa.JSON, nullable=False),
    sa.Column("state", PlainText, nullable=False, default=JobState.QUEUED),
    sa.Column("state_seq", sa.Integer, nullable=False, default=0),
    sa.Column("attempt", sa.Integer, nullable=False, default=0),
    sa.Column("nonce", PlainText, nullable=False, default=""),
    sa.Column("code", PlainText, nullable=False, default=""),
    sa.Column("reason", PlainText, nullable=False, default=""),
    sa.Column("contact", PlainText, nullable=False, default=""),
    sa.Column("cancelled", sa.Boolean, nullable=False, default=False),
    sa.Column("fruitless", sa.Integer, nullable=False, default=0),
    sa.Column("not_before", sa.Float, nullable=False, default=0.0),
    sa.Column("snapshot", PlainText),
    sa.Column("request_key", PlainText, unique=True),
    sa.Column("events_read", sa.Integer, nullable=False, default=0),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("updated", sa.Float, nullable=False),
    sa.Column("head", sa.JSON, nullable=False, default={}),
    sa.Column("alerts", sa.JSON, nullable=False, default=[]),
    sa.Column("pinned", sa.JSON, nullable=False, default=[]),
)
sa.Index("job_by_state", job.c.state, job.c.id)
sa.Index("job_by_project", job.c.project, job.c.id)

attempt = sa.Table(
    "attempt",
    metadata,
    sa.Column("job", PlainText, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("started", sa.Float, nullable=False),
    sa.Column("ended", sa.Float),
    sa.Column("cause", PlainText, nullable=False, default=""),
    sa.Column("message", PlainText, nullable=False, default=""),
    sa.Column("exit_status", sa.Integer),
    sa.Column("snapshot", PlainText),
    sa.Column("log_tail", LongText, nullable=False, default=""),
)

event = sa.Table(
    "event",
    metadata,
    sa.Column("id", LargeId, primary_key=True, autoincrement=True),
    sa.Column("job", PlainText, nullable=False),
    sa.Column("source", PlainText, nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("time", sa.Float, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("kind", PlainText, nullable=False),
    sa.Column("data", sa.JSON, nullable=False),
    sa.UniqueConstraint("job", "source", "number"),
    sqlite_autoincrement=True,  # streams and webhooks continue after an id: none is used twice
)
sa.Index("event_by_job", event.c.job, event.c.id)

token = sa.Table(
    "token",
    metadata,
    sa.Column("id", PlainText, primary_key=True),
    sa.Column("name", PlainText, nullable=False),
    sa.Column("role", PlainText, nullable=False),
    sa.Column("projects", sa.JSON(none_as_null=True)),
    sa.Column("digest", PlainText, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("expires", sa.Float, nullable=False),
    sa.Column("revoked", sa.Float),
)

session = sa.Table(
    "session",
    metadata,
    sa.Column("digest", PlainText, primary_key=True),
    sa.Column("token", PlainText, nullable=False),
    sa.Column("expires", sa.Float, nullable=False),
)

project = sa.Table(
    "project",
    metadata,
    sa.Column("name", PlainText, primary_key=True),
    sa.Column("running", sa.Integer),
    sa.Column("queued", sa.Integer),
    sa.Column("workers", sa.Integer),
    sa.Column("uploads", sa.Integer),
    sa.Column("upload_bytes", LargeId),
)

audit = sa.Table(
    "audit",
    metadata,
    sa.Column("id", LargeId, primary_key=True, autoincrement=True),
    sa.Column("time", sa.Float, nullable=False),
    sa.Column("actor", PlainText, nullable=False),
    sa.Column("token", PlainText, nullable=False),
    sa.Column("action", PlainText, nullable=False),
    sa.Column("job", PlainText, nullable=False),
    sa.Column("project", PlainText, nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
    sa.Column("address", PlainText, nullable=False),
    sa.Column("detail", PlainText, nullable=False),
)
"""Append-only: triggers of the migration refuse to change or delete a row."""

idempotency = sa.Table(
    "idempotency",
    metadata,
    sa.Column("request", PlainText, primary_key=True),
    sa.Column("body", PlainText, nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
    sa.Column("answer", sa.JSON, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
)


webhook = sa.Table(
    "webhook",
    metadata,
    sa.Column("id", PlainText, primary_key=True),
    sa.Column("url", PlainText, nullable=False),
    sa.Column("secret", PlainText, nullable=False),
    sa.Column("project", PlainText),
    sa.Column("sent", LargeId, nullable=False),
    sa.Column("tries", sa.Integer, nullable=False),
    sa.Column("not_before", sa.Float, nullable=False),
    sa.Column("delivered", sa.Integer, nullable=False),
    sa.Column("given_up", sa.Integer, nullable=False),
    sa.Column("last", PlainText, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
)

home = sa.Table("home", metadata, sa.Column("id", PlainText, primary_key=True))
"""The home whose jobs are indexed here, one row."""


def open_database(
    location: DatabasePlace, *, filled: bool = False, busy_s: float = BUSY_S
) -> sa.Engine:
    """Open the database and bring it to this version's schema.

    Raises BadInput for a database of an unknown schema or that cannot be read, and, if it has to
    be `filled`, for one that is missing or has no tables.
    """
    if isinstance(location, Path):
        name, mend = (
            str(location),
            "move the file away, and rebuild it with: downpour service reindex",
        )
        engine = _sqlite(location, busy_s, new=not filled)
    else:
        name, mend = (
            postgres.show_url(location),
            "check that it runs, and DOWNPOUR_DATABASE or ~/.pgpass",
        )
        engine = postgres.engine_of(location, busy_s, **_JSON)
    lost = BadInput(
        name,
        expected="the database of the jobs in the home",
        got="none",
        hint="rebuild it with: downpour service reindex",
    )
    if filled and isinstance(location, Path) and not location.is_file():
        raise lost
    try:
        present = _revision(engine)
        if present is None and filled:
            raise lost
        if present != REVISION:
            _upgrade(engine, name, present)
    except sa.exc.DBAPIError as error:
        raise BadInput(
            f"{name}: expected the database of the service, got: {first_line(error)}; {mend}"
        ) from None
    if isinstance(location, Path):
        location.chmod(0o600)
    return engine


def first_line(error: sa.exc.DBAPIError) -> str:
    """The complaint of a database in a line, without the statement and its values."""
    lines = str(error.orig).strip().splitlines()
    return lines[0] if lines else type(error.orig).__name__


@contextmanager
def alone(engine: sa.Engine, table: sa.Table) -> Iterator[sa.Connection]:
    """A transaction that no other one writes this table in: what it reads holds until it ends.

    SQLite has one writer at a time in any case, if the transaction begins as one that writes.
    """
    immediate = engine.execution_options(downpour_writes=True)
    with immediate.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(f"LOCK TABLE {table.name} IN SHARE ROW EXCLUSIVE MODE")
        yield connection


def is_database(path: Path) -> bool:
    """Return whether a file is a database that can be read."""
    engine = sa.create_engine(f"sqlite:///{path}")
    try:
        return path.is_file() and _revision(engine) is not None
    except sa.exc.DatabaseError:
        return False
    finally:
        engine.dispose()


def _sqlite(path: Path, busy_s: float, *, new: bool) -> sa.Engine:
    """Connections to a file, which is created only if it may be `new`.

    A connection belongs to the file that it was opened with: if that is deleted or replaced, the
    connection is closed, and the next one fails, or reads the file that is there now. One that was
    opened while the file could only be read could never write: it is closed when the file can be
    written again. Connections of a process share the memory beside the file as the first of them
    opened it, so one that was opened for writing stays as long as the engine.
    """
    if new:
        path.touch(mode=0o600)
    location = f"{path.absolute().as_uri()}?mode=rw"

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(location, timeout=busy_s, uri=True, check_same_thread=False)

    engine = sa.create_engine(f"sqlite:///{path}", creator=connect, **_JSON)
    first = contextlib.ExitStack()
    sa.event.listen(engine, "engine_disposed", lambda _: first.close())

    @sa.event.listens_for(engine, "first_connect")
    def hold(*_: object) -> None:
        connection = first.enter_context(contextlib.closing(connect()))
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("SELECT 1 FROM sqlite_master").fetchall()  # opens that memory

    @sa.event.listens_for(engine, "connect")
    def configure(
        connection: sa.engine.interfaces.DBAPIConnection, entry: ConnectionPoolEntry
    ) -> None:
        entry.info.update(file=_identity(path), writable=os.access(path, os.W_OK))
        connection.isolation_level = None  # `begin` below starts transactions
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
            connection.cursor().execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "checkout")
    def check(_: object, entry: ConnectionPoolEntry, __: object) -> None:
        if _identity(path) != entry.info["file"]:
            raise sa.exc.DisconnectionError(f"{path} was deleted or replaced")
        if not entry.info["writable"] and os.access(path, os.W_OK):
            raise sa.exc.DisconnectionError(f"{path} can be written again")

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        writes = connection.get_execution_options().get("downpour_writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _to_json(value: Any) -> str:
    """Values as JSON; a number that is none, such as a diverged loss, is null."""
    return msgspec.json.encode(value).decode()


_JSON: dict[str, Any] = {"json_serializer": _to_json, "json_deserializer": msgspec.json.decode}


def _revision(engine: sa.Engine) -> str | None:
    """The revision of the schema; None for a new database."""
    with engine.connect() as connection:
        if not sa.inspect(connection).has_table("alembic_version"):
            return None
        revision: str | None = connection.exec_driver_sql(
            "SELECT version_num FROM alembic_version"
        ).scalar()
        return revision


def _upgrade(engine: sa.Engine, name: str, present: str | None) -> None:
    """Run the migrations that the database lacks; raises BadInput if none leads from `present`."""
    from alembic import command  # only where there is something to migrate: it costs half a second
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    try:
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, REVISION)
    except CommandError:
        raise BadInput(
            name,
            expected=f"the schema {REVISION}",
            got=f"the schema {present} of another version of downpour",
            hint="start the version that wrote it, or use another database and fill it with:"
            " downpour service reindex",
        ) from None
