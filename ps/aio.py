"""The SDK for asyncio: the same names as in `ps`, over the same pure state machines.

    async with ps.aio.reader("cluster.json") as weights:
        params = await weights.pull()

Any number of coroutines may read through one reader at the same time: their requests share its
connections, and no thread is started for any of them.
"""

import asyncio
import os
import time
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ps.cluster import Cluster
from ps.jobs import Job, connect
from ps.reader import Connection, Done, ReadRequests
from ps.table_views import TableViews
from ps.transport.links import Links
from shards import arguments
from shards.errors import BadInput, DownpourError

Floats = NDArray[np.float32]

MOST_UNDER_WAY = 2
_IDLE_S = 1.0


async def arrival(links: Links, timeout_s: float) -> None:
    """Wait until something arrives on `links`, at most `timeout_s` seconds."""
    if links.waiting:
        return
    loop = asyncio.get_running_loop()
    arrived = loop.create_future()

    def note() -> None:
        if not arrived.done():
            arrived.set_result(None)

    # What arrives from here on makes a descriptor readable, until its socket is read.
    descriptors = links.descriptors
    for descriptor in descriptors:
        loop.add_reader(descriptor, note)
    try:
        await asyncio.wait((arrived,), timeout=timeout_s)
    finally:
        for descriptor in descriptors:
            loop.remove_reader(descriptor)


class AsyncReader:
    """A reader of a job's weights for coroutines; an asynchronous context manager.

    Reads that are called while `MOST_UNDER_WAY` are under way share the next one: each still gets
    weights that are no older than its call, and a thousand readers cost a shard little more than
    one.
    """

    def __init__(self, cluster: Cluster, views: TableViews, *, patience_s: float = 30.0) -> None:
        self._cluster, self._views = cluster, views
        self._patience_s = arguments.seconds("patience_s", patience_s, endless=True)
        self._reads = ReadRequests(cluster, self._patience_s)
        self._connection: Connection | None = None
        self._under_way: dict[int, asyncio.Future[Floats]] = {}
        self._next: asyncio.Future[Floats] | None = None
        self._pump: asyncio.Task[None] | None = None
        self._begun = asyncio.Event()

    async def pull(self, table: str | None = None) -> Any:
        """The present weights, as `ps.Reader.pull`, but read-only; may be called concurrently."""
        if self._connection is None:
            raise BadInput("reader: it is closed; expected `async with`")
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        # Shielded, because others may wait for the same read.
        waiting = asyncio.shield(self._next)
        if len(self._under_way) < MOST_UNDER_WAY:
            self._begin(self._connection)
        arena = await waiting
        if table is None:
            return self._views.build_all(arena)
        return self._views.build(table, arena)

    def _begin(self, connection: Connection) -> None:
        """Send the next read, if any is wanted."""
        if self._next is None:
            return
        request, sends = self._reads.begin(time.monotonic())
        self._under_way[request], self._next = self._next, None
        connection.send(sends)
        self._begun.set()

    async def _serve(self, connection: Connection) -> None:
        """Handle answers and repetitions while the reader is open."""
        try:
            while True:
                deadline = self._reads.next_deadline
                if deadline is None:
                    self._begun.clear()
                    await self._begun.wait()
                    continue
                await arrival(connection.links, min(_IDLE_S, max(0.0, deadline - time.monotonic())))
                for shard, reply, frames in connection.links.receive(0.0):
                    done = self._reads.receive(shard, reply, frames, time.monotonic())
                    if done is not None:
                        self._resolve(connection, done)
                again, ended = self._reads.due(time.monotonic())
                connection.send(again)
                for done in ended:
                    self._resolve(connection, done)
        except DownpourError as error:
            # The links are of no use any more, so nothing that waits would be answered.
            for waiting in (*self._under_way.values(), self._next):
                if waiting is not None and not waiting.done():
                    waiting.set_exception(error)

    def _resolve(self, connection: Connection, done: Done) -> None:
        """Answer all that wait for a read, and begin the next one."""
        waiting = self._under_way.pop(done.request)
        self._begin(connection)
        if done.error is not None:
            waiting.set_exception(done.error)
            return
        arena = connection.arena(done)
        arena.flags.writeable = False
        waiting.set_result(arena)

    async def close(self) -> None:
        """Drop the connections; may be called twice."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
            self._pump = None
        for waiting in (*self._under_way.values(), self._next):
            if waiting is not None:
                waiting.cancel()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def __aenter__(self) -> "AsyncReader":
        # Connecting waits for handshakes, so it is done in a thread, which ends with it.
        self._connection = await asyncio.to_thread(Connection, self._cluster, self._patience_s)
        self._pump = asyncio.create_task(self._serve(self._connection))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def reader(job: Job | Cluster | str | os.PathLike[str], *, patience_s: float = 30.0) -> AsyncReader:
    """A reader of a job's weights; use it with `async with`. See `ps.reader`."""
    found = job if isinstance(job, Job) else connect(job)
    return AsyncReader(found.cluster, found.views, patience_s=patience_s)
