"""The shards of a training job, and resharding to more or fewer of them while the job trains.

A thread starts the new shards and hands the job over to them (ps/resharding.py), so the thread that
watches the training is not blocked; it switches to the new shards at its next look. The former
shards run until the job ends: a worker that starts or restarts late knows only the addresses of the
first shards, and they redirect it. If a former shard dies, the job continues.

At durability `memory` a restarted shard may have lost its latest instructions (ps/launch/
restart.py): that it is quiesced, that it was given its part, that it redirects its workers. After
losing any of these it would serve in parallel with the shards that hold the job. So no such shard,
old or new, is restarted while the job reshards, and a former shard is never restarted again.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import msgspec

from ps import AdminClient, Cluster
from ps.job_spec import reshard_specs
from ps.launch.launcher import LaunchedShards
from ps.process_owner import OwnerStack
from ps.resharding import reshard
from ps.session.admin_plans import UnconfirmedHandOver
from ps.wal.job_logs import logs_of
from shards.errors import BadInput, DownpourError, GiveUp
from shards.plurals import format_count
from shards.spec import ShardSpec
from worker.job.run_control import PendingOrder

_LASTING_S = 30.0  # after which a risk is reported

Start = Callable[[Sequence[ShardSpec], int, Path | None], AbstractContextManager[LaunchedShards]]
"""Starts shards, given their specs, the number of ports that earlier shards use, and the folder for
their logs."""


class Risks:
    """Which reports are due for the risks of one job; pure.

    A replicated job that has lost a copy, or its coordinator, usually has another within seconds,
    which needs no report. A job that gets none, because no process can start or the coordinator's
    disk is full, continues training as if nothing were wrong; the next death could then cost
    acknowledged pushes.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._reported = False

    def due_message(self, risk: str, now: float) -> str | None:
        """The message to report now, given the current `risk` (empty: none); None if nothing new.

        `now` is in seconds. A lasting risk is reported once, and so is its end.
        """
        if not risk:
            over, self._since, self._reported = self._reported, None, False
            return "every shard has two copies again, and a coordinator" if over else None
        self._since = now if self._since is None else self._since
        if self._reported or now - self._since < _LASTING_S:
            return None
        self._reported = True
        return (
            f"for {_LASTING_S:g} s now {risk}; training continues, but another death may take"
            " back acknowledged pushes, or end the run"
        )


class ReshardedShards(msgspec.Struct, frozen=True):
    """New shards that hold the job.

    `end` stops them. `unconfirmed` is set if no former shard has confirmed the handover.
    """

    specs: Sequence[ShardSpec]
    hosts: LaunchedShards
    end: ExitStack
    unconfirmed: UnconfirmedHandOver | None


def in_words(shards: int) -> str:
    """A number of shards in words, as "1 shard" or "2 shards"."""
    return format_count(shards, "shard")


class JobShards:
    """The shards that hold a job now, and an admin client for them.

    A context manager that stops all shards on exit. The client waits `patience_s` seconds for a
    silent shard. A reshard waits one lease longer, because a worker that died in the middle of a
    push counts until its lease expires. `notify` is called with each message for the operator. The
    shards' logs, if they keep any, are stored below `logs`.
    """

    def __init__(
        self,
        specs: Sequence[ShardSpec],
        start: Start,
        *,
        logs: Path | None,
        patience_s: float,
        notify: Callable[[str], None],
    ) -> None:
        self._specs = specs
        self._start = start
        self.logs = logs
        self._patience_s = patience_s
        self._notify = notify
        self._ports = 0
        self._former: list[LaunchedShards] = []
        self._order: PendingOrder | None = None
        self._moving: Future[ReshardedShards] | None = None
        with OwnerStack() as stack:
            self._pool = stack.enter_context(ThreadPoolExecutor(1, "move"))
            hosts = stack.enter_context(self._launch(specs))
            self._stack = stack
            self._use(hosts)
            self._stack = stack.pop_all()

    @property
    def cluster(self) -> Cluster:
        """The cluster of the shards that hold the job now."""
        return self.hosts.cluster

    def check(self) -> None:
        """Raise GiveUp naming a shard of the job that has died; only report a former one.

        Also reports the updates that shard deaths have lost, and a degraded state, in which the
        next death would not be survived although it should be, once that state has lasted.
        """
        self.report_losses()
        self.hosts.check()
        if (
            risk := self._risks.due_message(self.hosts.degraded_reason, time.monotonic())
        ) is not None:
            self._notify(risk)
        for hosts in list(self._former):
            try:
                hosts.check()
            except GiveUp as error:
                self._former.remove(hosts)
                self._notify(f"{error}; it held nothing any more, but redirected late workers")

    def report_losses(self) -> None:
        """Report the updates that shard deaths have lost since the last call."""
        for hosts in (*self._former, self.hosts):
            for loss in hosts.lost_updates():
                self._notify(loss)

    def delete_logs(self) -> None:
        """Delete the logs of the current and the former shards: no job will resume from them."""
        for hosts in (*self._former, self.hosts):
            hosts.delete_logs()

    # --- resharding -------------------------------------------------------------------------------

    @property
    def moving(self) -> bool:
        """True if a reshard is under way, or has ended and `enter` is still to be called."""
        return self._moving is not None

    def begin(self, shards: int, order: PendingOrder) -> None:
        """Begin to reshard in the background; an order that cannot be met is answered at once."""
        assert self._moving is None, "one reshard at a time"
        have = len(self._specs)
        try:
            if shards == have:
                raise BadInput(f"reshard: the job already has {in_words(have)}")
            specs = reshard_specs(self._specs, shards)
        except DownpourError as error:
            order.answer(error)
            return
        self._notify(f"moving from {have} to {in_words(shards)}")
        self.hosts.restart_enabled = False
        self._order, self._moving = order, self._pool.submit(self._reshard, specs)

    def collect_reshard(self, *, waits: bool = False) -> ReshardedShards | None:
        """The new shards of a reshard that has just succeeded; None if there is none.

        With `waits` this waits for a reshard under way. A failed one is reported here, and the job
        keeps its shards. The caller reads the former shards' status a last time, then calls
        `enter`.
        """
        if self._moving is None or not (waits or self._moving.done()):
            return None
        wait([self._moving])
        try:
            return self._moving.result()
        except DownpourError as error:
            self.hosts.restart_enabled = True
            self._notify(f"the job stays with its {in_words(len(self._specs))}: {error}")
            self._answer(error)
            return None

    def enter(self, moved: ReshardedShards) -> None:
        """Switch to the new shards."""
        self._former.append(self.hosts)
        self._stack.push(moved.end)
        self._specs = moved.specs
        self._use(moved.hosts)

    def report_success(self) -> None:
        """Answer the order, once the caller has switched, too."""
        self._answer(None, f"moved to {in_words(len(self._specs))}")

    def _answer(self, error: DownpourError | None, text: str = "") -> None:
        order, self._order, self._moving = self._order, None, None
        if order is not None:
            order.answer(error, text)

    def _use(self, hosts: LaunchedShards) -> None:
        self.hosts, self._risks = hosts, Risks()
        hosts.restart_enabled = True
        admin = AdminClient(hosts.cluster, patience_s=self._patience_s, check=hosts.check)
        self.admin = self._stack.enter_context(admin)

    def _launch(self, specs: Sequence[ShardSpec]) -> AbstractContextManager[LaunchedShards]:
        ports, self._ports = self._ports, self._ports + len(specs)
        logs = logs_of(self.logs, specs) if self.logs is not None else None
        return self._start(specs, ports, logs)

    def _reshard(self, specs: Sequence[ShardSpec]) -> ReshardedShards:
        """Start these shards and hand the job over to them; runs in the background thread."""
        with ExitStack() as undone:
            if self.logs is not None:
                undone.callback(shutil.rmtree, logs_of(self.logs, specs), ignore_errors=True)
            stack = undone.enter_context(ExitStack())
            hosts = stack.enter_context(self._launch(specs))
            hosts.restart_enabled = False
            try:
                unconfirmed = self._hand_over(hosts, self._patience_s + specs[0].lease_s)
            except BaseException:
                hosts.delete_logs()  # on other nodes: the next attempt's logs go to the same place
                raise
            moved = ReshardedShards(specs, hosts, stack.pop_all(), unconfirmed)
            undone.pop_all()
            return moved

    def _hand_over(self, hosts: LaunchedShards, patience_s: float) -> UnconfirmedHandOver | None:
        """Hand the job over to these shards; returns an error if no former shard confirms it."""
        with (
            AdminClient(self.cluster, patience_s=patience_s) as old,
            AdminClient(hosts.cluster, patience_s=patience_s) as new,
        ):
            try:
                reshard(old, new)
            except UnconfirmedHandOver as error:
                return error
            except DownpourError:
                hosts.check()  # why a shard died is a better error than that it is silent
                raise
        return None

    def __enter__(self) -> "JobShards":
        return self

    def __exit__(self, *exc: object) -> None:
        with self._stack:
            if self._moving is not None and self._stack.is_this_process:
                wait([self._moving])
                if self._moving.exception() is None:
                    self._stack.push(self._moving.result().end)
