"""Jobs: their folders, which are the truth, and their rows, which are an index.

Every change of a job is one entry in its journal `orders.jsonl`, on disk before the database learns
of it. The entry's data are the columns that change, so that a row is the sum of its entries: after
a crash between the two writes, and after the loss of the database, `catch_up` and `rebuild` replay
the journal. If the database fails for a while, as one that another process has locked, `settle`
does so before the job changes again. A transition compares (attempt, state_seq) with what its
caller has seen. Changes are made one at a time, so ids of events grow in the order of commits:
streams and webhooks, which continue after an id, miss none.
"""

import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from deploy.run.folder import write_whole
from deploy.run.settings import TrainSettings
from deploy.runner import job_folder
from deploy.runner.job_folder import Submission
from deploy.runner.journal import Entry, Journal, JournalEnd, JournalReader
from deploy.service import database_tables
from deploy.service.access_store import ProjectLimits
from deploy.service.job_rows import JobFilter, JobRow, Page, in_projects, row_of
from deploy.service.states import ATTEMPTED, HOLDING, TERMINAL, TRANSITIONS, JobState, QueuedJob
from ps.snapshots import checked_json
from shards.errors import DownpourError, GiveUp

JOBS = "jobs"
MAX_HEADS = 200
_TIME_DIGITS = 11  # of an id, in milliseconds
CAUSE = "event"  # in an entry of a transition: the number of the runner's event that caused it
_END = "attempt_end"  # the columns of `attempt` in an entry that ends one
_SERVICE, _RUNNER = "service", "runner"
_HIDDEN = {_END, "nonce", "not_before", "state_seq", "fruitless", "cancelled", "settings"}


class StateChanged(GiveUp):
    """The job is in another state than the caller has seen; `state` is the present one.

    `expected` names the states in which the request applies, None where others are no remedy.
    """

    def __init__(self, text: str, state: JobState, expected: str | None = None) -> None:
        super().__init__(text)
        self.state = state
        self.expected = expected


_LISTED = [column for column in database_tables.job.c if column.name != "settings"]
_SUBMITTED = ("id", "name", "project", "owner", "labels", "priority", "request_key", "created")


class JobStore:
    """All jobs of one home. Threads may share it; `changed` is called after each change."""

    def __init__(
        self,
        home: Path,
        engine: sa.Engine,
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._jobs = home / JOBS
        self._jobs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._engine = engine
        self._changed = changed
        self._clock = clock
        self._last_id_ms = 0
        self._lock = threading.RLock()
        self.version = 0
        """Differs after each transition and order, and not after new figures."""
        self._behind: set[str] = set()  # jobs whose journals have what the database may lack
        # Where the journals of unfinished jobs end, and how far the database follows them: without
        # these, each order would read all orders before it.
        self._ends: dict[str, JournalEnd] = {}
        self._followed: dict[str, JournalReader] = {}

    def folder(self, job: str) -> Path:
        """The folder of a job; `job` is an id that this store has given out."""
        return self._jobs / job

    def new_id(self) -> str:
        """An id. Ids sort in the order in which they are given out, whatever the clock does."""
        with self._lock:
            if not self._last_id_ms:
                with self._engine.connect() as connection:
                    last = connection.execute(
                        sa.select(sa.func.max(database_tables.job.c.id))
                    ).scalar()
                self._last_id_ms = int(last[:_TIME_DIGITS], 16) if last else 0
            self._last_id_ms = max(int(self._clock() * 1000), self._last_id_ms + 1)
            return f"{self._last_id_ms:0{_TIME_DIGITS}x}{secrets.token_hex(3)}"

    def create(self, submission: Submission, settings: TrainSettings, **columns: Any) -> JobRow:
        """Store a new job. When this returns, the job survives the loss of this process.

        `columns` of its row differ from those of a job that waits in the queue.
        """
        folder = self.folder(submission.id)
        with self._lock:
            try:
                folder.mkdir(mode=0o700)
                for name in (job_folder.LOGS, job_folder.READINGS):
                    (folder / name).mkdir(mode=0o700)
                content = checked_json.encode(settings.plain())
                write_whole(folder / job_folder.SETTINGS, content, private=True)
                job_folder.save(folder / job_folder.JOB, submission)
                self._append(submission.id, 0, "submitted", {"state": JobState.QUEUED, **columns})
            except (DownpourError, OSError):
                shutil.rmtree(folder, ignore_errors=True)  # or the next start would find the job
                raise
            self._settle(submission.id)
        self._changed()
        return self.get(submission.id)

    # Reading.

    def get(self, job: str) -> JobRow:
        """The row of a job; raises KeyError for an unknown id."""
        with self._engine.connect() as connection:
            row = connection.execute(
                sa.select(database_tables.job).where(database_tables.job.c.id == job)
            ).first()
        if row is None:
            raise KeyError(job)
        return row_of(row)

    def standing(self, job: str) -> tuple[str, str]:
        """The project and the owner of a job; raises KeyError for an unknown id."""
        table = database_tables.job
        query = sa.select(table.c.project, table.c.owner).where(table.c.id == job)
        with self._engine.connect() as connection:
            row = connection.execute(query).first()
        if row is None:
            raise KeyError(job)
        return row.project, row.owner

    def with_key(self, key: str) -> JobRow | None:
        """The job that was submitted with this idempotency key; None if there is none."""
        self.settle()
        with self._engine.connect() as connection:
            row = connection.execute(
                sa.select(database_tables.job).where(database_tables.job.c.request_key == key)
            ).first()
        return row_of(row) if row is not None else None

    def with_run(self, run: Path) -> str | None:
        """The id of the job with this run folder; None if there is none."""
        out = database_tables.job.c.settings["out"].as_string()
        with self._engine.connect() as connection:
            job: str | None = connection.execute(
                sa.select(database_tables.job.c.id).where(out == str(run)).limit(1)
            ).scalar()
        return job

    def writer_to(self, run: Path) -> str | None:
        """The id of an unfinished job with this run folder; None if there is none."""
        table = database_tables.job
        query = sa.select(table.c.id).where(
            table.c.state.not_in(list(TERMINAL)), table.c.settings["out"].as_string() == str(run)
        )
        with self._engine.connect() as connection:
            job: str | None = connection.execute(query.limit(1)).scalar()
        return job

    def page(self, criteria: JobFilter, limit: int, cursor: str | None = None) -> Page:
        """Jobs in reverse order of submission, `limit` at most, after `cursor`."""
        table = database_tables.job
        query = sa.select(*_LISTED).order_by(table.c.id.desc()).limit(limit + 1)
        query = query.where(in_projects(criteria.projects))
        if criteria.state:
            query = query.where(table.c.state.in_(criteria.state))
        if criteria.project is not None:
            query = query.where(table.c.project == criteria.project)
        if criteria.q:
            query = query.where(table.c.name.icontains(criteria.q, autoescape=True))
        if criteria.label is not None:
            name, separator, value = criteria.label.partition("=")
            label = table.c.labels[name].as_string()
            query = query.where(label == value if separator else label.is_not(None))
        if cursor is not None:
            query = query.where(table.c.id < cursor)
        with self._engine.connect() as connection:
            rows = [row_of(row) for row in connection.execute(query)]
        more = len(rows) > limit
        return Page(rows[:limit], rows[limit - 1].id if more else None)

    def list_unfinished(self) -> list[JobRow]:
        """Every job that is not in a terminal state, the oldest first."""
        table = database_tables.job
        query = sa.select(table).where(table.c.state.not_in(list(TERMINAL))).order_by(table.c.id)
        with self._engine.connect() as connection:
            return [row_of(row) for row in connection.execute(query)]

    def active(self) -> list[str]:
        """The ids of the jobs that evidence or time can advance, the oldest first."""
        table = database_tables.job
        states = [*ATTEMPTED, JobState.RECOVERING]
        query = sa.select(table.c.id).where(table.c.state.in_(states)).order_by(table.c.id)
        with self._engine.connect() as connection:
            return list(connection.execute(query).scalars())

    def list_queued(self) -> list[QueuedJob]:
        """The jobs that wait for slots, the oldest first."""
        table = database_tables.job
        columns = (table.c.id, table.c.slots, table.c.priority, table.c.project)
        query = sa.select(*columns).where(table.c.state == JobState.QUEUED).order_by(table.c.id)
        with self._engine.connect() as connection:
            return [QueuedJob(*row) for row in connection.execute(query)]

    def heads(
        self, jobs: Sequence[str] = (), projects: Collection[str] | None = None
    ) -> list[JobRow]:
        """Rows with the newest figures: of these jobs, or of those that are unfinished.

        At most `MAX_HEADS`, those that hold their slots first: only they have new figures.
        """
        table = database_tables.job
        which = table.c.id.in_(jobs) if jobs else table.c.state.not_in(list(TERMINAL))
        holding = sa.case((table.c.state.in_(list(HOLDING)), 0), else_=1)
        query = (
            sa.select(*_LISTED).where(which, in_projects(projects)).order_by(holding, table.c.id)
        )
        query = query.limit(MAX_HEADS)
        with self._engine.connect() as connection:
            rows = connection.execute(query)
            return [row_of(row) for row in rows]

    def counts(self) -> dict[JobState, int]:
        """The number of jobs in each state."""
        table = database_tables.job
        query = sa.select(table.c.state, sa.func.count()).group_by(table.c.state)
        with self._engine.connect() as connection:
            counts = {JobState(state): count for state, count in connection.execute(query)}
        return {state: counts.get(state, 0) for state in JobState}

    def slots_held(self) -> int:
        """The slots of all jobs that hold theirs."""
        table = database_tables.job
        query = sa.select(sa.func.sum(table.c.slots)).where(table.c.state.in_(list(HOLDING)))
        with self._engine.connect() as connection:
            return connection.execute(query).scalar() or 0

    def usage(self, project: str) -> ProjectLimits:
        """The present use of a project, in the terms of its limits."""
        table = database_tables.job
        columns = (table.c.state, sa.func.count(), sa.func.sum(table.c.slots))
        query = sa.select(*columns).where(table.c.project == project).group_by(table.c.state)
        with self._engine.connect() as connection:
            rows = [
                (JobState(state), jobs, slots) for state, jobs, slots in connection.execute(query)
            ]
        holding = [(jobs, slots) for state, jobs, slots in rows if state in HOLDING]
        return ProjectLimits(
            running=sum(jobs for jobs, _ in holding),
            queued=sum(jobs for state, jobs, _ in rows if state not in HOLDING | TERMINAL),
            workers=sum(slots for _, slots in holding),
        )

    def attempts(self, job: str) -> list[dict[str, Any]]:
        """The attempts of a job in order."""
        table = database_tables.attempt
        query = sa.select(table).where(table.c.job == job).order_by(table.c.number)
        with self._engine.connect() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]

    def events(
        self,
        jobs: Sequence[str] = (),
        after: int = 0,
        limit: int = 200,
        projects: Collection[str] | None = None,
    ) -> list[dict[str, Any]]:
        """Events with an id above `after`, in order; of all jobs if none is named."""
        return self._events(jobs, after, limit, projects, database_tables.event.c.id)

    def newest_events(self, job: str, limit: int) -> list[dict[str, Any]]:
        """The last events of a job, in order."""
        return self._events([job], 0, limit, None, database_tables.event.c.id.desc())[::-1]

    def _events(
        self,
        jobs: Sequence[str],
        after: int,
        limit: int,
        projects: Collection[str] | None,
        order: sa.ColumnElement[Any],
    ) -> list[dict[str, Any]]:
        table = database_tables.event
        query = sa.select(table).where(table.c.id > after).order_by(order).limit(limit)
        if projects is not None:
            query = query.where(
                table.c.job.in_(sa.select(database_tables.job.c.id).where(in_projects(projects)))
            )
        if jobs:
            query = query.where(table.c.job.in_(jobs))
        with self._engine.connect() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]

    def last_event(self) -> int:
        """The id of the newest event; 0 if there is none."""
        with self._engine.connect() as connection:
            return (
                connection.execute(sa.select(sa.func.max(database_tables.event.c.id))).scalar() or 0
            )

    # Changing.

    def move(self, seen: JobRow, to: JobState, *, kind: str = "state", **changes: Any) -> JobRow:
        """Make a transition; `kind` is that of the journal's entry, `changes` are other columns.

        Raises StateChanged if the job is no longer as `seen`, or if there is no such transition.
        """
        with self._lock:
            if seen.id in self._behind:
                self._settle(seen.id)
            present = self.get(seen.id)
            same = (present.attempt, present.state_seq) == (seen.attempt, seen.state_seq)
            if not same or to not in TRANSITIONS[present.state]:
                raise StateChanged(f"job {seen.id} is {present.state}", present.state)
            data = {"state": to, "state_seq": present.state_seq + 1, **changes}
            self._record(seen.id, changes.get("attempt", present.attempt), kind, data)
            if to in TERMINAL:
                self._forget_journal(seen.id)
        self._changed()
        return self.get(seen.id)

    def note(self, seen: JobRow, kind: str, **data: Any) -> Entry:
        """Record an order or a remark that changes no state."""
        with self._lock:
            entry = self._record(seen.id, seen.attempt, kind, data)
        self._changed()
        return entry

    def write_settings(self, row: JobRow) -> None:
        """Bring `settings.json` up to the row, which a user may have changed since."""
        path = self.folder(row.id) / job_folder.SETTINGS
        content = checked_json.encode(row.settings)
        if TrainSettings.load(path).plain() != row.settings:
            write_whole(path, content, private=True)

    def ingest(self, seen: JobRow, entries: Iterable[Entry]) -> None:
        """Add a runner's events; those that are already there are left out."""
        entries = [entry for entry in entries if entry.number > seen.events_read]
        if not entries:
            return
        with self._lock, self._engine.begin() as connection:
            rows = [_event_values(seen.id, _RUNNER, entry) for entry in entries]
            connection.execute(sa.insert(database_tables.event), rows)
            _update(connection, seen.id, {"events_read": entries[-1].number})
        self._changed()

    def show(self, job: str, **figures: Any) -> None:
        """Set `head` or `contact`, which are no part of the journal: the next reading has them."""
        with self._lock, self._engine.begin() as connection:
            _update(connection, job, figures)
        self._changed()

    def remove(self, seen: JobRow) -> None:
        """Forget a job in a terminal state; its folder is deleted by the caller first."""
        with self._lock, self._engine.begin() as connection:
            for table, column in (
                (database_tables.job, database_tables.job.c.id),
                (database_tables.attempt, database_tables.attempt.c.job),
                (database_tables.event, database_tables.event.c.job),
            ):
                connection.execute(sa.delete(table).where(column == seen.id))
            self._forget_journal(seen.id)
            self.version += 1
        self._changed()

    # Idempotency keys.

    def earlier_answer(self, key: str) -> tuple[str, int, dict[str, Any]] | None:
        """The digest of the body, the status and the answer of an earlier request; None if new."""
        table = database_tables.idempotency
        with self._engine.connect() as connection:
            row = connection.execute(sa.select(table).where(table.c.request == key)).first()
        return (row.body, row.status, row.answer) if row is not None else None

    def answer(self, key: str, body: str, status: int, answer: Mapping[str, Any]) -> None:
        """Keep the answer to a request with this key for 48 hours."""
        table, now = database_tables.idempotency, self._clock()
        with self._lock, self._engine.begin() as connection:
            connection.execute(sa.delete(table).where(table.c.created < now - 48 * 3600))
            values = {"request": key, "body": body, "status": status, "created": now}
            connection.execute(sa.insert(table).values(answer=dict(answer), **values))

    # After a crash, and after the loss of the database.

    def settle(self) -> None:
        """Bring the database up to the journals that it could not follow, if there are any."""
        with self._lock:
            for job in sorted(self._behind):
                self._settle(job)

    def _settle(self, job: str) -> None:
        self._behind.add(job)
        try:
            self.get(job)
        except KeyError:
            self._index(self.folder(job))
        else:
            self._replay(job)
        self._behind.discard(job)

    def catch_up(self) -> int:
        """Bring the database up to the journals of unfinished jobs and of folders without a row.

        Returns the number of jobs that had entries, or a row, missing.
        """
        with self._engine.connect() as connection:
            known = set(connection.execute(sa.select(database_tables.job.c.id)).scalars())
        mended = 0
        with self._lock:
            for folder in self._folders():
                if folder.name not in known:
                    mended += self._index(folder)
            for row in self.list_unfinished():
                mended += self._replay(row.id)
        return mended

    def rebuild(self) -> int:
        """Index every job folder; returns the number of jobs. What is no index stays."""
        with self._lock:
            with self._engine.begin() as connection:
                for table in (
                    database_tables.job,
                    database_tables.attempt,
                    database_tables.event,
                    database_tables.idempotency,
                ):
                    connection.execute(sa.delete(table))
            count = sum(self._index(folder) for folder in self._folders())
            newest = self.last_event()  # no webhook gets the past again, under new ids
            with self._engine.begin() as connection:
                connection.execute(sa.update(database_tables.webhook).values(sent=newest))
        return count

    def _folders(self) -> list[Path]:
        return sorted(path for path in self._jobs.iterdir() if (path / job_folder.JOB).is_file())

    def _index(self, folder: Path) -> bool:
        """Add the row of a folder, from its files; False if they cannot be read."""
        try:
            submission = job_folder.load(folder / job_folder.JOB, Submission)
            settings = job_folder.load_settings(folder)
        except DownpourError:
            return False
        if submission is None or submission.id != folder.name:
            return False
        values = {
            **{name: getattr(submission, name) for name in _SUBMITTED},
            "slots": settings.workers,
            "settings": settings.plain(),
            "updated": submission.created,
        }
        with self._engine.begin() as connection:
            connection.execute(sa.insert(database_tables.job).values(values))
        self.version += 1
        orders = JournalReader(folder / job_folder.ORDERS).read()
        events = JournalReader(folder / job_folder.EVENTS).read()
        states = [entry.data["state"] for entry in orders if "state" in entry.data]
        if states and states[-1] in ATTEMPTED:
            # Later ones may still change the state: the supervisor follows.
            last = max(entry.data.get(CAUSE, 0) for entry in orders)
            events = [entry for entry in events if entry.number <= last]
        for source, entries in groupby(_in_turn(orders, events), key=itemgetter(0)):
            if source == _RUNNER:
                self.ingest(self.get(folder.name), [entry for _, entry in entries])
                continue
            for _, entry in entries:
                self._apply(folder.name, entry)
        return True

    def _replay(self, job: str) -> bool:
        """Apply the journal's entries that the database lacks; returns whether there were any."""
        table = database_tables.event
        query = sa.select(sa.func.max(table.c.number)).where(
            table.c.job == job, table.c.source == _SERVICE
        )
        with self._engine.connect() as connection:
            last = connection.execute(query).scalar() or 0
        reader = self._followed.get(job)
        if reader is None or reader.after != last:  # the database did not take all that was read
            reader = JournalReader(self.folder(job) / job_folder.ORDERS, after=last)
            self._followed[job] = reader
        entries = reader.read()
        for entry in entries:
            self._apply(job, entry)
        return bool(entries)

    def _record(self, job: str, attempt: int, kind: str, data: dict[str, Any]) -> Entry:
        entry = self._append(job, attempt, kind, data)
        self._settle(job)
        return entry

    def _append(self, job: str, attempt: int, kind: str, data: dict[str, Any]) -> Entry:
        path = self.folder(job) / job_folder.ORDERS
        with Journal(path, self._ends.get(job)) as journal:
            entry = journal.append(kind, attempt, **data)
            self._ends[job] = journal.end
            return entry

    def _forget_journal(self, job: str) -> None:
        self._ends.pop(job, None)
        self._followed.pop(job, None)

    def _apply(self, job: str, entry: Entry) -> None:
        """Apply one entry of a journal to the database, in one transaction."""
        columns = {
            name: value for name, value in entry.data.items() if name in database_tables.job.c
        }
        with self._engine.begin() as connection:
            if entry.kind == "start":
                values = {"job": job, "number": entry.attempt, "started": entry.time}
                connection.execute(sa.insert(database_tables.attempt).values(values))
            if (end := entry.data.get(_END)) is not None:
                table = database_tables.attempt
                which = (table.c.job == job, table.c.number == entry.attempt)
                connection.execute(sa.update(table).where(*which).values(**end))
            shown = {name: value for name, value in entry.data.items() if name not in _HIDDEN}
            _add_event(connection, job, _SERVICE, msgspec.structs.replace(entry, data=shown))
            _update(connection, job, {**columns, "updated": entry.time})
        self.version += 1


def _in_turn(orders: Iterable[Entry], events: Iterable[Entry]) -> Iterator[tuple[str, Entry]]:
    """The entries of both journals by time, each with its source; each journal stays in order."""
    return merge(
        ((_SERVICE, entry) for entry in orders),
        ((_RUNNER, entry) for entry in events),
        key=lambda sourced: sourced[1].time,
    )


def _update(connection: sa.Connection, job: str, values: Mapping[str, Any]) -> None:
    connection.execute(
        sa.update(database_tables.job).where(database_tables.job.c.id == job).values(**values)
    )


def _add_event(connection: sa.Connection, job: str, source: str, entry: Entry) -> None:
    connection.execute(sa.insert(database_tables.event), [_event_values(job, source, entry)])


def _event_values(job: str, source: str, entry: Entry) -> dict[str, Any]:
    return {"job": job, "source": source, **msgspec.to_builtins(entry)}
