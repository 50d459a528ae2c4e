"""Starts a job's shards in threads, processes or Ray, and gives the job that owns them.

    with ps.start(tables, on="processes", shards=2, staleness=4) as job:
        with job.worker("w0") as me:
            ...
        params = job.read()

The shards end with the block. A job can move to other shards, and begin with the state of another.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Unpack, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from ps import path_checks
from ps.admin_client import AdminClient
from ps.cluster import Cluster, mark_ended
from ps.job import Job, compressions, in_words, views_of
from ps.job_spec import expect_compression, reshard_specs, shard_specs
from ps.launch.launch_plan import LaunchOptions, plan_of, remedy
from ps.launch.launcher import LaunchedShards, Placement, start_shards
from ps.launch.threads import local_shards
from ps.process_owner import Opener, OwnerStack
from ps.resharding import reshard
from ps.session.admin_plans import UnconfirmedHandOver
from ps.session.events import JobEnded
from ps.tables import Tables, tables_of
from ps.wal.job_logs import load_state, logs_of
from shards import argument_checks
from shards.aggregation import Round, ServerHalf, StaleLimit, stale_limit_of
from shards.errors import BadInput, GiveUp
from shards.plurals import format_count
from shards.resumed_state import resume_states
from shards.shard_state import ShardState
from shards.spec import ShardSpec, TableSpec, list_rules

Floats = NDArray[np.float32]

_PORT_DIGITS = 5
_ON_THREADS = ("transport", "device", "secure")


class On(StrEnum):
    """Where a job's shards run: threads or processes of this machine, or actors of Ray."""

    THREADS = "threads"
    PROCESSES = "processes"
    RAY = "ray"


class StartOptions(LaunchOptions, total=False):
    """Options of how a job's shards run and wait for its workers; see `start`."""

    lease_s: float
    warm_steps: int
    on_stale: str | StaleLimit | None


class OwnJob(Job):
    """A job with shards that this process has started."""

    def __init__(
        self,
        specs: Sequence[ShardSpec],
        tables: Tables,
        strategy: str,
        launch: Callable[
            [Sequence[ShardSpec], int], AbstractContextManager[LaunchedShards | Cluster]
        ],
        stack: ExitStack,
        advice: str,
    ) -> None:
        """`advice` says what to do when a shard has died for good."""
        self._advice = advice
        self._opener = Opener()
        self._specs = specs
        self._launch = launch
        self._stack = stack
        self._ports = 0
        self._hosts: list[LaunchedShards] = []
        self._forms = {name: dense.form for name, dense in tables.dense.items()}
        self._row_forms = {name: sparse.form for name, sparse in tables.sparse.items()}
        self._strategy = strategy
        self._ended = False
        self._saved: list[Path] = []
        stack.callback(self._note_end)  # the first one, so it is called after the shards have ended
        super().__init__(self._started(specs), tables)
        self._present = self._hosts[-1:]  # the hosts of the shards that hold the job; none: threads

    def check(self) -> None:
        """Raise `ps.errors.GiveUp` naming a shard that has died for good, or `ps.errors.JobEnded`.

        Workers and readers call it when a shard's answer is late. A forked process knows of no
        death: the shards are not its children.
        """
        if self._ended:
            raise JobEnded(f"job {self._cluster.name} has ended with the block that started it")
        if self._opener.is_this_process:
            try:
                for hosts in self._present:
                    hosts.check()
            except GiveUp as error:
                raise GiveUp(f"{error}; {self._advice}") from None

    def save(self, path: str | Path) -> None:
        """Write the description of the job, as `Job.save`. When the job ends, the file says so."""
        super().save(path)
        self._saved.append(path_checks.path("path", path))
        if self._ended:
            self._note_end()

    @property
    def degraded_reason(self) -> str:
        """Why the job might not survive a death that it should survive, in words; else empty."""
        watched = self._present and self._opener.is_this_process
        return self._present[0].degraded_reason if watched else ""

    def lost_updates(self) -> list[str]:
        """The updates that deaths of shards have cost since the last call, in words."""
        return [loss for hosts in self._hosts for loss in hosts.lost_updates()]

    def reshard(self, shards: int) -> None:
        """Move the job to another number of shards while its workers train; nothing is lost.

        Workers wait while the state travels twice. Raises BadInput for the present number or more
        shards than the tables can have, `ps.errors.Retry` while another operator quiesces the
        shards, and what stops a move half-way; the job then stays where it is, unless the error is
        `ps.UnconfirmedHandOver`.
        """
        self._opener.check(f"reshard: job {self._cluster.name}", "move it from there")
        self.check()  # shards that start after the end of the block would never end
        shards = argument_checks.whole("reshard: shards", shards, 1)
        if shards == len(self._specs):
            raise BadInput(f"reshard: the job already has {format_count(shards, 'shard')}")
        specs = reshard_specs(self._specs, shards)
        cluster = self._started(specs)
        fresh = self._hosts[-1:]

        def check() -> None:
            for hosts in (*self._present, *fresh):
                hosts.check()

        # A shard that is rolled back forgets that it is quiesced, has its part, or has handed the
        # job over: it would serve in parallel with the shards that hold the job.
        for hosts in (*self._present, *fresh):
            hosts.restart_enabled = False
        try:
            with (
                AdminClient(self.cluster, check=check) as old,
                AdminClient(cluster, check=check) as new,
            ):
                reshard(old, new)
        except UnconfirmedHandOver:
            raise
        except BaseException:
            for hosts in self._present:
                hosts.restart_enabled = True
            raise
        for hosts in fresh:
            hosts.restart_enabled = True
        self._cluster, self._specs, self._present = cluster, specs, fresh

    def _started(self, specs: Sequence[ShardSpec]) -> Cluster:
        hosts = self._stack.enter_context(self._launch(specs, self._ports))
        self._ports += len(specs)
        if not isinstance(hosts, Cluster):
            self._hosts.append(hosts)
            hosts = hosts.cluster
        return msgspec.structs.replace(
            hosts,
            forms=self._forms,
            row_forms=self._row_forms,
            strategy=self._strategy,
            workers=specs[0].workers if self._strategy else 0,
        )

    def _note_end(self) -> None:
        """The shards have ended: from now on `check` says so, and so do the saved files."""
        self._ended = True
        for path in self._saved:
            mark_ended(path, self._cluster)


@contextmanager
def start(
    tables: object,
    *,
    on: On | str = On.PROCESSES,
    shards: int = 1,
    staleness: float | None = None,
    workers: int = 1,
    start: Mapping[str, object] | None = None,
    resume: str | Path | None = None,
    server: ServerHalf | None = None,
    strategy: str = "",
    name: str = "job",
    **options: Unpack[StartOptions],
) -> Iterator[OwnJob]:
    """Start shards that hold `tables`, and end them on leaving the block.

    `tables` is a `ps.Tables`, one table, or parameters for one dense table. `on` is where the
    shards run: `threads` of this process, `processes` of this machine, or actors of the `ray` that
    this process is connected to. `staleness` is the bound in steps; None is none, or 0 where the
    `server` merges pushes in rounds. `workers` is the expected number of workers, by which
    schedules count iterations. `start` gives tables, by name, other first values than those they
    were described with; `resume` is a snapshot, or the folder of a killed job's logs, from which
    everything continues, workers' pushes and what an operator has changed of the bound and the rate
    included. `server` is a strategy's half at the shards and
    `strategy` its name (`worker.start` gives both).

    Options of the launch:

    - `host`: where the shards listen, 127.0.0.1 by default, at free ports; with `HOST:PORT`, at
      that port + the shard's number. `0.0.0.0` is every address of this machine.
    - `advertise`: the address that clients are given, HOST or HOST:PORT; None: the host's own.
    - `coordinator_port`, `copy_ports`: of replicated shards, such as `7500-7599`; any free ones.
    - `secure`: whether clients need keys; None: wherever other hosts can reach the shards. They
      then use CURVE and admit only holders of the job's `token` or saved description.
    - `transport`: what workers on the same host may use: `auto`, `shm`, `ipc` or `tcp`.
    - `device`: what holds the weights, `cpu` or `gpu`.
    - `durability`, `logs`: what survives a death. At `process` and `logged` each shard keeps a
      write-ahead log below `logs`, and is restarted; `replicated` keeps two copies of each shard.
      With `logs_apart` each node of Ray has a folder of its own at that path.
    - `rollback_s`: at `memory`, the seconds between a shard's autosaves, from which it is restarted
      without the updates since; 10, the default, unless 0: then a death ends the job.
    - `silence_s`: the seconds of silence after which a copy counts as dead, at `replicated`.
    - `lease_s`: how long a worker may be silent before others stop waiting for it; 10.
    - `warm_steps`: the steps that one worker takes alone at first; 0.
    - `on_stale`: what a shard does with a push from weights that are more than N updates old:
      `scale:N` multiplies its rate by N / staleness, `drop:N` drops it and counts it as dropped.
      `wait`, the default, applies it: only the bound holds.

    Raises BadInput naming the argument.
    """
    described = tables_of(tables)
    placement = argument_checks.choice("on", on, On)
    argument_checks.check_names("start: options", options, StartOptions.__annotations__)
    half = ServerHalf() if server is None else server
    argument_checks.instance("server", half, ServerHalf, "what `server` of a strategy returns")
    stale = stale_limit_of("on_stale", options.pop("on_stale", None))
    half = msgspec.structs.replace(half, stale=stale)
    argument_checks.text("strategy", strategy, "a strategy's name")
    if described.sparse:
        half.check_rows(next(iter(described.sparse)))
    if staleness is None and isinstance(half.merge, Round):
        staleness = 0  # the only bound of rounds
    specs = expect_compression(
        shard_specs(
            [
                TableSpec(
                    table.table(table_name),
                    *half.settings(table.rule, table.rate, table.decay),
                    table.guard,
                )
                for table_name, table in described.items()
            ],
            shards=shards,
            bound=argument_checks.staleness_bound("staleness", staleness),
            workers=workers,
            merge=half,
            lease_s=options.pop("lease_s", 10.0),
            warm_steps=options.pop("warm_steps", 0),
            name=name,
        ),
        compressions(described),
    )
    if placement is On.THREADS:
        argument_checks.check_names("start: options on threads", options, _ON_THREADS)
    begin = _arena(described, start) if resume is None else _load_states(specs, start, resume)
    with OwnerStack() as stack:
        launch = partial(_launch_shards, placement, cast(LaunchOptions, options))
        advice = remedy(options.get("logs"), options.get("rollback_s"))
        job = OwnJob(specs, described, strategy, launch, stack, advice)
        with AdminClient(job.cluster, check=job.check) as admin:
            if isinstance(begin, np.ndarray):
                admin.install(begin)
            else:
                for shard, state in enumerate(begin):
                    admin.restore(shard, state)
        yield job


def local(tables: object, **options: Any) -> AbstractContextManager[OwnJob]:
    """Start shards in threads of this process, for notebooks and tests.

    The options are those of `start`, but of its options of the launch only `transport`, `device`,
    `secure`, `lease_s`, `warm_steps` and `on_stale`: such shards end with this process. Raises
    BadInput naming another one.
    """
    return start(tables, on=On.THREADS, **options)


def _launch_shards(
    placement: On, options: LaunchOptions, specs: Sequence[ShardSpec], ports: int
) -> AbstractContextManager[LaunchedShards | Cluster]:
    """Start these shards; those in processes and Ray listen above `ports` earlier ones."""
    if placement is On.THREADS:
        return local_shards(specs, **cast(dict[str, Any], options))
    host, port = _address(options.get("host", "127.0.0.1"), options.get("port", 0))
    launch_options: LaunchOptions = {**options, "host": host, "port": port + ports if port else 0}
    if (logs := launch_options.get("logs")) is not None:
        launch_options["logs"] = logs_of(path_checks.path("logs", logs), specs)
    return start_shards(Placement(placement), plan_of(specs, launch_options))


def _load_states(
    specs: Sequence[ShardSpec], start: object, resume: str | Path
) -> Sequence[ShardState]:
    """The state of each shard in a snapshot or in logs, cut as these shards are."""
    if start is not None:
        raise BadInput("start", expected="none with `resume`", got="both")
    snapshot, (first, *_) = load_state(path_checks.place("resume", resume)), specs
    rules = list_rules(first.tables)
    for subject, expected, got in (
        ("tables", in_words(first.layout), in_words(snapshot.manifest.layout)),
        ("rules", ", ".join(rules), ", ".join(snapshot.manifest.rules)),
    ):
        if expected != got:
            raise BadInput(f"resume {snapshot.place}", expected=f"{subject} {expected}", got=got)
    return resume_states(snapshot.states, snapshot.manifest.map, first)


def _arena(described: Tables, start: Mapping[str, object] | None) -> Floats:
    """The first values of all tables: those in `start`, or those that they were described with."""
    if not isinstance(start, Mapping | None):
        raise argument_checks.wrong("start", "a dict of values by table", start)
    values_by_table = dict(start or {})
    for other in values_by_table.keys() - described.keys():
        raise BadInput(
            "start", expected=f"names of tables, {', '.join(described)}", got=f"{other!r}"
        )
    for name in described.sparse.keys() & values_by_table.keys():
        raise BadInput(f"start: table {name}", expected="none: its rows begin as `init` says")
    arena = described.layout.empty()
    views = views_of(described)
    for name, dense in described.dense.items():
        views.write(name, values_by_table.get(name, dense.start), arena)
    views.check_finite(described.dense, arena)
    return arena


def _address(host: str, port: int) -> tuple[str, int]:
    """The host and port of HOST or HOST:PORT; port 0 is any free one."""
    text, port = (
        argument_checks.text("host", host, "HOST or HOST:PORT"),
        argument_checks.whole("port", port),
    )
    name, colon, port_text = text.rpartition(":")
    if not colon:
        return text, port
    if not port_text.isdecimal() or len(port_text) > _PORT_DIGITS:
        raise argument_checks.wrong("host", "HOST or HOST:PORT", host)
    return name, int(port_text)
