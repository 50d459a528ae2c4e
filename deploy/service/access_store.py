"""Tokens, sessions, the limits of projects, and the audit, in the service's database.

These tables are no index of job folders: `reindex` keeps them, and a backup restores them. Secrets
are stored as digests. The database itself refuses to change or delete an entry of the audit.
"""

import math
import secrets
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from deploy.service import database_tables, tokens
from deploy.service.tokens import Principal, TokenRole
from shards.errors import BadInput

SESSION_S = 7 * 86400.0
LONGEST_TOKEN_S = 366 * 86400.0

T = TypeVar("T")


class TokenRow(msgspec.Struct, frozen=True, kw_only=True):
    """A token without its secret. Times are in seconds since 1970; `projects` None: all."""

    id: str
    name: str
    role: TokenRole
    projects: list[str] | None
    created: float
    expires: float
    revoked: float | None


class ProjectLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a project may use at the same time; None: no limit of its own.

    `running` and `queued` are jobs, paused ones counted as queued; `workers` those of the jobs that
    hold slots. `uploads` are those in progress, `upload_bytes` the size of all that are kept.
    """

    running: int | None = None
    queued: int | None = None
    workers: int | None = None
    uploads: int | None = None
    upload_bytes: int | None = None


def remaining_quota(limit: int | None, used: int | None) -> float:
    """The part of a limit that remains after `used`; without a limit, infinity."""
    return math.inf if limit is None else limit - (used or 0)


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One audited action: `actor` is the name of a token, `status` the answer's."""

    id: int = 0
    time: float
    actor: str
    token: str
    action: str
    job: str
    project: str
    status: int
    address: str
    detail: str = ""


class AccessStore:
    """The records of tokens, projects and the audit. Threads and processes may share it."""

    def __init__(self, engine: sa.Engine, clock: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self._clock = clock

    # Tokens.

    def create_token(
        self, name: str, role: TokenRole, projects: Collection[str] | None, expires_s: float
    ) -> tuple[TokenRow, str]:
        """A new token and its text, which is stored nowhere. Raises BadInput.

        One token at a time has a name, so that a name in the audit means one user.
        """
        if role is TokenRole.ADMINISTRATOR and projects is not None:
            raise BadInput("--project", expected="none for an administrator", got="one")
        if not 0 < expires_s <= LONGEST_TOKEN_S:
            raise BadInput("--expires", expected="at most 366d", got=f"{expires_s / 86400:g}d")
        number, text = tokens.new_token()
        now, table = self._clock(), database_tables.token
        row = TokenRow(
            id=number, name=name, role=role, created=now, expires=now + expires_s, revoked=None,
            projects=sorted(projects) if projects is not None else None,
        )  # fmt: skip
        values = msgspec.to_builtins(row) | {"digest": tokens.digest_of(text)}
        named = sa.select(sa.func.count()).where(table.c.name == name, *_live(now))
        with database_tables.alone(self._engine, table) as connection:
            if connection.execute(named).scalar():
                raise BadInput(
                    "--name",
                    expected="a name that no live token has",
                    got=name,
                    hint=f"revoke the other one with: downpour service token revoke {name}",
                )
            connection.execute(sa.insert(table).values(values))
        return row, text

    def tokens(self) -> list[TokenRow]:
        """Every token, the newest first."""
        table = database_tables.token
        columns = [column for column in table.c if column.name != "digest"]
        query = sa.select(*columns).order_by(table.c.created.desc(), table.c.id)
        with self._engine.connect() as connection:
            return [_as(TokenRow, row) for row in connection.execute(query)]

    def revoke(self, token: str) -> TokenRow:
        """Revoke a live token, by its id or name, and end its sessions; raises BadInput."""
        matches = [
            row for row in self.tokens() if token in {row.id, row.name} and row.revoked is None
        ]
        if not matches:
            raise BadInput("token", expected="the id or name of one", got=token[:80])
        row, table, session = matches[0], database_tables.token, database_tables.session
        with self._engine.begin() as connection:
            revoked = sa.update(table).values(revoked=self._clock()).where(table.c.id == row.id)
            connection.execute(revoked)
            connection.execute(sa.delete(session).where(session.c.token == row.id))
        return row

    def any_token(self) -> bool:
        """Return whether there is a token that is neither revoked nor expired."""
        query = sa.select(database_tables.token.c.id).where(*_live(self._clock())).limit(1)
        with self._engine.connect() as connection:
            return connection.execute(query).first() is not None

    def of_token(self, text: str) -> Principal | None:
        """The sender that this token names; None for a wrong, revoked or expired one."""
        number = tokens.token_id(text)
        if number is None:
            return None
        table = database_tables.token
        query = sa.select(table).where(table.c.id == number, *_live(self._clock()))
        with self._engine.connect() as connection:
            row = connection.execute(query).first()
        if row is None or not tokens.constant_time_equal(tokens.digest_of(text), row.digest):
            return None
        return _principal(row)

    # Sessions of browsers.

    def sign_in(self, principal: Principal) -> str:
        """The secret of a new session of this sender, for a cookie."""
        secret, now, table = secrets.token_urlsafe(32), self._clock(), database_tables.session
        values = {"digest": tokens.digest_of(secret), "token": principal.token}
        with self._engine.begin() as connection:
            connection.execute(sa.delete(table).where(table.c.expires < now))
            connection.execute(sa.insert(table).values(**values, expires=now + SESSION_S))
        return secret

    def of_session(self, secret: str) -> Principal | None:
        """The sender of this session; None if it, or its token, is over."""
        session, token, now = database_tables.session, database_tables.token, self._clock()
        query = (
            sa.select(token)
            .join(session, session.c.token == token.c.id)
            .where(session.c.digest == tokens.digest_of(secret), session.c.expires > now)
            .where(*_live(now))
        )
        with self._engine.connect() as connection:
            row = connection.execute(query).first()
        return _principal(row, secret) if row is not None else None

    def sign_out(self, secret: str) -> None:
        """End a session."""
        table = database_tables.session
        with self._engine.begin() as connection:
            which = table.c.digest == tokens.digest_of(secret)
            connection.execute(sa.delete(table).where(which))

    def is_valid(self, principal: Principal) -> bool:
        """Return whether a sender that was accepted earlier still would be."""
        if principal.session:
            return self.of_session(principal.session) is not None
        if not principal.token:
            return True
        which = database_tables.token.c.id == principal.token
        query = sa.select(database_tables.token.c.id).where(which, *_live(self._clock()))
        with self._engine.connect() as connection:
            return connection.execute(query).first() is not None

    # Projects.

    def limits(self) -> dict[str, ProjectLimits]:
        """The limits of each project that has some."""
        query = sa.select(database_tables.project).order_by(database_tables.project.c.name)
        with self._engine.connect() as connection:
            return {row.name: _as(ProjectLimits, row) for row in connection.execute(query)}

    def set_limits(self, project: str, limits: ProjectLimits) -> None:
        """Replace the limits of a project."""
        table, values = database_tables.project, msgspec.to_builtins(limits)
        with database_tables.alone(self._engine, table) as connection:
            connection.execute(sa.delete(table).where(table.c.name == project))
            connection.execute(sa.insert(table).values(name=project, **values))

    # The audit.

    def record(self, entry: AuditEntry) -> None:
        """Append an entry; its id is assigned here."""
        values = msgspec.to_builtins(entry)
        del values["id"]
        with self._engine.begin() as connection:
            connection.execute(sa.insert(database_tables.audit).values(values))

    def record_command(self, user: str, action: str, detail: str) -> None:
        """Append an action of the command line on this machine."""
        entry = AuditEntry(
            time=self._clock(),
            actor=f"{user} (command line)",
            token="",
            action=action,
            job="",
            project="",
            status=200,
            address="",
            detail=detail,
        )
        self.record(entry)

    def audit(
        self,
        limit: int,
        before: int | None = None,
        actor: str | None = None,
        job: str | None = None,
    ) -> list[AuditEntry]:
        """Entries with an id below `before`, the newest first; of one actor or job if given."""
        table = database_tables.audit
        query = sa.select(table).order_by(table.c.id.desc()).limit(limit)
        for column, value in ((table.c.actor, actor), (table.c.job, job)):
            if value is not None:
                query = query.where(column == value)
        if before is not None:
            query = query.where(table.c.id < before)
        with self._engine.connect() as connection:
            return [_as(AuditEntry, row) for row in connection.execute(query)]


def _live(now: float) -> tuple[sa.ColumnElement[bool], ...]:
    return (database_tables.token.c.revoked.is_(None), database_tables.token.c.expires > now)


def _principal(row: sa.Row[Any], session: str = "") -> Principal:
    projects = frozenset(row.projects) if row.projects is not None else None
    return Principal(
        name=row.name, role=TokenRole(row.role), projects=projects, token=row.id, session=session
    )


def _as(kind: type[T], row: sa.Row[Any]) -> T:
    # SQLAlchemy's names are of a subclass of str, which msgspec refuses.
    return msgspec.convert({str(name): value for name, value in row._mapping.items()}, kind)
