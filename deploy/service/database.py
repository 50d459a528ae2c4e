"""Which database a home uses, whose jobs are in it, and its copies.

The file `home.json` of a home has its PostgreSQL, without a password, so that commands such as
`downpour service token` find the same one, and a random id, by which a database belongs to one
home: a service with the database of other jobs would find them without a process, and start them
again.
"""

import os
import secrets
import sqlite3
from contextlib import suppress
from pathlib import Path

import msgspec
import sqlalchemy as sa

from deploy.runner import job_folder
from deploy.service import database_tables, postgres
from deploy.service.database_tables import BUSY_S, DATABASE, DatabasePlace, open_database
from shards.errors import BadInput, GiveUp

VARIABLE = "DOWNPOUR_DATABASE"
"""Names the database, perhaps with a password. Jobs do not inherit it."""
SQLITE = "sqlite"
HOME = "home.json"
_BATCH = 1000


class HomeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record that a home keeps of itself; `database` is None for SQLite."""

    id: str
    database: str | None = None


def database_of(folder: Path, option: str | None = None) -> DatabasePlace:
    """The database of a home: an option, else the variable, else what the home remembers, else
    SQLite in the home. Raises BadInput."""
    if option is not None:
        location = _parse("--database", option, folder)
        if isinstance(location, sa.URL) and postgres.has_password(location):
            raise BadInput(
                "--database",
                expected=(
                    "a URL without a password, which others could see in the list of processes"
                ),
                got="one with",
                hint=f"set the variable {VARIABLE}, or use ~/.pgpass",
            )
        text = os.environ.get(VARIABLE)
        same = text is not None and _is_same(location, _parse(VARIABLE, text, folder))
        return _parse(VARIABLE, text, folder) if text and same else location
    if text := os.environ.get(VARIABLE):
        return _parse(VARIABLE, text, folder)
    record = job_folder.load(folder / HOME, HomeRecord)
    if record is None or record.database is None:
        return folder / DATABASE
    return _parse(str(folder / HOME), record.database, folder)


def remember(folder: Path, location: DatabasePlace) -> None:
    """Let later commands find this database, without its password."""
    text = None
    if isinstance(location, sa.URL):
        text = postgres.without_password(location).render_as_string(hide_password=False)
    record = _record(folder)
    if record.database != text:
        job_folder.save(folder / HOME, msgspec.structs.replace(record, database=text))


def open_for_home(
    folder: Path, location: DatabasePlace, *, filled: bool = False, busy_s: float = BUSY_S
) -> sa.Engine:
    """Open the database of a home; raises BadInput for one that belongs to another home."""
    engine = open_database(location, filled=filled, busy_s=busy_s)
    home_id, query = _record(folder).id, sa.select(database_tables.home.c.id)
    with engine.connect() as connection:
        owner = connection.execute(query).scalar()
    if owner is None:
        with database_tables.alone(engine, database_tables.home) as connection:
            owner = connection.execute(query).scalar()
            if owner is None:
                connection.execute(sa.insert(database_tables.home).values(id=home_id))
    if owner not in {None, home_id}:
        engine.dispose()
        raise BadInput(
            describe(location),
            expected=f"the database of {folder}",
            got="that of another home",
            hint=(
                "name another database, or, if this home is to have it: downpour service reindex"
            ),
        )
    return engine


def take_over(folder: Path, location: DatabasePlace) -> sa.Engine:
    """Open a database for the jobs of this home, whatever home it belonged to."""
    engine, home_id = open_database(location), _record(folder).id
    with database_tables.alone(engine, database_tables.home) as connection:
        connection.execute(sa.delete(database_tables.home))
        connection.execute(sa.insert(database_tables.home).values(id=home_id))
    return engine


def describe(location: DatabasePlace) -> str:
    """A database for messages, without a password."""
    return str(location) if isinstance(location, Path) else postgres.show_url(location)


def copy_to(location: DatabasePlace, target: Path) -> None:
    """Write a copy of a database to a new file of SQLite, while a service may use it."""
    if isinstance(location, Path) and not location.is_file():
        raise BadInput(location, expected="the database of a service", got="none")
    if target.exists():
        raise BadInput(target, expected="a new file", got="one that exists")
    try:
        target.touch(mode=0o600)
        if isinstance(location, Path):
            with sqlite3.connect(location) as source, sqlite3.connect(target) as copy:
                source.backup(copy)
        else:
            _transfer(open_database(location, filled=True), open_database(target))
    except (OSError, sqlite3.Error, sa.exc.DBAPIError) as error:
        with suppress(OSError):
            target.unlink()
        why = error.strerror if isinstance(error, OSError) else error
        raise GiveUp(f"{target}: {why}") from None
    except BadInput:
        target.unlink(missing_ok=True)
        raise


def restore_from(source: Path, location: DatabasePlace) -> None:
    """Fill a database that holds nothing yet from a copy; raises BadInput for another one."""
    if not database_tables.is_database(source):
        raise BadInput(source, expected="a copy of the service's database", got="none")
    engine = open_database(location)
    with engine.connect() as connection:
        for table in (database_tables.job, database_tables.token, database_tables.audit):
            if connection.execute(sa.select(sa.literal(1)).select_from(table).limit(1)).first():
                raise BadInput(
                    describe(location),
                    expected="a database without rows",
                    got="one with some",
                    hint="create an empty one for the copy",
                )
    _transfer(open_database(source, filled=True), engine)


def _transfer(source: sa.Engine, target: sa.Engine) -> None:
    """Copy all rows of all tables, as they are at one moment."""
    try:
        reading = source.connect()
        if source.dialect.name == "postgresql":
            reading = reading.execution_options(isolation_level="REPEATABLE READ")
        with reading, target.begin() as writing:
            for table in database_tables.metadata.sorted_tables:
                if table is database_tables.home:
                    continue  # the first service that opens the copy enters its own
                for rows in reading.execute(sa.select(table)).mappings().partitions(_BATCH):
                    writing.execute(sa.insert(table), [dict(row) for row in rows])
            if target.dialect.name == "postgresql":
                for table in (database_tables.event, database_tables.audit):
                    last = sa.select(sa.func.max(table.c.id)).scalar_subquery()
                    sequence = sa.func.pg_get_serial_sequence(table.name, "id")
                    writing.execute(sa.select(sa.func.setval(sequence, sa.func.coalesce(last, 1))))
    finally:
        source.dispose()
        target.dispose()


def _parse(label: str, text: str, folder: Path) -> DatabasePlace:
    return folder / DATABASE if text == SQLITE else postgres.parse_url(label, text)


def _is_same(location: DatabasePlace, other: DatabasePlace) -> bool:
    """Return whether two locations differ by a password at most."""
    if isinstance(location, Path) or isinstance(other, Path):
        return location == other
    return postgres.without_password(location) == postgres.without_password(other)


def _record(folder: Path) -> HomeRecord:
    record = job_folder.load(folder / HOME, HomeRecord)
    if record is None:
        record = HomeRecord(id=secrets.token_hex(8))
        job_folder.save(folder / HOME, record)
    return record
