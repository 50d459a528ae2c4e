"""PostgreSQL as the service's database: its URL, its connections, and one service at a time.

The service has one writer, as with SQLite: its home is locked, and `hold_database` locks the
database, because two homes could name the same one. So a transition's compare-and-set needs no
stronger isolation than READ COMMITTED: its journal's entry has a number that is unique in the table
`event`.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from shards.errors import BadInput
from shards.extras import missing

_SCHEMES = {"postgresql", "postgresql+psycopg"}
_SECRETS = {"password", "sslpassword"}
_EXAMPLE = "postgresql://downpour@db.example/downpour"
# A lock that another process holds is waited for as long as SQLite's is. Without keepalives a
# connection to a machine that is gone would hold up its thread for hours. A database of the
# encoding SQL_ASCII, as initdb makes them under the locale C, would answer with bytes.
_OPTIONS = {
    "client_encoding": "utf8",
    "connect_timeout": "10",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}


def parse_url(label: str, text: str) -> sa.URL:
    """The URL of a database; raises BadInput, which never repeats the text: it may hold a key."""
    try:
        url = sa.make_url(text)
        scheme = url.drivername
    except (sa.exc.ArgumentError, ValueError):
        raise BadInput(
            label,
            expected=f"a URL such as {_EXAMPLE}",
            got="one that cannot be read",
            hint="characters such as @ : / in a password are written as %40 %3A %2F",
        ) from None
    if scheme not in _SCHEMES:
        raise BadInput(label, expected=f"a URL such as {_EXAMPLE}", got=f"{scheme[:40]}://")
    if not url.database:
        raise BadInput(label, expected=f"the name of a database, as in {_EXAMPLE}", got="none")
    return url.set(drivername="postgresql+psycopg")


def without_password(url: sa.URL) -> sa.URL:
    """The URL as it may be shown and stored."""
    public = sa.URL.create(
        "postgresql", url.username, None, url.host, url.port, url.database, url.query
    )
    return public.difference_update_query(_SECRETS)


def show_url(url: sa.URL) -> str:
    """The URL for messages: without a password, and without the options of its query."""
    bare = without_password(url).set(query={})
    return bare.render_as_string(hide_password=True)


def has_password(url: sa.URL) -> bool:
    """Return whether a URL holds what must not be on a command line."""
    return url.password is not None or bool(_SECRETS & set(url.query))


def engine_of(url: sa.URL, lock_s: float, **options: Any) -> sa.Engine:
    """Connections to a database, with more options of the engine.

    They outlast a restart of its server.
    """
    try:
        import psycopg  # noqa: F401
    except ModuleNotFoundError:
        raise missing("PostgreSQL", "psycopg", "postgres") from None
    arguments = {"options": f"-c lock_timeout={int(lock_s * 1000)}", **_OPTIONS}
    arguments = {name: value for name, value in arguments.items() if name not in url.query}
    return sa.create_engine(
        url, connect_args=arguments, pool_pre_ping=True, hide_parameters=True, **options
    )


@contextmanager
def hold_database(engine: sa.Engine, url: sa.URL) -> Iterator[None]:
    """Keep other services from this database and schema until the end of the context."""
    with engine.connect() as connection:
        connection = connection.execution_options(isolation_level="AUTOCOMMIT")
        schema = connection.execute(sa.select(sa.func.current_schema())).scalar()
        digest = hashlib.sha256(f"downpour service {schema}".encode()).digest()
        key = int.from_bytes(digest[:8], "big", signed=True)
        if not connection.execute(sa.select(sa.func.pg_try_advisory_lock(key))).scalar():
            raise BadInput(
                show_url(url),
                expected="no other service with this database",
                got="one",
                hint="stop it, or name another database",
            )
        yield
