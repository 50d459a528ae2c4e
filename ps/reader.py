"""Readers: serve a job's weights without being one of its workers.

A reader registers nothing, so no worker waits for it, and it does not wait at the staleness bound.
It repeats a request until every shard has answered: reading again is always safe. After a reshard
the former shards send it to the present ones, and it reads there. What to send is
decided by `ReadRequests`, which is pure and may have many reads under way; the blocking `Reader`
here and the one in ps/aio.py drive it.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from cupy_kernels.ops.rows import DistinctIds, Ids, find_distinct
from ps.admin_client import AdminClient
from ps.closing_context import ClosingContext
from ps.cluster import Cluster
from ps.process_owner import BoundToProcess, OneUser, Opener
from ps.session import row_requests
from ps.session.events import Unreachable
from ps.session.row_requests import GatheredRows, SplitIds
from ps.step_rows import ids_of, table_of
from ps.table_views import TableViews
from ps.transport.link_model import LinkModel
from ps.transport.shard_connections import ShardConnections
from ps.transport.transports import Transport
from shards import argument_checks
from shards.errors import BadInput, Resynchronise, Retry
from shards.messages import AskedPart, Read, Refusal, Remedy, Reply, Weights
from shards.refusals import error_of
from shards.tables import SparseTable
from shards.wire_format import Buffer

Floats = NDArray[np.float32]

_RETRY_S = 1.0
_QUIESCE_S = 10.0  # after which quiesced shards resume by themselves; half of it is for the read


class Sent(msgspec.Struct):
    """One read: the answers so far by shard, when it began, and when it is sent again.

    `rows` are the ids to read, split over the `shards`; without any, it reads all dense tables.
    """

    since: float
    again_at: float
    rows: tuple[SplitIds, ...]
    shards: tuple[int, ...]
    wait_s: float = _RETRY_S
    answers: dict[int, tuple[Weights, Sequence[Buffer]]] = {}


class Done(msgspec.Struct, frozen=True):
    """A complete read: each shard's version and frames; or the error that ended it.

    A shard that was not asked has no frames and no version. With `moved_to` it is not complete: the
    job is at the shards of this cluster now.
    """

    request: int
    versions: tuple[int | None, ...] = ()
    frames: tuple[Sequence[Buffer], ...] = ()
    rows: tuple[SplitIds, ...] = ()
    error: Exception | None = None
    moved_to: Cluster | None = None


ReadMessage = tuple[int, Read, tuple[Ids, ...]]
"""A request, the shard that it is for, and its frames."""


class ReadRequests:
    """The reads under way of one reader; pure, times are the driver's in seconds."""

    def __init__(self, cluster: Cluster, patience_s: float) -> None:
        self._job, self._layout, self._map = cluster.job, cluster.layout, cluster.map
        self._shards = range(cluster.map.shards)
        self._patience_s = patience_s
        self._last = 0
        self._under_way: dict[int, Sent] = {}

    def begin(
        self, now: float, ids: Mapping[str, Ids] | None = None
    ) -> tuple[int, list[ReadMessage]]:
        """A new read: its number, and what to send to which shard.

        It reads the rows of `ids`, which are distinct and ascending, by sparse table, at least one;
        without them all dense tables. Raises BadInput for more rows than a message holds.
        """
        rows = row_requests.split(self._layout, self._map, ids or {})
        shards = tuple(
            shard for shard in self._shards if not rows or any(part.count(shard) for part in rows)
        )
        assert shards, "rows of no id need no read"
        self._last += 1
        read = Sent(now, now + _RETRY_S, rows, shards, answers={})
        self._under_way[self._last] = read
        return self._last, [self._message(self._last, read, shard) for shard in shards]

    def receive(
        self, shard: int, reply: Reply, frames: Sequence[Buffer], now: float
    ) -> Done | None:
        """Take an answer; returns the read that it completes or ends, if any."""
        asked = self._under_way.get(reply.request)
        if asked is None:
            return None
        if isinstance(reply, Refusal):
            if reply.remedy is Remedy.RETRY:
                return None  # it is sent again
            del self._under_way[reply.request]
            if reply.remedy is Remedy.MOVED and len(frames) == 1:
                return Done(reply.request, moved_to=Cluster.decode(bytes(frames[0])))
            return Done(reply.request, error=error_of(reply))
        if isinstance(reply, Weights):
            asked.answers[shard] = (reply, frames)
        if len(asked.answers) < len(asked.shards):
            return None
        del self._under_way[reply.request]
        answers = asked.answers
        return Done(
            reply.request,
            tuple(answers[n][0].version if n in answers else None for n in self._shards),
            tuple(answers[n][1] if n in answers else () for n in self._shards),
            asked.rows,
        )

    def due(self, now: float) -> tuple[list[ReadMessage], list[Done]]:
        """The messages to send again now, and the reads that ended because a shard is silent."""
        sends: list[ReadMessage] = []
        ended: list[Done] = []
        for request, asked in list(self._under_way.items()):
            missing = [shard for shard in asked.shards if shard not in asked.answers]
            if now - asked.since >= self._patience_s:
                del self._under_way[request]
                text = f"shard {missing[0]} has not answered a read for {self._patience_s:g} s"
                ended.append(Done(request, error=Unreachable(text, missing[0])))
            elif now >= asked.again_at:
                asked.wait_s *= 2
                asked.again_at = now + asked.wait_s
                sends += [self._message(request, asked, shard) for shard in missing]
        return sends, ended

    @property
    def next_deadline(self) -> float | None:
        """When to call `due` next; None while no read is under way."""
        return min(
            (
                min(read.again_at, read.since + self._patience_s)
                for read in self._under_way.values()
            ),
            default=None,
        )

    def _message(self, request: int, read: Sent, shard: int) -> ReadMessage:
        asked = [part for part in read.rows if part.count(shard)]
        parts = [AskedPart(part.table.name) for part in asked]
        ids = tuple(part.of_shard(shard, part.ids) for part in asked)
        return shard, Read(request, self._job, parts), ids


class Connection:
    """A reader's links to the shards, and the arena that an answer makes."""

    def __init__(self, cluster: Cluster, patience_s: float, link: LinkModel | None = None) -> None:
        self._cluster = cluster
        self._connections = ShardConnections(
            cluster,
            worker=f"reader-{secrets.token_hex(6)}",
            incarnation=0,
            transport=Transport.TCP,
            link=link,
            gradients=0,
            patience_s=patience_s,
        )
        self.links = self._connections.links
        self.links.await_connections(min(_RETRY_S, patience_s))

    def send(self, sends: Sequence[ReadMessage]) -> None:
        for shard, message, frames in sends:
            self.links.send(shard, message, frames)

    def arena(self, done: Done) -> Floats:
        """The weights of a complete read, in an array of the caller's own."""
        if done.error is not None:
            raise done.error
        arena = self._cluster.layout.empty()
        for shard, frames in enumerate(done.frames):
            self._cluster.map.fill(arena, shard, frames)
        return arena

    def rows(self, done: Done) -> dict[str, GatheredRows]:
        """The rows of a complete read, by table."""
        if done.error is not None:
            raise done.error
        _, gathered = row_requests.put_together(done.rows, done.frames)
        return gathered

    def close(self) -> None:
        self._connections.close()


class MissingRows(StrEnum):
    """The answer for ids without a stored row: zeros, their first values, or an error."""

    ZERO = "zero"
    INIT = "init"
    ERROR = "error"


class RowsToRead(NamedTuple):
    """The ids of a table's rows to read, and what those that are not stored get."""

    table: SparseTable
    distinct: DistinctIds
    missing: MissingRows

    @classmethod
    def of(
        cls, tables: Mapping[str, SparseTable], table: str, ids: Any, missing: MissingRows | str
    ) -> "RowsToRead":
        """Check what a reader is asked for; raises BadInput naming the argument."""
        name = table_of("table", tables, table).name
        distinct = find_distinct(ids_of(f"gather: {name}", ids))
        policy = argument_checks.choice("gather: missing", missing, MissingRows)
        return cls(tables[name], distinct, policy)

    @property
    def ids(self) -> dict[str, Ids]:
        """The ids to ask the shards for, by table; empty without ids."""
        return {self.table.name: self.distinct.ids} if len(self.distinct.ids) else {}

    def build(self, gathered: Mapping[str, GatheredRows]) -> Floats:
        """The rows in the order of the ids, float32 (n, dim); raises BadInput for missing ones."""
        if not self.ids:
            return np.zeros((0, self.table.dim), np.float32)
        name = self.table.name
        rows = fill_missing(name, self.distinct.ids, gathered[name], self.missing)
        return rows.take(self.distinct.inverse, axis=0)


def fill_missing(table: str, ids: Ids, gathered: GatheredRows, missing: MissingRows) -> Floats:
    """The rows of a table, with those that are not stored as `missing` says; raises BadInput."""
    unknown = ~gathered.stored
    if missing is MissingRows.ERROR and unknown.any():
        first = ids[int(unknown.argmax())]
        raise BadInput(
            f"gather: table {table}",
            expected="rows that are stored",
            got=f"{np.count_nonzero(unknown)} of {len(ids)} ids without one, such as {first}",
            hint="missing='init' or 'zero' serves them",
        )
    if missing is MissingRows.ZERO:
        gathered.rows[unknown] = 0
    return gathered.rows


class Reader(BoundToProcess, ClosingContext):
    """A blocking reader of the weights; a context manager. Not for use by two threads.

    It registers no worker, does not wait at the staleness bound, and follows the job to other
    shards. After a `pull` or `gather`, `versions` has the version that each shard's part was of,
    None for a shard that was not asked. Make it with `ps.reader` or `Job.reader`.
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
        patience_s = argument_checks.seconds("patience_s", patience_s, endless=True)
        self._check = check
        self.versions: tuple[int | None, ...] = ()
        self._views, self._patience_s = views, patience_s
        self._opener, self._user = Opener(), OneUser("reader")
        self._connection: Connection | None = None
        self._turn_to(cluster)

    def __repr__(self) -> str:
        state = "closed" if self._connection is None else "open"
        known = ("-" if version is None else str(version) for version in self.versions)
        versions = f", last read version {'/'.join(known)}"
        return (
            f"<reader of job {self._cluster.name}: {state}, {self._cluster.map.shards} shards at"
            f" {self._cluster.where(0)}{versions if self.versions else ''}>"
        )

    def _turn_to(self, cluster: Cluster) -> Connection:
        """Read from these shards from now on."""
        self.close()
        self._cluster = cluster
        self._reads = ReadRequests(cluster, self._patience_s)
        self._connection = Connection(cluster, self._patience_s)
        return self._connection

    def pull(self, table: str | None = None, *, consistent: bool = False) -> Any:
        """The present weights, in the structure that was given: a table's, the only one's, or a
        dict of all. `versions` then has each shard's version of them.

        Each shard's part is of one version, the parts of different shards may be of different
        ones. With `consistent` all shards have applied exactly the same pushes of every worker: the
        shards are quiesced while they are read, so pushes wait for a few round trips. That needs
        the key of the job's operator. A reshard and an aligned snapshot quiesce the shards, too:
        the read waits for them, and they for it. The arrays are the caller's own.

        Raises `ps.errors.Unreachable` when a shard does not answer for `patience_s` seconds, or the
        shards do not come together, and `ps.errors.Retry` when another operator holds them for
        longer than that, or the read took longer than they wait.
        """
        return self._build(*self._read_job(None, consistent=consistent), table)

    def gather(
        self,
        table: str,
        ids: Any,
        *,
        missing: MissingRows | str = MissingRows.INIT,
        consistent: bool = False,
    ) -> Floats:
        """The present rows of ids of a sparse table, float32 (n, dim), in the order of the ids.

        `ids` are int64 or uint64 of shape (n,), duplicates allowed. For an id whose row nobody has
        pushed, `missing` gives its first values ("init") or zeros ("zero"), or raises BadInput
        ("error"). `consistent` is that of `pull`. The array is the caller's own.

        Raises BadInput naming the argument, and as `pull` does.
        """
        self._check_open()
        read = RowsToRead.of(self._views.sparse, table, ids, missing)
        if not read.ids:
            self.versions = (None,) * self._cluster.map.shards
            return read.build({})
        connection, done = self._read_job(read.ids, consistent=consistent)
        self.versions = done.versions
        return read.build(connection.rows(done))

    def _read_job(
        self, ids: Mapping[str, Ids] | None, *, consistent: bool
    ) -> tuple[Connection, Done]:
        """One read of the job's present shards, of rows or of all dense tables."""
        with self._user:
            connection = self._check_open()
            if not argument_checks.flag("reader: consistent", consistent):
                return self._present(connection, ids)
            return self._at_one_cut(connection, ids)

    def _check_open(self) -> Connection:
        self._opener.check("the reader", "make another with ps.reader(job)")
        if self._connection is None:
            raise BadInput("reader: it is closed")
        return self._connection

    def _at_one_cut(
        self, connection: Connection, ids: Mapping[str, Ids] | None = None
    ) -> tuple[Connection, Done]:
        """One read of the job's present shards, all of which have applied the same pushes."""
        while True:
            connection, _ = self._present(connection, ids)
            present = self._cluster
            try:
                return connection, self._read_quiesced(connection, ids)
            except Resynchronise:  # a reshard may have come in between
                connection, _ = self._present(connection, ids)
                if self._cluster is present:
                    raise

    def _read_quiesced(self, connection: Connection, ids: Mapping[str, Ids] | None = None) -> Done:
        with AdminClient(self._cluster, patience_s=self._patience_s, check=self._check) as admin:
            admin.quiesce(_QUIESCE_S)
            began = time.monotonic()
            try:
                done = self._read(connection, ids)
                took_s = time.monotonic() - began
            finally:
                admin.resume()
        if took_s >= _QUIESCE_S / 2 or done.moved_to is not None:
            raise Retry(f"reader: a consistent read took {took_s:.3g} s, and shards wait for less")
        return done

    def _present(
        self, connection: Connection, ids: Mapping[str, Ids] | None = None
    ) -> tuple[Connection, Done]:
        """One read of the job's present shards, which it is followed to."""
        while (done := self._read(connection, ids)).moved_to is not None:
            connection = self._turn_to(done.moved_to)
        return connection, done

    def _read(self, connection: Connection, ids: Mapping[str, Ids] | None = None) -> Done:
        """One read; raises what ends it."""
        request, sends = self._reads.begin(time.monotonic(), ids)
        connection.send(sends)
        while True:
            deadline = self._reads.next_deadline
            wait_s = _RETRY_S if deadline is None else deadline - time.monotonic()
            for shard, reply, frames in connection.links.receive(max(0.0, wait_s)):
                done = self._reads.receive(shard, reply, frames, time.monotonic())
                if done is not None and done.request == request:
                    return done
            again, ended = self._reads.due(time.monotonic())
            if again or ended:
                self._check()
            connection.send(again)
            for done in ended:
                connection.arena(done)  # raises its error

    def _build(self, connection: Connection, done: Done, table: str | None) -> Any:
        arena = connection.arena(done)
        self.versions = done.versions
        return self._views.build(table, arena)

    def close(self) -> None:
        """Drop the connections; may be called twice."""
        if self._connection is not None and self._opener.is_this_process:
            self._connection.close()
        self._connection = None
