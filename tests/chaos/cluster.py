"""Everything that runs in a chaos run: shards at a level, workers, their links, and their records.

Whoever carries out faults asks it for pids, to begin a worker's next life, and to wait until
workers are acknowledged again. A process that ends without having been killed ends the run.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ps import AdminClient, ShardState
from ps.job_spec import reshard_specs, shard_specs
from ps.resharding import reshard
from shards.rules import SGD
from shards.schedules import Fixed
from shards.spec import ShardSpec, TableSpec
from tests.chaos.fork_server import Zygote
from tests.chaos.forks import fault_of_fork, fork_log
from tests.chaos.journal import Event, read_journal
from tests.chaos.levels import Hosts, Level
from tests.chaos.namespaces import Link, small_disk
from tests.chaos.oracle import Death, Found, Move, Promise, Stop, judge_reads
from tests.chaos.record import Record, Verdict, judge, table_for, two_tables
from tests.chaos.reports import exchanges_to_merge, judge_reports, pieces_of, server_half
from tests.chaos.rows import row_specs
from tests.chaos.schedule import Kind
from tests.chaos.worker import PATIENCE_S, Life
from worker.strategies import ADAG

LEASE_S = 3.0
_ENDLESS_LEASE_S = 86400.0
_ABSENT_ACKS = 8  # of each other learner: more than it can report without a merge
DRIVER = "the driver"
"""This process, which has started the shards."""
_DISK = "4m"
_POLL_S = 0.002
_CUT_S = 30.0  # how long the shards wait at a cut, at most


class Broken(Exception):
    """A promise that did not hold, or a process that ended by itself."""


class Plan(NamedTuple):
    """How large a run is: workers, `linked` of them behind links, shards, floats, and the bound.

    With `curve` every process speaks CURVE, and workers join by the job's token. `slow_s` is the
    delay of the last worker's link to the last shard, each way. Workers push up to `burst` times a
    read; with a `window` they push windows of that many steps, to two tables, and with a `quorum`
    they report on two fragments. `mutant` names a bug that they have, or none.
    """

    level: Level
    workers: int
    linked: int
    shards: int
    floats: int
    bound: int | None
    rest_s: float
    host: str
    retry_s: float = 0.1
    curve: bool = False
    slow_s: float = 0.0
    burst: int = 3
    window: int = 0
    quorum: int = 0
    mutant: str = ""


class Party:
    """The processes of a run, under way."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        zygote: Zygote,
        stack: ExitStack,
        specs: Sequence[ShardSpec],
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.disk = folder / "disk"
        self.zygote = zygote
        self._stack = stack
        self._launches: list[AbstractContextManager[Hosts]] = []
        self._specs = specs
        self.hosts, self._watcher = self._start(specs, folder)
        self.links: dict[str, Link] = {}
        self.lives: dict[str, Life] = {}
        self.pids: dict[str, int] = {}
        self.kills = 0
        self._killed: set[int] = set()
        self._deaths: list[Death] = []
        self.stops: list[Stop] = []
        self._moves: list[Move] = []
        self.records = {name: Record(folder, name) for name in self.names}

    @property
    def names(self) -> tuple[str, ...]:
        """The workers."""
        return tuple(f"w{number}" for number in range(self.plan.workers))

    @property
    def serving(self) -> Mapping[str, int]:
        """The processes that serve, by name."""
        return self.plan.level.serving(self.hosts)

    def _start(self, specs: Sequence[ShardSpec], folder: Path) -> tuple[Hosts, AdminClient]:
        """Start shards, until the end of all; and a console to them."""
        plan = self.plan
        launch = plan.level.start(specs, plan.host, folder, plan.curve)
        hosts = self._stack.enter_context(launch)
        self._launches.append(launch)
        return hosts, self._stack.enter_context(AdminClient(hosts.cluster, patience_s=PATIENCE_S))

    def install(self, weights: NDArray[np.float32]) -> None:
        self._watcher.install(weights)

    def reshard(self) -> None:
        """Move the job to one shard more, or back to as many as there were, while workers train.

        The former shards stay, for a worker may still ask there where the job is. The job stays
        where a killed worker has left half a push: the oracle knows what a shard lacks by the
        shard's number, and a new one's part may be of two that lack different pushes.
        """
        if not self._is_even():
            print("not moved: a push of a killed worker is at some shards only", flush=True)
            return
        fewest = self.plan.shards
        shards = fewest + (len(self._specs) == fewest)
        specs = reshard_specs(self._specs, shards)
        folder = self.folder / f"epoch-{specs[0].map.epoch}"
        folder.mkdir()
        hosts, watcher = self._start(specs, folder)
        before = time.monotonic()
        reshard(self._watcher, watcher)
        self._moves.append(Move(before, time.monotonic()))
        self._specs, self.hosts, self._watcher = specs, hosts, watcher
        self.hosts.cluster.for_workers().save(self.folder / "cluster.json")

    def _is_even(self) -> bool:
        """Return whether all shards have applied the same pushes of every worker."""
        self._watcher.quiesce(_CUT_S)
        verdicts = self.judge(self._watcher.export(then_resume=True), {})
        return len({(one.worker, one.applied, one.marked) for one in verdicts}) == len(self.names)

    def populate(self) -> None:
        """Begin every worker's first life; the last ones live behind links."""
        here = self.folder / "cluster.json"
        self.hosts.cluster.for_workers().save(here)
        # What goes by a Unix socket or by memory is not encrypted.
        transports = ("tcp",) if self.plan.curve else self.plan.level.transports
        for number, name in enumerate(self.names):
            linked = number >= self.plan.workers - self.plan.linked
            space = self._link(number) if linked else None
            slow_s = self.plan.slow_s if number == self.plan.workers - 1 else 0.0
            self.lives[name] = Life(
                number=number,
                workers=self.plan.workers,
                incarnation=0,
                folder=str(self.folder),
                cluster=str(here),
                transport="tcp" if linked or slow_s else transports[number % len(transports)],
                burst=1 + number % self.plan.burst,
                rest_s=self.plan.rest_s,
                retry_s=self.plan.retry_s,
                space=space,
                rolls_back=self.plan.level.rollback_s is not None,
                slow_s=slow_s,
                window=self.plan.window,
                quorum=self.plan.quorum,
            )
            self.begin(name)
        self.await_acknowledged(dict.fromkeys(self.names, 0.0))
        self.await_whole()

    def _link(self, number: int) -> int:
        """Lay a link for worker `number`; returns the process that holds its end."""
        space = self.zygote.space()
        self.links[f"w{number}"] = Link(number, space)
        return space

    def begin(self, name: str) -> None:
        """Begin the next life of a worker."""
        life = self.lives[name]
        self.lives[name] = msgspec.structs.replace(life, incarnation=life.incarnation + 1)
        self.pids[name] = self.zygote.begin(self.lives[name], self.folder / f"{name}.log")

    def kill(self, pid: int) -> None:
        """kill -9."""
        self._killed.add(pid)
        self.kills += 1
        os.kill(pid, signal.SIGKILL)

    def leave(self, name: str) -> None:
        """End a worker's life in peace; returns when it has left."""
        pid = self.pids[name]
        self._killed.add(pid)
        os.kill(pid, signal.SIGTERM)
        self.await_end(pid)
        if self.zygote.ended[pid]:
            raise Broken(f"{name} did not leave in peace: {self._said(name)}")

    def fork(self, name: str) -> None:
        """Fork a worker's process or this one; returns when the child has ended as it must."""
        fault = self._fork_here() if name == DRIVER else self._fork_there(name)
        if fault:
            raise Broken(f"a fork of {name}: {fault}")

    def _fork_there(self, name: str) -> str:
        log = fork_log(self.folder, name)
        log.touch()
        before = len(log.read_text().splitlines())
        os.kill(self.pids[name], signal.SIGUSR1)
        self.wait_until(
            lambda: len(log.read_text().splitlines()) > before,
            lambda: f"{name} did not report its fork",
        )
        return log.read_text().splitlines()[-1]

    def _fork_here(self) -> str:
        """A child of this process leaves the blocks in which this one has started the shards."""

        def leave() -> None:
            for launch in reversed(self._launches):
                launch.__exit__(None, None, None)

        return fault_of_fork([self._watcher.status], leave)

    def kill_serving(self, name: str) -> None:
        """kill -9 of a process that serves; returns when it is gone."""
        pid, before = self.serving[name], time.monotonic()
        self.kill(pid)
        self.wait_until(lambda: _is_gone(pid), lambda: f"{name}, process {pid}, did not end")
        if name.startswith("shard "):
            shard = int(name.removeprefix("shard "))
            self._deaths.append(Death(shard, before, time.monotonic()))

    def check(self) -> None:
        """Raise Broken when a process ended that nobody killed."""
        for pid, status in self.zygote.hear().items():
            if pid not in self._killed:
                name = next((name for name, at in self.pids.items() if at == pid), f"process {pid}")
                raise Broken(f"{name} ended with status {status}: {self._said(name)}")

    def _said(self, name: str) -> str:
        log = self.folder / f"{name}.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return lines[-1] if lines else "it said nothing"

    def await_acknowledged(self, since: Mapping[str, float], acks: int = 1) -> None:
        """Wait until each of these workers has so many acknowledgements after a time."""

        def waiting() -> list[str]:
            return [n for n, at in since.items() if not self.records[n].has_after(at, acks)]

        self.wait_until(lambda: not waiting(), lambda: f"no acknowledgement for {waiting()}")

    def await_others(self, absent: str) -> None:
        """Wait until all workers but one have pushed more than they could if they needed it."""
        now = time.monotonic()
        others = {name: now for name in self.names if name != absent}
        self.await_acknowledged(others, _ABSENT_ACKS)

    def await_end(self, pid: int) -> None:
        """Wait until a worker's process is gone."""
        self.wait_until(lambda: pid in self.zygote.hear(), lambda: f"process {pid} did not end")

    def await_whole(self) -> None:
        """Wait until the shards stand as their level promised to, in processes that are alive.

        The supervisor may have yet to notice that a process was killed.
        """

        def whole() -> bool:
            alive = not any(map(_is_gone, self.serving.values()))
            return alive and self.plan.level.whole(self.hosts)

        self.wait_until(whole, lambda: "the shards were not whole again")

    @contextmanager
    def strangers(self, kind: Kind, seed: int) -> Iterator[None]:
        """Have strangers bother the shards while the context lasts."""
        log = self.folder / "strangers.log"
        pid = self.zygote.visit(kind, self.folder / "cluster.json", seed, log)
        try:
            yield
        finally:
            if pid in self.zygote.hear():
                raise Broken(f"the strangers ended by themselves: {log.read_text()[-500:]}")
            self._killed.add(pid)
            os.kill(pid, signal.SIGKILL)
            self.await_end(pid)

    def check_snapshot(self, states: Sequence[ShardState]) -> None:
        """Raise Broken when a snapshot's shards hold anything but what their ledgers say.

        What was acknowledged since it was taken is no part of it.
        """
        for verdict in self.judge(states, {}):
            # What a death has taken back, or cut off, is known when all reads have been judged.
            back = verdict.applied <= verdict.counted
            if not (verdict.whole or (back and not verdict.torn)):
                raise Broken(f"in a snapshot: {verdict}")

    def wait_until(self, holds: Callable[[], bool], else_: Callable[[], str]) -> None:
        """Wait for a condition; raises Broken with `else_` when it does not come about."""
        until = time.monotonic() + PATIENCE_S
        while not holds():
            self.check()
            if time.monotonic() > until:
                raise Broken(f"{else_()} within {PATIENCE_S:g} s")
            time.sleep(_POLL_S)

    def finish(self) -> tuple[list[Verdict], Found]:
        """Have every worker leave in peace; what the weights of every shard and all reads prove."""
        for pid in self.pids.values():
            os.kill(pid, signal.SIGTERM)
        last = set(self.pids.values())
        ended = self.zygote.ended
        self._killed |= last
        self.wait_until(
            lambda: last <= self.zygote.hear().keys(),
            lambda: f"still running: {sorted(last - ended.keys())}",
        )
        failed = [f"{name}: {self._said(name)}" for name, pid in self.pids.items() if ended[pid]]
        if failed:
            raise Broken(f"did not end in peace: {'; '.join(failed)}")
        if self.plan.quorum:
            return self._judge_reports()
        found = self.judge_reads()
        return self.judge(self.states(), found.lacking), found

    def _judge_reports(self) -> tuple[list[Verdict], Found]:
        """The same of reports, once every one that was acknowledged is merged."""

        def merged() -> bool:
            self.last_states = self.states()
            saved = [state.saved.reports.values() for state in self.last_states]
            return not any(reports.workers for tables in saved for reports in tables)

        self.wait_until(merged, lambda: "reports are open, and nobody else will report")
        cluster = self.hosts.cluster
        pieces = pieces_of(cluster.layout, cluster.map, len(self.names))
        rollback_s = self.plan.level.rollback_s
        journals = self._journals()
        verdicts = judge_reports(self.last_states, pieces, journals, self._deaths, rollback_s)
        reports = sum(record.acknowledged for record in self.records.values())
        return verdicts, Found(reports, 0, 0, 0.0, (), {})

    def exchanges_to_merge(self) -> list[int]:
        """For each life, the number of its first report that was merged."""
        if not self.plan.quorum:
            return []
        return [n for events in self._journals().values() for n in exchanges_to_merge(events)]

    def _journals(self) -> dict[str, list[Event]]:
        return {name: read_journal(self.folder, name) for name in self.names}

    def judge_reads(self) -> Found:
        """What the workers' reads prove."""
        level = self.plan.level
        promise = Promise(self.plan.bound, LEASE_S, level.rollback_s, level.one_copy)
        return judge_reads(self._journals(), promise, self._deaths, self._moves, self.stops)

    def judge(
        self, states: Sequence[ShardState], lacking: Mapping[tuple[int, int], tuple[int, int]]
    ) -> list[Verdict]:
        """What these states prove, for each worker and shard."""
        shard_map = self.hosts.cluster.map
        return [
            verdict
            for shard, state in enumerate(states)
            for verdict in judge(state, shard, shard_map, self.names, self.folder, lacking)
        ]

    def collect(self) -> None:
        """Have the shards hand over their records of updates, as whoever watches a job does.

        Those that nobody collects pile up, the newest hundred thousand or so.
        """
        self._watcher.records()

    def states(self) -> list[ShardState]:
        with AdminClient(self.hosts.cluster, patience_s=PATIENCE_S) as console:
            return console.export()


def _is_gone(pid: int) -> bool:
    """Whether a process has ended, be it waited for or not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def _specs(plan: Plan) -> list[ShardSpec]:
    """Plain SGD at rate 1: on one table, or by the shards' half of a strategy with windows on two.

    Both apply what is pushed as it is. Tables of rows are beside the one; windows have none.
    Reports are on two tables, too, and merged by a quorum.
    """
    common: dict[str, Any] = {
        "shards": plan.shards,
        "workers": plan.workers,
        "bound": plan.bound,
        "lease_s": _ENDLESS_LEASE_S if plan.quorum else LEASE_S,
    }
    rate = Fixed(base_rate=1.0)
    if plan.quorum:
        fragments = [TableSpec(one, SGD(), rate) for one in two_tables(plan.workers, plan.floats)]
        return shard_specs(fragments, merge=server_half(plan.quorum, plan.workers), **common)
    if not plan.window:
        dense = TableSpec(table_for(plan.workers, plan.floats), SGD(), rate)
        return shard_specs([dense, *row_specs()], **common)
    tables = two_tables(plan.workers, plan.floats)
    half = ADAG(window=plan.window).server(plan.workers)
    return shard_specs([TableSpec(one, SGD(), rate) for one in tables], merge=half, **common)


@contextmanager
def party(plan: Plan, folder: Path, *, disk: bool) -> Iterator[Party]:
    """Start everything, wait until every worker was acknowledged, and end it all on leaving.

    With `disk` there is a small one, to be filled.
    """
    specs = _specs(plan)
    with ExitStack() as stack:
        zygote = stack.enter_context(Zygote(plan.mutant))
        running = Party(plan, folder, zygote, stack, specs)
        running.install(specs[0].layout.empty())
        if disk:
            small_disk(running.disk, _DISK)
        running.populate()
        yield running
