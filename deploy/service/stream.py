"""Server-sent events: transitions and other events with ids, and the newest reading of each job.

A stream keeps only the id of the last event that it has sent, and reads what follows from the
database. So a slow viewer needs no memory here: it misses readings, of which only the newest
counts, and no event. A client that reconnects sends the last id, and nothing is lost or repeated.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from deploy.runner.job_folder import READINGS
from deploy.runner.readings import read_newest
from deploy.service.job_store import JobStore
from deploy.service.states import TERMINAL

BATCH = 256
_BEAT_S = 15.0
_PAUSE_S = 0.2  # events of one moment go out together


class Feed:
    """Wakes the streams when something has changed, and ends them when the service stops."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self.clients = 0
        self.closed = False

    def open(self) -> None:
        """Called in the event loop once it runs."""
        self._loop = asyncio.get_running_loop()

    def changed(self) -> None:
        """Wake all streams; any thread may call it."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._wake)

    def close(self) -> None:
        """End all streams; any thread may call it."""
        self.closed = True
        self.changed()

    async def wait(self) -> bool:
        """Return at the next change, or after a while; whether there was a change."""
        try:
            await asyncio.wait_for(self._changed.wait(), _BEAT_S)
        except TimeoutError:
            return False
        return True

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def messages(
    store: JobStore,
    feed: Feed,
    jobs: Sequence[str],
    after: int | None,
    projects: Collection[str] | None = None,
    is_valid: Callable[[], bool] = lambda: True,
) -> AsyncGenerator[bytes, None]:
    """The stream of some jobs, or of all: events with an id above `after`, then new ones.

    It shows `projects`, None: all, and ends once `is_valid` says that the viewer may not look.
    """
    last = after if after is not None else await asyncio.to_thread(store.last_event)
    shown: dict[str, object] = {}
    feed.clients += 1
    try:
        yield b"retry: 1000\n\n"
        while not feed.closed and await asyncio.to_thread(is_valid):
            events = await asyncio.to_thread(store.events, jobs, last, BATCH, projects)
            for each in events:
                last = each["id"]
                yield message("event", each, last)
            if len(events) == BATCH:
                continue
            for reading in await asyncio.to_thread(_readings, store, jobs, projects, shown):
                yield message("reading", reading)
            if await feed.wait():
                await asyncio.sleep(_PAUSE_S)
            else:
                yield b": alive\n\n"
    finally:
        feed.clients -= 1


def message(kind: str, data: Any, number: int | None = None) -> bytes:
    """One message of a stream. JSON has no line breaks, so the data are one line."""
    head = f"id: {number}\n" if number is not None else ""
    return f"{head}event: {kind}\n".encode() + b"data: " + msgspec.json.encode(data) + b"\n\n"


def _readings(
    store: JobStore,
    jobs: Sequence[str],
    projects: Collection[str] | None,
    shown: dict[str, object],
) -> list[dict[str, Any]]:
    """The readings that `shown` lacks: details for a single job, else the figures of the list."""
    found: list[dict[str, Any]] = []
    for row in store.heads(jobs, projects):
        mark = (row.head.get("time"), row.contact, row.state)
        if shown.get(row.id) == mark or (row.id not in shown and row.state in TERMINAL):
            continue
        shown[row.id] = mark
        reading: dict[str, Any] = {"job": row.id, "head": row.head, "contact": row.contact}
        if len(jobs) == 1:
            newest = read_newest(store.folder(row.id) / READINGS)
            reading["reading"] = msgspec.to_builtins(newest) if newest is not None else None
        found.append(reading)
    return found
