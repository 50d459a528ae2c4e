"""Where a training job's shards live, and how it moves to more or fewer while it trains.

New shards are started and the job is moved to them (ps/resharding.py) in a thread, so that whoever
watches the training goes on watching; it goes over to them when it looks next. Shards that were
left stay until the job ends: a worker that starts late, or anew, was told of the first ones alone,
and is sent on from there. One of them that dies meanwhile ends nothing.

A shard at `memory` may be followed by one that has forgotten what it was told last (ps/launch/
restart.py). That it stands still, that it was given its part, that it has sent its workers on:
forgotten, each of these would have it serve beside the shards that hold the job. So while the job
moves no such shard is followed, old or new, nor ever again one that the job has left.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Protocol

import msgspec

from ps import AdminClient, Cluster
from ps.job_spec import resharded_specs
from ps.launch.launcher import LaunchedShards
from ps.launch.risks import Risks
from ps.resharding import reshard
from ps.session.admin_plans import UnconfirmedHandOver
from ps.wal.catalog import logs_of
from shards.errors import BadInput, DownpourError, GiveUp
from shards.spec import ShardSpec

Start = Callable[[Sequence[ShardSpec], int, Path | None], AbstractContextManager[LaunchedShards]]
"""Starts shards: their specs, how many ports are taken by earlier ones, and where their logs go."""


class ReshardRequest(Protocol):
    """Somebody wants the job to have another number of shards."""

    @property
    def shards(self) -> int: ...

    def answer(self, error: DownpourError | None) -> None:
        """Tell them that it has, or why not."""
        ...


class ReshardedShards(msgspec.Struct, frozen=True):
    """Shards that hold the job by now; `end` ends them. `untold` if no former one has said so."""

    specs: Sequence[ShardSpec]
    hosts: LaunchedShards
    end: ExitStack
    untold: UnconfirmedHandOver | None


def in_words(shards: int) -> str:
    """So many shards."""
    return "1 shard" if shards == 1 else f"{shards} shards"


class JobShards:
    """The shards that hold a job now, and a console to them; a context manager that ends all.

    A silent shard is waited for `patience_s`, during a move for a lease longer: as long as a worker
    that died in the midst of a push counts. `told` is given what an operator should read. Below
    `logs` are the shards' logs, where they keep any.
    """

    def __init__(
        self,
        specs: Sequence[ShardSpec],
        start: Start,
        *,
        logs: Path | None,
        patience_s: float,
        told: Callable[[str], None],
    ) -> None:
        self._specs = specs
        self._start = start
        self.logs = logs
        self._patience_s = patience_s
        self._told = told
        self._ports = 0
        self._former: list[LaunchedShards] = []
        self._wish: ReshardRequest | None = None
        self._moving: Future[ReshardedShards] | None = None
        with ExitStack() as stack:
            self._pool = stack.enter_context(ThreadPoolExecutor(1, "move"))
            hosts = stack.enter_context(self._started(specs))
            self._stack = stack
            self._live_at(hosts)
            self._stack = stack.pop_all()

    @property
    def cluster(self) -> Cluster:
        """Where the job is now."""
        return self.hosts.cluster

    def check(self) -> None:
        """Raise GiveUp naming a shard of the job that has died; tell of one that it has left.

        And tell what deaths have cost, and where one would not be survived that should be, once
        that has lasted.
        """
        self.report_losses()
        self.hosts.check()
        if (
            risk := self._risks.due_message(self.hosts.degraded_reason, time.monotonic())
        ) is not None:
            self._told(risk)
        for hosts in list(self._former):
            try:
                hosts.check()
            except GiveUp as error:
                self._former.remove(hosts)
                self._told(f"{error}; it held nothing any more, but told late workers where to go")

    def report_losses(self) -> None:
        """Tell what deaths have cost since this was told last."""
        for hosts in (*self._former, self.hosts):
            for loss in hosts.lost_updates():
                self._told(loss)

    def delete_logs(self) -> None:
        """Nobody will go on from the logs, here or where the job was before."""
        for hosts in (*self._former, self.hosts):
            hosts.delete_logs()

    # --- moving -----------------------------------------------------------------------------------

    @property
    def moving(self) -> bool:
        """Whether a move is under way, or has ended and is not followed yet."""
        return self._moving is not None

    def begin(self, wish: ReshardRequest) -> None:
        """Begin to move, which takes a while; a wish that cannot be granted is answered at once."""
        assert self._moving is None, "one after another"
        have = len(self._specs)
        try:
            if wish.shards == have:
                raise BadInput(f"reshard: expected another number of shards than {have}, got it")
            specs = resharded_specs(self._specs, wish.shards)
        except DownpourError as error:
            wish.answer(error)
            return
        self._told(f"moving from {have} to {in_words(wish.shards)}")
        self.hosts.restart_enabled = False
        self._wish, self._moving = wish, self._pool.submit(self._move, specs)

    def ended(self, *, waits: bool = False) -> ReshardedShards | None:
        """What a move has come to that has just ended; None if none has, or it came to nothing.

        The caller takes a last look at the former shards, and then calls `enter`.
        """
        if self._moving is None or not (waits or self._moving.done()):
            return None
        wait([self._moving])
        try:
            return self._moving.result()
        except DownpourError as error:
            self.hosts.restart_enabled = True
            self._told(f"the job stays with its {in_words(len(self._specs))}: {error}")
            self._answer(error)
            return None

    def enter(self, moved: ReshardedShards) -> None:
        """Go over to the new shards."""
        self._former.append(self.hosts)
        self._stack.push(moved.end)
        self._specs = moved.specs
        self._live_at(moved.hosts)

    def entered(self) -> None:
        """Whoever wished for the move may know."""
        self._answer(None)

    def _answer(self, error: DownpourError | None) -> None:
        wish, self._wish, self._moving = self._wish, None, None
        if wish is not None:
            wish.answer(error)

    def _live_at(self, hosts: LaunchedShards) -> None:
        self.hosts, self._risks = hosts, Risks()
        hosts.restart_enabled = True
        console = AdminClient(hosts.cluster, patience_s=self._patience_s, check=hosts.check)
        self.console = self._stack.enter_context(console)

    def _started(self, specs: Sequence[ShardSpec]) -> AbstractContextManager[LaunchedShards]:
        taken, self._ports = self._ports, self._ports + len(specs)
        logs = logs_of(self.logs, specs) if self.logs is not None else None
        return self._start(specs, taken, logs)

    def _move(self, specs: Sequence[ShardSpec]) -> ReshardedShards:
        """Start these shards and move there; in the thread."""
        with ExitStack() as undone:
            if self.logs is not None:
                undone.callback(shutil.rmtree, logs_of(self.logs, specs), ignore_errors=True)
            stack = undone.enter_context(ExitStack())
            hosts = stack.enter_context(self._started(specs))
            hosts.restart_enabled = False
            try:
                untold = self._moved_to(hosts, self._patience_s + specs[0].lease_s)
            except BaseException:
                hosts.delete_logs()  # on other nodes: the next try's go to the same place
                raise
            moved = ReshardedShards(specs, hosts, stack.pop_all(), untold)
            undone.pop_all()
            return moved

    def _moved_to(self, hosts: LaunchedShards, patience_s: float) -> UnconfirmedHandOver | None:
        """Have these hold the job; an error if none of the former says that they do."""
        with (
            AdminClient(self.cluster, patience_s=patience_s) as old,
            AdminClient(hosts.cluster, patience_s=patience_s) as new,
        ):
            try:
                reshard(old, new)
            except UnconfirmedHandOver as error:
                return error
            except DownpourError:
                hosts.check()  # what one of them has died of says more than its silence
                raise
        return None

    def __enter__(self) -> "JobShards":
        return self

    def __exit__(self, *exc: object) -> None:
        with self._stack:
            if self._moving is not None:
                wait([self._moving])
                if self._moving.exception() is None:
                    self._stack.push(self._moving.result().end)
