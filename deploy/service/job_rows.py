"""The rows of the table `job` as values: what users see of a job, its details, all of it."""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from deploy.service import database_tables
from deploy.service.states import JobState, QueuePosition


class JobShown(msgspec.Struct, frozen=True, kw_only=True):
    """A job as users see it.

    `slots` are its workers. `state_seq` grows with each transition; `code` and `reason` say why the
    state is what it is. `contact` is empty unless the job's process is not heard from. `head` has
    the newest figures, and a line of losses. `pinned` are the snapshots that are never deleted.
    Times are in seconds since 1970.
    """

    id: str
    name: str
    project: str
    owner: str
    labels: dict[str, str]
    priority: int
    slots: int
    state: JobState
    state_seq: int
    attempt: int
    code: str
    reason: str
    contact: str
    snapshot: str | None
    created: float
    updated: float
    head: dict[str, Any]
    alerts: list[str] = []
    pinned: list[str] = []


class JobDetails(JobShown, frozen=True, kw_only=True):
    """A job with `settings`, the options of `downpour train`, and why a queued job waits."""

    settings: dict[str, Any] = {}
    waiting: QueuePosition | None = None


class JobRow(JobDetails, frozen=True, kw_only=True):
    """A row of the table `job`."""

    nonce: str
    cancelled: bool
    fruitless: int
    not_before: float
    request_key: str | None
    events_read: int


class Page(msgspec.Struct, frozen=True):
    """One page of a list of jobs; `cursor` continues it, None at the end."""

    jobs: list[JobRow]
    cursor: str | None


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs to list: all conditions hold. `label` is NAME or NAME=VALUE.

    `projects` are those that the user may see; None: all.
    """

    state: Sequence[str] = ()
    projects: Collection[str] | None = None
    project: str | None = None
    label: str | None = None
    q: str | None = None


def in_projects(projects: Collection[str] | None) -> sa.ColumnElement[bool]:
    """That a job is in one of these projects; None: in any."""
    return database_tables.job.c.project.in_(projects) if projects is not None else sa.true()


def row_of(row: sa.Row[Any]) -> JobRow:
    """The job in a row of the database."""
    # SQLAlchemy's names are of a subclass of str, which msgspec refuses.
    return msgspec.convert({str(name): value for name, value in row._mapping.items()}, JobRow)
