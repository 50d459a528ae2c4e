"""A running job, as workers, readers and operators use it; and how other processes find it.

    with ps.connect("tcp://host:7400", token=...) as job:
        with job.worker("w0") as me:
            ...
        params = job.read()

A job that this process has started (start_job.py) is one, too.
"""

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from ps.admin_client import AdminClient
from ps.client import Client
from ps.cluster import Cluster, check_running, cluster_of
from ps.discovery import describe, is_address
from ps.process_owner import BoundToProcess
from ps.reader import Reader
from ps.session.compression import Compression
from ps.session.events import JobEnded
from ps.step_rows import MAX_PREFETCHED
from ps.storage import Place
from ps.table_views import TableViews
from ps.tables import Dense, Sparse, Tables, tables_of
from ps.transport.link_model import LinkModel
from ps.worker import Worker
from shards import argument_checks
from shards.buffer_pool import Allocator
from shards.errors import BadInput, DownpourError
from shards.plurals import format_count
from shards.shard_status import ShardStatus
from shards.tables import DenseTable, Layout

Floats = NDArray[np.float32]

_HOST_PORT = re.compile(r"[A-Za-z0-9_.\[\]:-]+:[0-9]{1,5}")


class WorkerOptions(TypedDict, total=False):
    """Options of a worker's connection to the shards; see `Job.worker`."""

    retry_s: float
    in_flight: int | None
    compression: Compression | str | Mapping[str, Compression | str] | None
    keep: Place | None
    link: LinkModel | str | None
    allocate: Allocator
    transport: str
    stripes: int | None


class Job(BoundToProcess):
    """A job's shards, as workers, readers and operators use them. Make one with `start`,
    `local` or `connect`.

    Leaving the block of `with ps.connect(...) as job` closes the workers and readers that this job
    has made: with an error they drop their connections as a crash would, otherwise they leave.
    """

    def __init__(self, cluster: Cluster, tables: Tables, file: Path | None = None) -> None:
        """`tables` describes the cluster's tables; the caller has checked that they match.

        `file` is the cluster file in which the job was found, if there is one.
        """
        self._cluster = cluster
        self._file = file
        self.tables = tables
        self.views = views_of(tables)
        self._closed = False
        self._opened: WeakSet[Worker | Reader] = WeakSet()

    def __repr__(self) -> str:
        bound = "none" if self._cluster.bound is None else self._cluster.bound
        shards = format_count(self._cluster.map.shards, "shard")
        return (
            f"<job {self._cluster.name}: {self._state}, {shards} at {self._cluster.where(0)},"
            f" tables {in_words(self._cluster.layout)}, staleness bound {bound}>"
        )

    @property
    def _state(self) -> str:
        """The state of the job as far as this process knows, in a word."""
        if self._closed:
            return "closed"
        try:
            self.check()
        except JobEnded:
            return "ended"
        except DownpourError:
            return "failed"
        return "running"

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed = True
        with ExitStack() as stack:
            for user in list(self._opened):
                stack.callback(user.__exit__, kind, error, trace)

    def close(self) -> None:
        """Close the workers and readers that this job has made; other processes' stay. Final."""
        self.__exit__(None, None, None)

    def _check_open(self) -> None:
        if self._closed:
            raise BadInput(f"job {self._cluster.name}: it is closed; ps.connect gives another")

    @property
    def cluster(self) -> Cluster:
        """The description of the shards that hold the job now; `save` writes it for others."""
        return self._cluster

    def check(self) -> None:
        """Raise `ps.errors.JobEnded` if the job is known to have ended: its cluster file says so.

        Workers and readers call it when a shard's answer is late.
        """
        if self._file is not None:
            check_running(self._file)

    def worker(
        self,
        name: str,
        *,
        incarnation: int = 0,
        prefetch: int = 0,
        patience_s: float = 30.0,
        **options: Unpack[WorkerOptions],
    ) -> Worker:
        """Register a worker, for which others wait at the staleness bound; a context manager.

        A restarted worker takes a higher `incarnation` and continues after its last applied push.
        `prefetch` requests the weights of that many steps ahead, which hides the link and adds
        as much staleness. `patience_s` is the longest silence of a shard before
        `ps.errors.Unreachable`. Further options:

        - `compression`: how pushes and pulls travel, for all dense tables or by name; by default
          what the tables describe.
        - `transport`: `auto`, `shm`, `ipc` or `tcp`, for shards on this host.
        - `in_flight`: the most pushes that are unacknowledged when another is sent; `stripes`: the
          TCP connections to each shard. By default, what the link needs.
        - `retry_s`: seconds after which an unanswered message is sent again; 1.
        - `link`: a modelled slow link to put all traffic behind, such as `"rtt=100ms"`.
        - `keep`: where the job's snapshots go; the residual is written with each of them.
        - `allocate`: a function from a number of floats to an array, such as a page-locked one.

        Raises BadInput naming the option, `ps.errors.JobEnded` if the job has ended,
        `ps.errors.Mismatch` where the shards speak another protocol, and `ps.errors.Fenced` where a
        later incarnation has the name.
        """
        ahead = argument_checks.whole("prefetch", prefetch, 0, MAX_PREFETCHED)
        argument_checks.check_names("worker: options", options, WorkerOptions.__annotations__)
        options_of_worker: WorkerOptions = {"compression": compressions(self.tables), **options}
        self._check_open()
        self.check()
        client = Client(
            self.cluster,
            worker=name,
            incarnation=incarnation,
            patience_s=patience_s,
            **options_of_worker,
        )
        client.check = self.check
        worker = Worker(client, self.views, ahead)
        self._opened.add(worker)
        return worker

    def reader(self, *, patience_s: float = 30.0) -> Reader:
        """A reader of the weights, which registers no worker; a context manager.

        Raises `ps.errors.JobEnded` if the job has ended.
        """
        self._check_open()
        self.check()
        reader = Reader(self.cluster, self.views, patience_s=patience_s, check=self.check)
        self._opened.add(reader)
        return reader

    def read(self, *, consistent: bool = False) -> Any:
        """The present weights: the only table's value, or a dict of all tables'.

        With `consistent` all shards have applied the same pushes; see `Reader.pull`.
        """
        with self.reader() as reader:
            return reader.pull(consistent=consistent)

    def status(self) -> list[ShardStatus]:
        """Each shard's counters since the start (pushes, pulls, samples, payload bytes, refusals),
        its stored rows, and its workers, with their clocks and whether they wait.

        Needs the key of the job's operator. Raises `ps.errors.Unreachable` when a shard does not
        answer for 30 s, and `ps.errors.JobEnded` if the job has ended.
        """
        self._check_open()
        self.check()
        with AdminClient(self.cluster, check=self.check) as admin:
            return admin.status()

    def save(self, path: str | Path) -> None:
        """Write the description of the job, with which `connect` finds it, to a file that only this
        user can read, because it holds the job's keys. Raises BadInput if it cannot be written.
        """
        self.cluster.save(path)

    @property
    def address(self) -> str:
        """The addresses of up to three shards, with which and the `token` others `connect`."""
        return self.cluster.address

    @property
    def token(self) -> str:
        """The secret that admits workers and readers to the job."""
        return self.cluster.token


def connect(
    where: Cluster | str | os.PathLike[str],
    *,
    token: str | None = None,
    tables: object | None = None,
    patience_s: float = 10.0,
) -> Job:
    """The job of another process: by the address of one of its shards, or by a file.

    An address, `tcp://HOST:PORT` or `curve://KEY@HOST:PORT`, is `Job.address` of that process; it
    needs the job's `token`, and the shard describes the job. Of several addresses, separated by
    commas, the first shard that answers does. A file is one that `Job.save` wrote,
    and needs none. Values have the structure that the job was started with, of dicts, lists, tuples
    and arrays of NumPy. `tables` are the same in structures of this process's own, such as PyTorch
    tensors. `patience_s` is the longest wait for the shard's answer.

    Raises `ps.errors.Denied` for another job's token, `Mismatch` for a shard of another protocol or
    schema, `JobEnded` for the file of a job that has ended, `Unreachable` if nothing answers there,
    BadInput if `tables` are not the job's.
    """
    cluster = _find_cluster(where, token, argument_checks.seconds("patience_s", patience_s))
    file = None if isinstance(where, Cluster) or is_address(str(where)) else Path(where)
    if tables is None:
        layout, forms = cluster.layout, cluster.forms
        plain: dict[str, Dense | Sparse] = {
            table.name: Dense.from_table(table, forms.get(table.name)) for table in layout.tables
        }
        for table in layout.sparse:
            plain[table.name] = Sparse.from_table(table, cluster.row_forms.get(table.name))
        return Job(cluster, Tables(plain), file)
    described = tables_of(tables)
    layout_here = described.layout
    if layout_here != cluster.layout:
        raise BadInput(
            "tables",
            expected=f"those of job {cluster.name}, {in_words(cluster.layout)}",
            got=in_words(layout_here),
        )
    return Job(cluster, described, file)


def reader(job: Job | Cluster | str | os.PathLike[str], *, patience_s: float = 30.0) -> Reader:
    """A reader of a job's weights, which registers no worker; a context manager.

    `job` is a job, a cluster, or what `connect` takes without a token. `patience_s` is the longest
    silence of a shard, in seconds, before `ps.errors.Unreachable`. Raises BadInput naming the
    argument.
    """
    return (job if isinstance(job, Job) else connect(job)).reader(patience_s=patience_s)


def _find_cluster(where: object, token: str | None, patience_s: float) -> Cluster:
    """The cluster at an address or in a file."""
    if isinstance(where, str) and is_address(where):
        return describe(where, token, patience_s=patience_s)
    if token is not None:
        raise BadInput(
            "token",
            expected="none with a cluster file, which has its own",
            got="one",
            hint=f"the address of a shard begins with tcp://{_suggest_address(where)}",
        )
    if not isinstance(where, Cluster | str | os.PathLike):
        expected = "the address of a shard, the path of a cluster file, or a Cluster"
        raise argument_checks.wrong("connect", expected, where)
    if not isinstance(where, Cluster) and _suggest_address(where) and not Path(where).exists():
        raise BadInput(
            "connect",
            expected="the address of a shard or the path of a cluster file",
            got=f"{argument_checks.describe_value(where)}{_suggest_address(where)}",
        )
    return cluster_of(where)


def _suggest_address(where: object) -> str:
    """The address that HOST:PORT is meant as, as a question; else empty."""
    named = isinstance(where, str) and _HOST_PORT.fullmatch(where)
    return f" (perhaps tcp://{argument_checks.describe_value(where)[1:-1]}?)" if named else ""


def views_of(tables: Tables) -> TableViews:
    """Where each table's arrays are in the job's arena."""
    return TableViews(
        {name: (dense.table(name), dense.structure) for name, dense in tables.dense.items()},
        {name: sparse.table(name) for name, sparse in tables.sparse.items()},
    )


def compressions(tables: Tables) -> dict[str, Compression | str]:
    """Each table's compression, by name."""
    return {name: table.compression for name, table in tables.items()}


def in_words(layout: Layout) -> str:
    """Tables and arrays with their shapes in one line, for errors."""
    rows = (
        f"{table.name}(rows of {table.dim}, {table.init}, seed {table.seed})"
        for table in layout.sparse
    )
    return "; ".join([*map(_describe_table, layout.tables), *rows])


def _describe_table(table: DenseTable) -> str:
    """A table in one line, for errors."""
    tensors = ", ".join(f"{tensor.name} {tensor.shape}" for tensor in table.tensors[:4])
    more = len(table.tensors) - 4
    return f"{table.name}({tensors}{f' and {more} more' if more > 0 else ''})"
