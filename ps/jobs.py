"""Jobs: start shards for tables, or connect to those of another process.

    with ps.start(tables, on="processes", shards=2, staleness=4) as job:
        with job.worker("w0") as me:
            ...
        params = job.read()

`start` owns the shards and ends them on leaving; `connect` only uses them. Both give a `Job`.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ps import paths
from ps.admin_client import AdminClient
from ps.client import Client
from ps.cluster import Cluster, cluster_of
from ps.durability import Durability
from ps.job_spec import expect_compression, resharded_specs, shard_specs
from ps.launch.launch_plan import LaunchPlan, ShardDevice
from ps.launch.launcher import LaunchedShards, Placement, start_shards
from ps.launch.threads import local_shards
from ps.reader import Reader
from ps.resharding import reshard
from ps.session.compression import Compression
from ps.table_views import TableViews
from ps.tables import Dense, Tables, tables_of
from ps.worker import Worker
from shards import arguments
from shards.aggregation import ServerHalf
from shards.errors import BadInput
from shards.messages import ShardStatus
from shards.rules import SGD, Decay
from shards.schedules import Fixed
from shards.spec import ShardSpec, TableSpec
from shards.tables import DenseTable, Layout

Floats = NDArray[np.float32]

MOST_PREFETCHED = 64
_PORT_DIGITS = 5


class On(StrEnum):
    """Where a job's shards run: threads or processes of this machine, or actors of Ray."""

    THREADS = "threads"
    PROCESSES = "processes"
    RAY = "ray"


class Job:
    """A job's shards, as workers, readers and operators use them. Make one with `start`,
    `local` or `connect`.
    """

    def __init__(self, cluster: Cluster, tables: Tables) -> None:
        """`tables` describes those of the cluster; it was checked that they are."""
        self._cluster = cluster
        self.tables = tables
        self.views = _views(tables)

    @property
    def cluster(self) -> Cluster:
        """The description of the shards that hold the job now; `save` writes it for others."""
        return self._cluster

    def worker(
        self,
        name: str,
        *,
        incarnation: int = 0,
        prefetch: int = 0,
        patience_s: float = 30.0,
        **options: Any,
    ) -> Worker:
        """Register a worker, for which others wait at the staleness bound; a context manager.

        A restarted worker takes a higher `incarnation` and continues after its last applied push.
        `prefetch` requests the weights of that many steps ahead, which hides the link and adds
        as much staleness. `patience_s` is the longest silence of a shard before
        `ps.errors.Unreachable`. Further options are those of `ps.Client`; the compression is by
        default what the tables describe.
        """
        ahead = arguments.whole("prefetch", prefetch, 0, MOST_PREFETCHED)
        options.setdefault("compression", _compression(self.tables))
        client = Client(
            self.cluster, worker=name, incarnation=incarnation, patience_s=patience_s, **options
        )
        return Worker(client, self.views, ahead)

    def reader(self, *, patience_s: float = 30.0) -> Reader:
        """A reader of the weights, which registers no worker; a context manager."""
        return Reader(self.cluster, self.views, patience_s=patience_s)

    def read(self, *, consistent: bool = False) -> Any:
        """The present weights: the only table's value, or a dict of all tables'.

        With `consistent` all shards have applied the same pushes; see `Reader.pull`.
        """
        with self.reader() as reader:
            return reader.pull(consistent=consistent)

    def status(self) -> list[ShardStatus]:
        """Every shard's counters and workers; needs the key of the job's operator."""
        with AdminClient(self.cluster) as admin:
            return admin.status()

    def save(self, path: str | Path) -> None:
        """Write the description of the job, with which `connect` finds it, to a private file."""
        self.cluster.save(path)


class OwnJob(Job):
    """A job whose shards this process has started."""

    def __init__(
        self,
        specs: Sequence[ShardSpec],
        tables: Tables,
        launch: Callable[
            [Sequence[ShardSpec], int], AbstractContextManager[LaunchedShards | Cluster]
        ],
        stack: ExitStack,
    ) -> None:
        self._specs = specs
        self._launch = launch
        self._stack = stack
        self._ports = 0
        self._hosts: list[LaunchedShards] = []
        super().__init__(self._started(specs), tables)

    def check(self) -> None:
        """Raise `ps.errors.GiveUp` naming a shard that has died for good."""
        for hosts in self._hosts[-1:]:
            hosts.check()

    def reshard(self, shards: int) -> None:
        """Move the job to another number of shards while its workers train; nothing is lost."""
        shards = arguments.whole("reshard: shards", shards, 1)
        if shards == len(self._specs):
            raise BadInput(f"reshard: the job already has {shards} shards")
        specs = resharded_specs(self._specs, shards)
        cluster = self._started(specs)
        with AdminClient(self.cluster) as old, AdminClient(cluster) as new:
            reshard(old, new)
        self._cluster, self._specs = cluster, specs

    def _started(self, specs: Sequence[ShardSpec]) -> Cluster:
        hosts = self._stack.enter_context(self._launch(specs, self._ports))
        self._ports += len(specs)
        if isinstance(hosts, Cluster):
            return hosts
        self._hosts.append(hosts)
        return hosts.cluster


@contextmanager
def start(
    tables: object,
    *,
    on: On | str = On.PROCESSES,
    shards: int = 1,
    staleness: float | None = None,
    workers: int = 1,
    start: Mapping[str, object] | None = None,
    durability: Durability | str = Durability.MEMORY,
    logs: str | Path | None = None,
    host: str = "127.0.0.1",
    device: ShardDevice | str = ShardDevice.CPU,
    server: ServerHalf | None = None,
    name: str = "job",
) -> Iterator[OwnJob]:
    """Start shards that hold `tables`, and end them on leaving the block.

    `tables` is a `ps.Tables`, one `ps.Dense`, or parameters for one table. `on` is where the shards
    run: `threads` of this process, `processes` of this machine, or actors of the `ray` that this
    process is connected to. `staleness` is the bound in steps; None is none. `workers` is the
    expected number of workers, by which schedules count iterations. `start` gives tables, by name,
    other first values than those they were described with. With a `durability` of `process` or
    `logged`, write-ahead logs are kept below `logs`; `replicated` keeps two copies of each shard.
    Each shard listens on `host` at a free port; with `HOST:PORT`, at that port + its number. Where
    other hosts can reach them, shards use CURVE and admit only holders of the saved description.
    `device` holds the weights. `server` is a strategy's half at the shards (`worker.start` gives
    it). Raises BadInput naming the argument.
    """
    described = tables_of(tables)
    place = arguments.choice("on", on, On)
    durability = arguments.choice("durability", durability, Durability)
    device = arguments.choice("device", device, ShardDevice)
    specs = _specs(described, shards, staleness, workers, server, name)
    arena = _arena(described, start)
    host, port = _address(host)
    root = None if logs is None else paths.path("logs", logs)

    def launch(
        specs: Sequence[ShardSpec], ports: int
    ) -> AbstractContextManager[LaunchedShards | Cluster]:
        if place is On.THREADS:
            return local_shards(specs, device=device)
        folder = None if root is None else root / f"epoch-{specs[0].map.epoch}"
        plan = LaunchPlan(
            specs=specs,
            host=host,
            port=port + ports if port else 0,
            device=device,
            durability=durability,
            logs=folder,
        )
        return start_shards(Placement(place), plan)

    if place is On.THREADS and (durability is not Durability.MEMORY or host != "127.0.0.1" or port):
        raise BadInput("on threads: expected durability memory, and no host or port, got others")
    with ExitStack() as stack:
        job = OwnJob(specs, described, launch, stack)
        with AdminClient(job.cluster) as admin:
            admin.install(arena)
        yield job


def local(tables: object, **options: Any) -> AbstractContextManager[OwnJob]:
    """Start shards in threads of this process, for notebooks and tests; options as `start`."""
    return start(tables, on=On.THREADS, **options)


def connect(cluster: Cluster | str | os.PathLike[str], *, tables: object | None = None) -> Job:
    """The job of another process, by the file that its `save` wrote, or by its description.

    `tables` are the job's, if values are to have the structure that they were given with; without
    them a table is a dict of arrays by name. Raises BadInput if they are not the job's.
    """
    found = cluster_of(cluster)
    if tables is None:
        return Job(found, Tables({one.name: _plain(one) for one in found.layout.tables}))
    described = tables_of(tables)
    mine = tuple(dense.table(name) for name, dense in described.items())
    if mine != found.layout.tables:
        raise BadInput(
            f"tables: expected those of job {found.name},"
            f" {'; '.join(map(_shown, found.layout.tables))}; got {'; '.join(map(_shown, mine))}"
        )
    return Job(found, described)


def reader(job: Job | Cluster | str | os.PathLike[str], *, patience_s: float = 30.0) -> Reader:
    """A reader of a job's weights, which registers no worker; a context manager."""
    return (job if isinstance(job, Job) else connect(job)).reader(patience_s=patience_s)


def _specs(
    described: Tables,
    shards: int,
    staleness: float | None,
    workers: int,
    server: ServerHalf | None,
    name: str,
) -> list[ShardSpec]:
    half = ServerHalf() if server is None else server
    arguments.instance("server", half, ServerHalf, "what `server` of a strategy returns")
    specs = shard_specs(
        [_table_spec(dense.table(name), dense, half) for name, dense in described.items()],
        shards=shards,
        bound=arguments.bound("staleness", staleness),
        workers=workers,
        merge=half,
        name=name,
    )
    return expect_compression(specs, _compression(described))


def _table_spec(table: DenseTable, dense: Dense, half: ServerHalf) -> TableSpec:
    """The table as the shards update it, where the strategy chooses rule or rate."""
    if half.rate is not None:  # workers apply their own rates and decay
        rate = Fixed(base_rate=half.rate)
        return TableSpec(table, half.rule or SGD(), rate, Decay(), dense.guard)
    return TableSpec(table, half.rule or dense.rule, dense.rate, dense.decay, dense.guard)


def _views(tables: Tables) -> TableViews:
    return TableViews(
        {name: (dense.table(name), dense.structure) for name, dense in tables.items()}
    )


def _arena(described: Tables, start: Mapping[str, object] | None) -> Floats:
    """The first values of all tables: those in `start`, or those that they were described with."""
    if not isinstance(start, Mapping | None):
        raise arguments.wrong("start", "a dict of values by table", start)
    given = dict(start or {})
    for other in given.keys() - described.keys():
        raise BadInput(f"start: expected names of tables, {', '.join(described)}; got {other!r}")
    arena = Layout(tuple(dense.table(name) for name, dense in described.items())).empty()
    views = _views(described)
    for name, dense in described.items():
        views.write(name, given.get(name, dense.start), arena)
    return arena


def _compression(tables: Tables) -> dict[str, Compression | str]:
    return {name: dense.compression for name, dense in tables.items()}


def _plain(table: DenseTable) -> Dense:
    """A table as a dict of arrays by name, as far as its place in the arena says."""
    multipliers = {one.name: (one.lr_mult, one.decay_mult) for one in table.tensors}
    return Dense.like(table.views(table.empty()), multipliers=multipliers)


def _address(host: str) -> tuple[str, int]:
    """The host and port of HOST or HOST:PORT; port 0 is any free one."""
    text = arguments.text("host", host, "HOST or HOST:PORT")
    name, colon, port = text.rpartition(":")
    if not colon:
        return text, 0
    if not port.isdecimal() or len(port) > _PORT_DIGITS:
        raise arguments.wrong("host", "HOST or HOST:PORT", host)
    return name, int(port)


def _shown(table: DenseTable) -> str:
    """A table in one line, for errors."""
    tensors = ", ".join(f"{tensor.name} {tensor.shape}" for tensor in table.tensors[:4])
    more = len(table.tensors) - 4
    return f"{table.name}({tensors}{f' and {more} more' if more > 0 else ''})"
