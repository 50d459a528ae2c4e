"""The SDK for asyncio: the same names as in `ps`, over the same state machines.

    async with ps.aio.reader("job.json") as weights:
        params = await weights.pull()

    async with ps.aio.worker("job.json", "w0") as me:
        async with me.step(samples=64) as step:
            params = await step.pull()
            step.push(gradients_at(params))
        ack = await step.ack

Any number of coroutines may read through one reader at the same time: their requests share its
connections, and no thread is started for any of them.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.ops.rows import Ids
from ps import job as jobs
from ps.cluster import Cluster
from ps.job import Job
from ps.process_owner import BoundToProcess, Opener
from ps.reader import Connection, Done, MissingRows, Reader, ReadRequests, RowsToRead
from ps.session.row_requests import Gather, GatheredRows
from ps.table_views import TableViews
from ps.transport.shard_sockets import Links
from ps.worker import PULL_S, RESULT_S, AckFuture, PushAck, Worker, WorkerStep
from shards import argument_checks
from shards.errors import BadInput, DownpourError

Floats = NDArray[np.float32]

Returned = TypeVar("Returned")

MAX_UNDER_WAY = 2
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


class RowsUnderWay(NamedTuple):
    """A read of rows under way: its ids by table, and the rows to come."""

    ids: dict[str, Ids]
    gathered: asyncio.Future[dict[str, GatheredRows]]


class AsyncReader(BoundToProcess):
    """A reader of a job's weights for coroutines; an asynchronous context manager.

    Reads that are called while `MAX_UNDER_WAY` are under way share the next one: each still gets
    weights that are no older than its call, and a thousand readers cost a shard little more than
    one.
    """

    _is_a, _instead = "a reader", "make one of ps.connect there"

    def __init__(
        self,
        cluster: Cluster,
        views: TableViews,
        *,
        patience_s: float = 30.0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` is called when an answer is late: it may raise the reason why none will come."""
        self._opener = Opener()
        self._cluster, self._views, self._check = cluster, views, check
        self._patience_s = argument_checks.seconds("patience_s", patience_s, endless=True)
        self._reads = ReadRequests(cluster, self._patience_s)
        self._connection: Connection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._under_way: dict[int, asyncio.Future[Floats]] = {}
        self._rows_under_way: dict[int, RowsUnderWay] = {}
        self._next: asyncio.Future[Floats] | None = None
        self._pump: asyncio.Task[None] | None = None
        self._fault: Exception | None = None
        self._begun = asyncio.Event()
        self._consistent = asyncio.Lock()

    async def pull(self, table: str | None = None, *, consistent: bool = False) -> Any:
        """The present weights, as `ps.Reader.pull`, but read-only; may be called concurrently.

        A consistent read has connections of its own, in a thread; this reader makes one at a time.
        """
        connection = self._check_open()
        if argument_checks.flag("reader: consistent", consistent):
            return await self._read_consistently(lambda reader: reader.pull(table, consistent=True))
        if self._fault is not None:
            raise self._fault
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        # Shielded, because others may wait for the same read.
        waiting = asyncio.shield(self._next)
        if len(self._under_way) < MAX_UNDER_WAY:
            self._begin(connection)
        arena = await waiting
        return self._views.build(table, arena)

    async def gather(
        self,
        table: str,
        ids: Any,
        *,
        missing: MissingRows | str = MissingRows.INIT,
        consistent: bool = False,
    ) -> Floats:
        """The present rows of ids of a sparse table, as `ps.Reader.gather`; for any number of
        coroutines at the same time.

        A consistent read is made as in `pull`.
        """
        connection = self._check_open()
        if argument_checks.flag("reader: consistent", consistent):
            return await self._read_consistently(
                lambda reader: reader.gather(table, ids, missing=missing, consistent=True)
            )
        if self._fault is not None:
            raise self._fault
        read = RowsToRead.of(self._views.sparse, table, ids, missing)
        if not read.ids:
            return read.build({})
        waiting = RowsUnderWay(read.ids, asyncio.get_running_loop().create_future())
        self._ask_rows(connection, waiting)
        return read.build(await waiting.gathered)

    def _check_open(self) -> Connection:
        self._opener.check("the reader", "make another with ps.aio.reader(job)")
        if self._connection is None:
            raise BadInput("reader: it is closed; expected `async with`")
        if self._loop is not asyncio.get_running_loop():  # answers are handled in the former one
            raise BadInput("reader: it was opened in another event loop; open one in this loop")
        return self._connection

    async def _read_consistently(self, read: Callable[[Reader], Returned]) -> Returned:
        """Read in a thread, through connections of its own."""

        def read_once() -> Returned:
            with Reader(
                self._cluster, self._views, patience_s=self._patience_s, check=self._check
            ) as reader:
                return read(reader)

        async with self._consistent:
            return await asyncio.to_thread(read_once)

    def _ask_rows(self, connection: Connection, waiting: "RowsUnderWay") -> None:
        """Send a read of rows."""
        request, sends = self._reads.begin(time.monotonic(), waiting.ids)
        self._rows_under_way[request] = waiting
        connection.send(sends)
        self._begun.set()

    def _begin(self, connection: Connection) -> None:
        """Send the next read, if any is wanted."""
        if self._next is None:
            return
        request, sends = self._reads.begin(time.monotonic())
        self._under_way[request], self._next = self._next, None
        connection.send(sends)
        self._begun.set()

    async def _serve(self) -> None:
        """Handle answers and repetitions while the reader is open."""
        try:
            while (connection := self._connection) is not None:
                deadline = self._reads.next_deadline
                if deadline is None:
                    self._begun.clear()
                    await self._begun.wait()
                    continue
                await arrival(connection.links, min(_IDLE_S, max(0.0, deadline - time.monotonic())))
                for shard, reply, frames in connection.links.receive(0.0):
                    done = self._reads.receive(shard, reply, frames, time.monotonic())
                    if done is not None and done.moved_to is not None:
                        connection = await self._turn_to(done.moved_to)
                        break
                    if done is not None:
                        self._resolve(connection, done)
                again, ended = self._reads.due(time.monotonic())
                if again or ended:
                    self._check()
                connection.send(again)
                for done in ended:
                    self._resolve(connection, done)
        except DownpourError as error:
            # The links are of no use any more, so nothing that waits, or comes, would be answered.
            self._fault = error
            for waiting in self._waiting():
                if not waiting.done():
                    waiting.set_exception(error)

    def _resolve_rows(self, connection: Connection, done: Done) -> None:
        """Answer the coroutine that waits for a read of rows, unless it was cancelled."""
        waiting = self._rows_under_way.pop(done.request).gathered
        if waiting.done():
            return
        if done.error is not None:
            waiting.set_exception(done.error)
        else:
            waiting.set_result(connection.rows(done))

    def _resolve(self, connection: Connection, done: Done) -> None:
        """Answer all that wait for a read, and begin the next one."""
        if done.request in self._rows_under_way:
            self._resolve_rows(connection, done)
            return
        waiting = self._under_way.pop(done.request)
        self._begin(connection)
        if done.error is not None:
            waiting.set_exception(done.error)
            return
        arena = connection.arena(done)
        arena.flags.writeable = False
        waiting.set_result(arena)

    def _waiting(self) -> list[asyncio.Future[Any]]:
        """The reads under way, and the next one if it is wanted."""
        following = [] if self._next is None else [self._next]
        rows = [waiting.gathered for waiting in self._rows_under_way.values()]
        return [*self._under_way.values(), *rows, *following]

    async def close(self) -> None:
        """Drop the connections; may be called twice."""
        if self._loop is asyncio.get_running_loop():  # else that loop has cancelled what it ran
            if self._pump is not None:
                self._pump.cancel()
                await asyncio.gather(self._pump, return_exceptions=True)
                self._pump = None
            for waiting in self._waiting():
                waiting.cancel()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def __aenter__(self) -> "AsyncReader":
        # Connecting waits for handshakes, so it is done in a thread, which ends with it.
        self._connection = await asyncio.to_thread(Connection, self._cluster, self._patience_s)
        self._loop = asyncio.get_running_loop()
        self._pump = asyncio.create_task(self._serve())
        return self

    async def _turn_to(self, cluster: Cluster) -> Connection:
        """Read from these shards from now on; what is under way begins there again."""
        assert self._connection is not None, "it is open while it serves"
        self._connection.close()
        connection = await asyncio.to_thread(Connection, cluster, self._patience_s)
        self._connection, self._reads = connection, ReadRequests(cluster, self._patience_s)
        waiting, self._under_way = list(self._under_way.values()), {}
        for read in waiting:
            request, sends = self._reads.begin(time.monotonic())
            self._under_way[request] = read
            connection.send(sends)
        rows, self._rows_under_way = self._rows_under_way.values(), {}
        for waiting_rows in [read for read in rows if not read.gathered.done()]:
            try:
                self._ask_rows(connection, waiting_rows)
            except BadInput as error:  # fewer shards: more rows for one than a message holds
                waiting_rows.gathered.set_exception(error)
        return connection

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class AsyncAck(BoundToProcess):
    """The acknowledgement of a push: `await` it."""

    _is_a, _instead = "an acknowledgement", "make a worker of ps.connect there"

    def __init__(self, future: AckFuture, turn: Callable[[float], Awaitable[None]]) -> None:
        self._future, self._turn = future, turn

    def done(self) -> bool:
        """Return whether every shard has acknowledged the push, as far as this worker has heard."""
        return self._future.done()

    async def result(self, timeout_s: float = RESULT_S) -> PushAck:
        """Wait for the acknowledgement; raises `ps.errors.Retry` after `timeout_s` seconds."""
        until = time.monotonic() + argument_checks.seconds("timeout_s", timeout_s, zero=True)
        while not self._future.done() and (left_s := until - time.monotonic()) > 0:
            await self._turn(left_s)
        return self._future.result(0.0)

    def __await__(self) -> Generator[Any, None, PushAck]:
        return self.result().__await__()


class AsyncStep(BoundToProcess):
    """One step of an asynchronous worker; see `ps.WorkerStep`."""

    _is_a, _instead = "a step", "make a worker of ps.connect there"

    def __init__(self, step: WorkerStep, worker: "AsyncWorker") -> None:
        self._step, self._worker = step, worker

    @property
    def loss(self) -> float:
        """The step's loss, for the records; to be set."""
        return self._step.loss

    @loss.setter
    def loss(self, loss: float) -> None:
        self._step.loss = loss

    @property
    def ack(self) -> AsyncAck:
        """The acknowledgement of the step's push, to be awaited after the step."""
        return AsyncAck(self._step.ack, self._worker._turn)

    async def pull(self, table: str | None = None, *, timeout_s: float = PULL_S) -> Any:
        """A table's weights, as `ps.WorkerStep.pull`; other coroutines run while it waits.

        Raises `ps.errors.ClockTimeout` after `timeout_s` seconds at the staleness bound.
        """
        await self._await_weights(timeout_s)
        return self._step.pull(table)

    async def rows(self, table: str, *, timeout_s: float = PULL_S) -> Floats:
        """The rows of the step's ids of a sparse table, as `ps.WorkerStep.rows`."""
        await self._await_weights(timeout_s)
        return self._step.rows(table)

    def scatter(self, table: str, gradient: Any) -> None:
        """Give the step the gradients of the rows of its ids, as `ps.WorkerStep.scatter`."""
        self._step.scatter(table, gradient)

    async def _await_weights(self, timeout_s: float = PULL_S) -> None:
        if not self._step.pulled:
            await self._worker._await_weights(timeout_s, self._step.gather)

    def gradients(self, table: str | None = None) -> Any:
        """Zeroed, writable arrays to fill in place of a `push`."""
        return self._step.gradients(table)

    def push(self, table: Any, *gradient: Any) -> None:
        """Give the step the gradient of a table, as `ps.WorkerStep.push`."""
        self._step.push(table, *gradient)


class AsyncWorker(BoundToProcess):
    """A worker of a job for coroutines; an asynchronous context manager.

    It is a `ps.Worker` that waits in the event loop: before each call that could wait, until the
    call would not. One coroutine at a time may use it. Connecting, leaving, and following a reshard
    are done in a thread or block the loop for a moment.
    """

    _is_a, _instead = "a worker", "make a worker of ps.connect there"

    def __init__(self, connect: Callable[[], Worker]) -> None:
        self._connect = connect
        self._worker: Worker | None = None

    @property
    def worker(self) -> Worker:
        """The worker underneath; raises BadInput outside `async with`."""
        if self._worker is None:
            raise BadInput("worker: it is not open; expected `async with`")
        return self._worker

    @property
    def clock(self) -> int:
        """The steps that this worker has completed, in all its incarnations."""
        return self.worker.clock

    @property
    def name(self) -> str:
        """The worker's name, by which the shards know it."""
        return self.worker.name

    @property
    def seq(self) -> int:
        """The number of its last push; at first, of the last applied push of its former lives."""
        return self.worker.seq

    async def pull(self, *, timeout_s: float = PULL_S) -> Any:
        """The weights outside a step, as `ps.Worker.pull`."""
        await self._await_weights(timeout_s)
        return self.worker.pull(timeout_s=timeout_s)

    @asynccontextmanager
    async def step(
        self, *, samples: int = 0, gather: Mapping[str, Any] | None = None
    ) -> AsyncIterator[AsyncStep]:
        """One step: pull, compute, push, and one tick of the clock; see `ps.Worker.step`."""
        with self.worker.step(samples=samples, gather=gather) as step:
            waiting_step = AsyncStep(step, self)
            yield waiting_step
            await waiting_step._await_weights()
            while not self.worker.client.has_room():
                await self._turn(_IDLE_S)

    async def flush(self) -> None:
        """Wait until every push is acknowledged by every shard."""
        while self.worker.client.pending_pushes:
            await self._turn(_IDLE_S)

    async def close(self) -> None:
        """Wait for the acknowledgements, leave the job, and drop the connections; final."""
        if self._worker is not None:
            await self.flush()
            worker, self._worker = self._worker, None
            await asyncio.to_thread(worker.close)

    def prefetch(self, *, gather: Mapping[str, Any]) -> None:
        """Request now what a coming step with these ids will read, as `ps.Worker.prefetch`."""
        self.worker.prefetch(gather=gather)

    async def _await_weights(self, timeout_s: float, gather: Gather | None = None) -> None:
        timeout_s = argument_checks.seconds("pull: timeout_s", timeout_s, zero=True)
        client, until = self.worker.client, time.monotonic() + timeout_s
        if not client.has_pulled(gather):
            client.prefetch(client.clock, gather=gather)
        while not client.has_pulled(gather) and (left_s := until - time.monotonic()) > 0:
            await self._turn(left_s)
        if not client.has_pulled(gather):
            raise client.session.make_clock_timeout(client.clock, timeout_s)

    async def _turn(self, timeout_s: float) -> None:
        """Wait for an arrival or the next deadline, and handle it."""
        client = self.worker.client
        deadline = client.next_deadline
        if deadline is not None:
            timeout_s = min(timeout_s, max(0.0, deadline - time.monotonic()))
        await arrival(client.links, min(timeout_s, _IDLE_S))
        client.poll()

    async def __aenter__(self) -> "AsyncWorker":
        self._worker = await asyncio.to_thread(self._connect)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            await self.close()
        elif self._worker is not None:
            self._worker.client.abort()
            self._worker = None


@asynccontextmanager
async def connect(
    where: Cluster | str | os.PathLike[str],
    *,
    token: str | None = None,
    tables: object | None = None,
    patience_s: float = 10.0,
) -> AsyncIterator[Job]:
    """The job of another process, as `ps.connect`; other coroutines run while it waits.

        async with ps.aio.connect(address, token=token) as job, ps.aio.worker(job, "w0") as me:

    Leaving the block closes what the job has made and is still open.
    """
    job = await asyncio.to_thread(
        jobs.connect, where, token=token, tables=tables, patience_s=patience_s
    )
    with job:
        yield job


def worker(job: Job | Cluster | str | os.PathLike[str], name: str, **options: Any) -> AsyncWorker:
    """A worker of a job; use it with `async with`. The options are those of `ps.Job.worker`."""
    source = job if isinstance(job, Job) else jobs.connect(job)
    return AsyncWorker(lambda: source.worker(name, **options))


def reader(job: Job | Cluster | str | os.PathLike[str], *, patience_s: float = 30.0) -> AsyncReader:
    """A reader of a job's weights; use it with `async with`. See `ps.reader`."""
    source = job if isinstance(job, Job) else jobs.connect(job)
    source.check()
    return AsyncReader(source.cluster, source.views, patience_s=patience_s, check=source.check)
