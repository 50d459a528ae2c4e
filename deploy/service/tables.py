"""The service's database: an index of the job folders that can be rebuilt from them.

SQLite in WAL mode. Schema changes are alembic migrations, in the folder migrations. A list of jobs
reads the table `job` alone; series and logs are never in the database.
"""

from pathlib import Path

import sqlalchemy as sa

from shards.errors import BadInput

DATABASE = "service.db"
REVISION = "0003_upkeep"
"""The newest migration."""
_MIGRATIONS = Path(__file__).parent / "migrations"

metadata = sa.MetaData()

job = sa.Table(
    "job",
    metadata,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("project", sa.String, nullable=False),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("labels", sa.JSON, nullable=False),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("slots", sa.Integer, nullable=False),
    sa.Column("settings", sa.JSON, nullable=False),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("state_seq", sa.Integer, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("nonce", sa.String, nullable=False),
    sa.Column("code", sa.String, nullable=False),
    sa.Column("reason", sa.String, nullable=False),
    sa.Column("contact", sa.String, nullable=False),
    sa.Column("cancelled", sa.Boolean, nullable=False),
    sa.Column("fruitless", sa.Integer, nullable=False),
    sa.Column("not_before", sa.Float, nullable=False),
    sa.Column("snapshot", sa.String),
    sa.Column("request_key", sa.String, unique=True),
    sa.Column("events_read", sa.Integer, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("updated", sa.Float, nullable=False),
    sa.Column("head", sa.JSON, nullable=False),
    sa.Column("alerts", sa.JSON, nullable=False),
    sa.Column("pinned", sa.JSON, nullable=False),
)
sa.Index("job_by_state", job.c.state, job.c.id)
sa.Index("job_by_project", job.c.project, job.c.id)

attempt = sa.Table(
    "attempt",
    metadata,
    sa.Column("job", sa.String, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("started", sa.Float, nullable=False),
    sa.Column("ended", sa.Float),
    sa.Column("cause", sa.String, nullable=False),
    sa.Column("message", sa.String, nullable=False),
    sa.Column("exit_status", sa.Integer),
    sa.Column("snapshot", sa.String),
    sa.Column("log_tail", sa.Text, nullable=False),
)

event = sa.Table(
    "event",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("job", sa.String, nullable=False),
    sa.Column("source", sa.String, nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("time", sa.Float, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("data", sa.JSON, nullable=False),
    sa.UniqueConstraint("job", "source", "number"),
    sqlite_autoincrement=True,  # streams and webhooks continue after an id: none is used twice
)
sa.Index("event_by_job", event.c.job, event.c.id)

token = sa.Table(
    "token",
    metadata,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("role", sa.String, nullable=False),
    sa.Column("projects", sa.JSON(none_as_null=True)),
    sa.Column("digest", sa.String, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("expires", sa.Float, nullable=False),
    sa.Column("revoked", sa.Float),
)

session = sa.Table(
    "session",
    metadata,
    sa.Column("digest", sa.String, primary_key=True),
    sa.Column("token", sa.String, nullable=False),
    sa.Column("expires", sa.Float, nullable=False),
)

project = sa.Table(
    "project",
    metadata,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("running", sa.Integer),
    sa.Column("queued", sa.Integer),
    sa.Column("workers", sa.Integer),
)

audit = sa.Table(
    "audit",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("time", sa.Float, nullable=False),
    sa.Column("actor", sa.String, nullable=False),
    sa.Column("token", sa.String, nullable=False),
    sa.Column("action", sa.String, nullable=False),
    sa.Column("job", sa.String, nullable=False),
    sa.Column("project", sa.String, nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
    sa.Column("address", sa.String, nullable=False),
    sa.Column("detail", sa.String, nullable=False),
)
"""Append-only: triggers of the migration refuse to change or delete a row."""

idempotency = sa.Table(
    "idempotency",
    metadata,
    sa.Column("request", sa.String, primary_key=True),
    sa.Column("body", sa.String, nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
    sa.Column("answer", sa.JSON, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
)


webhook = sa.Table(
    "webhook",
    metadata,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("url", sa.String, nullable=False),
    sa.Column("secret", sa.String, nullable=False),
    sa.Column("project", sa.String),
    sa.Column("sent", sa.Integer, nullable=False),
    sa.Column("tries", sa.Integer, nullable=False),
    sa.Column("not_before", sa.Float, nullable=False),
    sa.Column("delivered", sa.Integer, nullable=False),
    sa.Column("given_up", sa.Integer, nullable=False),
    sa.Column("last", sa.String, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
)


def open_database(path: Path) -> sa.Engine:
    """Open the database and bring it to this version's schema; raises BadInput if it is newer."""
    engine = sa.create_engine(f"sqlite:///{path}", connect_args={"timeout": 30})

    @sa.event.listens_for(engine, "connect")
    def configure(connection: sa.engine.interfaces.DBAPIConnection, _: object) -> None:
        connection.isolation_level = None  # `begin` below starts transactions
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
            connection.cursor().execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    try:
        present = _revision(engine)
        if present != REVISION:
            _upgrade(engine, path)
    except sa.exc.DatabaseError as error:
        raise BadInput(
            f"{path}: expected the database of the service, got: {error.orig}; move the file away,"
            " and rebuild it with: downpour service reindex"
        ) from None
    path.chmod(0o600)
    return engine


def is_database(path: Path) -> bool:
    """Whether a file is a database that can be read."""
    engine = sa.create_engine(f"sqlite:///{path}")
    try:
        return path.is_file() and _revision(engine) is not None
    except sa.exc.DatabaseError:
        return False
    finally:
        engine.dispose()


def _revision(engine: sa.Engine) -> str | None:
    """The revision of the schema; None for a new database."""
    with engine.connect() as connection:
        if not sa.inspect(connection).has_table("alembic_version"):
            return None
        found: str | None = connection.exec_driver_sql(
            "SELECT version_num FROM alembic_version"
        ).scalar()
        return found


def _upgrade(engine: sa.Engine, path: Path) -> None:
    """Run the migrations that the database lacks; raises BadInput if it is newer."""
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
            f"{path}: expected a database of this version or an earlier one, got a newer one;"
            " start the version of downpour that wrote it"
        ) from None
