"""Server-sent events: transitions and other events with ids, and the newest reading of each job.

A stream keeps only the id of the last event that it has sent. What follows comes from a short
memory that all streams share, or from the database. So a slow viewer needs no memory of its own: it
misses readings, of which only the newest counts, and no event. A client that reconnects sends the
last id, and nothing is lost or repeated.
"""

import asyncio
import threading
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from deploy.runner.job_folder import READINGS
from deploy.runner.readings import read_newest
from deploy.service.job_rows import JobRow
from deploy.service.job_store import JobStore
from deploy.service.states import TERMINAL

BATCH = 256
_BEAT_S = 15.0
_PAUSE_S = 0.2  # events of one moment go out together
_READ, _KEPT_BYTES, _MAX_READINGS = 1000, 2 << 20, 500


class Feed:
    """Wakes the streams when something has changed, and ends them when the service stops."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._recent: RecentMessages | None = None
        self._lock = threading.Lock()
        self.version = 0
        """Differs after each change."""
        self.notice = ""
        """Why no job is started at present, for all viewers; empty if jobs are started."""
        self.clients = 0
        self.closed = False

    def open(self) -> None:
        """Called in the event loop once it runs."""
        self._loop = asyncio.get_running_loop()

    def note_change(self) -> None:
        """Wake all streams; any thread may call it, once its change can be read."""
        self.version += 1
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._wake)

    def notify(self, text: str) -> None:
        """Show all viewers why no job is started; any thread may call it."""
        if text != self.notice:
            self.notice = text
            self.note_change()

    def close(self) -> None:
        """End all streams; any thread may call it."""
        self.closed = True
        self.note_change()

    def recent(self, store: JobStore) -> "RecentMessages":
        """The messages that all streams of the store share."""
        with self._lock:
            if self._recent is None:
                self._recent = RecentMessages(store, self)
            return self._recent

    async def wait(self, seen: int) -> bool:
        """Wait for a version other than `seen`, for a while; returns whether there was a change."""
        if self.version != seen:
            return True
        try:
            await asyncio.wait_for(self._changed.wait(), _BEAT_S)
        except TimeoutError:
            return False
        return True

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class RecentMessages:
    """The newest events and readings as messages: read and encoded once for all streams.

    A stream that is further behind reads the database. Threads share this.
    """

    def __init__(self, store: JobStore, feed: Feed) -> None:
        self._store = store
        self._feed = feed
        self._lock = threading.Lock()
        self._version = -1
        self._numbers: list[int] = []  # of the kept events, in order
        self._newest: list[tuple[str, str, bytes]] = []  # their job, its project, the message
        self._bytes = 0
        self._before = self._last = store.last_event()  # kept are those above `before`
        self._projects: dict[str, str] = {}
        self._heads: dict[tuple[object, object], list[JobRow]] = {}
        self._readings: dict[tuple[str, bool], tuple[object, bytes]] = {}

    def events(
        self, jobs: Collection[str], after: int, projects: Collection[str] | None
    ) -> tuple[list[bytes], int, bool]:
        """Messages of events above `after`, the number to continue from, and whether more wait."""
        with self._lock:
            self._read_on()
            newest = self._last
            if after >= self._before:
                rest = self._newest[bisect_right(self._numbers, after) :]
                texts = [
                    text
                    for job, project, text in rest
                    if (not jobs or job in jobs) and (projects is None or project in projects)
                ]
                return texts, max(after, newest), False
        rows = self._store.events(list(jobs), after, BATCH, projects)
        texts = [message("event", row, row["id"]) for row in rows]
        last = rows[-1]["id"] if rows else after
        more = len(rows) == BATCH
        return texts, last if more else max(last, newest), more

    def readings(
        self, jobs: Sequence[str], projects: Collection[str] | None, shown: dict[str, object]
    ) -> list[bytes]:
        """The readings that `shown` lacks: details for a single job, else the list's figures."""
        with self._lock:
            self._read_on()
            key = (tuple(jobs), None if projects is None else frozenset(projects))
            if key not in self._heads:
                self._heads[key] = self._store.heads(jobs, projects)
            texts = []
            for row in self._heads[key]:
                mark = (row.head.get("time"), row.contact, row.state)
                if shown.get(row.id) == mark or (row.id not in shown and row.state in TERMINAL):
                    continue
                shown[row.id] = mark
                texts.append(self._reading(row, mark, detailed=len(jobs) == 1))
            return texts

    def _reading(self, row: JobRow, mark: object, *, detailed: bool) -> bytes:
        known, text = self._readings.get((row.id, detailed), (None, b""))
        if known != mark:
            reading: dict[str, Any] = {"job": row.id, "head": row.head, "contact": row.contact}
            if detailed:
                newest = read_newest(self._store.folder(row.id) / READINGS)
                reading["reading"] = msgspec.to_builtins(newest) if newest is not None else None
            text = message("reading", reading)
            if len(self._readings) >= _MAX_READINGS:
                self._readings.clear()
            self._readings[row.id, detailed] = mark, text
        return text

    def _read_on(self) -> None:
        """Read what has changed since the last time, if anything has."""
        version = self._feed.version
        if version == self._version:
            return
        self._heads.clear()
        while rows := self._store.events((), self._last, _READ):
            for row in rows:
                text = message("event", row, row["id"])
                self._numbers.append(row["id"])
                self._newest.append((row["job"], self._project(row["job"]), text))
                self._bytes += len(text)
            self._last = rows[-1]["id"]
            if len(rows) < _READ:
                break
        while self._bytes > _KEPT_BYTES:
            half = (len(self._newest) + 1) // 2
            self._bytes -= sum(len(text) for _, _, text in self._newest[:half])
            self._before = self._numbers[half - 1]
            del self._numbers[:half], self._newest[:half]
            self._projects.clear()
        self._version = version

    def _project(self, job: str) -> str:
        """The project of a job, which never changes."""
        if job not in self._projects:
            try:
                self._projects[job] = self._store.standing(job)[0]
            except KeyError:  # deleted: only viewers of all projects see its events
                return ""
        return self._projects[job]


async def messages(
    store: JobStore,
    feed: Feed,
    jobs: Sequence[str],
    after: int | None,
    projects: Collection[str] | None = None,
    is_valid: Callable[[], bool] = lambda: True,
) -> AsyncGenerator[bytes, None]:
    """The stream of some jobs, or of all: events with an id above `after`, then new ones.

    It is limited to `projects` (None: all), and ends once `is_valid()` is false.
    """
    last = after if after is not None else await asyncio.to_thread(store.last_event)
    recent = await asyncio.to_thread(feed.recent, store)
    shown: dict[str, object] = {}
    noticed = ""

    def due() -> tuple[list[bytes], int, bool] | None:
        """The messages to send, the number to continue from, whether more wait; None at the end."""
        nonlocal noticed
        if not is_valid():
            return None
        texts, number, more = recent.events(jobs, last, projects)
        if not more:
            texts += recent.readings(jobs, projects, shown)
        if feed.notice != noticed:
            noticed = feed.notice
            texts.append(message("service", {"halted": noticed}))
        return texts, number, more

    feed.clients += 1
    try:
        yield b"retry: 1000\n\n"
        while not feed.closed:
            version = feed.version  # before reading: a change from now on ends the wait
            if (ready := await asyncio.to_thread(due)) is None:
                return
            texts, last, more = ready
            if texts:
                yield b"".join(texts)
            if more:
                continue
            if await feed.wait(version):
                await asyncio.sleep(_PAUSE_S)
            else:
                yield b": alive\n\n"
    finally:
        feed.clients -= 1


def message(kind: str, data: Any, number: int | None = None) -> bytes:
    """One message of a stream. JSON has no line breaks, so the data are one line."""
    head = f"id: {number}\n" if number is not None else ""
    return f"{head}event: {kind}\n".encode() + b"data: " + msgspec.json.encode(data) + b"\n\n"
