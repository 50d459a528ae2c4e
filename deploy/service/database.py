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
    """What a home knows about itself; `database` is None for SQLite."""

    id: str
    database: str | None = None


def database_of(folder: Path, option: str | None = None) -> DatabasePlace:
    """The database of a home: an option, else the variable, else what the home remembers, else
    SQLite in the home. Raises BadInput."""
    if option is not None:
        place = _parsed("--database", option, folder)
        if isinstance(place, sa.URL) and postgres.has_password(place):
            raise BadInput(
                "--database",
                expected=(
                    "a URL without a password, which others could see in the list of processes"
                ),
                got="one with",
                hint=f"set the variable {VARIABLE}, or use ~/.pgpass",
            )
        given = os.environ.get(VARIABLE)
        same = given is not None and _same(place, _parsed(VARIABLE, given, folder))
        return _parsed(VARIABLE, given, folder) if given and same else place
    if given := os.environ.get(VARIABLE):
        return _parsed(VARIABLE, given, folder)
    record = job_folder.load(folder / HOME, HomeRecord)
    if record is None or record.database is None:
        return folder / DATABASE
    return _parsed(str(folder / HOME), record.database, folder)


def remember(folder: Path, place: DatabasePlace) -> None:
    """Let later commands find this database, without its password."""
    text = None
    if isinstance(place, sa.URL):
        text = postgres.without_password(place).render_as_string(hide_password=False)
    record = _record(folder)
    if record.database != text:
        job_folder.save(folder / HOME, msgspec.structs.replace(record, database=text))


def opened(
    folder: Path, place: DatabasePlace, *, filled: bool = False, busy_s: float = BUSY_S
) -> sa.Engine:
    """Open the database of a home; raises BadInput for one that belongs to another home."""
    engine = open_database(place, filled=filled, busy_s=busy_s)
    own, query = _record(folder).id, sa.select(database_tables.home.c.id)
    with engine.connect() as connection:
        found = connection.execute(query).scalar()
    if found is None:
        with database_tables.alone(engine, database_tables.home) as connection:
            found = connection.execute(query).scalar()
            if found is None:
                connection.execute(sa.insert(database_tables.home).values(id=own))
    if found not in {None, own}:
        engine.dispose()
        raise BadInput(
            named(place),
            expected=f"the database of {folder}",
            got="that of another home",
            hint=(
                "name another database, or, if this home is to have it: downpour service reindex"
            ),
        )
    return engine


def taken_over(folder: Path, place: DatabasePlace) -> sa.Engine:
    """Open a database for the jobs of this home, whatever home it belonged to."""
    engine, own = open_database(place), _record(folder).id
    with database_tables.alone(engine, database_tables.home) as connection:
        connection.execute(sa.delete(database_tables.home))
        connection.execute(sa.insert(database_tables.home).values(id=own))
    return engine


def named(place: DatabasePlace) -> str:
    """A database for messages, without a password."""
    return str(place) if isinstance(place, Path) else postgres.shown(place)


def copy_to(place: DatabasePlace, target: Path) -> None:
    """Write a copy of a database to a new file of SQLite, while a service may use it."""
    if isinstance(place, Path) and not place.is_file():
        raise BadInput(place, expected="the database of a service", got="none")
    if target.exists():
        raise BadInput(target, expected="a new file", got="one that exists")
    try:
        target.touch(mode=0o600)
        if isinstance(place, Path):
            with sqlite3.connect(place) as source, sqlite3.connect(target) as copy:
                source.backup(copy)
        else:
            _transfer(open_database(place, filled=True), open_database(target))
    except (OSError, sqlite3.Error, sa.exc.DBAPIError) as error:
        with suppress(OSError):
            target.unlink()
        why = error.strerror if isinstance(error, OSError) else error
        raise GiveUp(f"{target}: {why}") from None
    except BadInput:
        target.unlink(missing_ok=True)
        raise


def restore_from(source: Path, place: DatabasePlace) -> None:
    """Fill a database that holds nothing yet from a copy; raises BadInput for another one."""
    if not database_tables.is_database(source):
        raise BadInput(source, expected="a copy of the service's database", got="none")
    engine = open_database(place)
    with engine.connect() as connection:
        for table in (database_tables.job, database_tables.token, database_tables.audit):
            if connection.execute(sa.select(sa.literal(1)).select_from(table).limit(1)).first():
                raise BadInput(
                    named(place),
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


def _parsed(what: str, text: str, folder: Path) -> DatabasePlace:
    return folder / DATABASE if text == SQLITE else postgres.parse_url(what, text)


def _same(one: DatabasePlace, other: DatabasePlace) -> bool:
    """Whether two places differ by a password at most."""
    if isinstance(one, Path) or isinstance(other, Path):
        return one == other
    return postgres.without_password(one) == postgres.without_password(other)


def _record(folder: Path) -> HomeRecord:
    record = job_folder.load(folder / HOME, HomeRecord)
    if record is None:
        record = HomeRecord(id=secrets.token_hex(8))
        job_folder.save(folder / HOME, record)
    return record
