"""Supervises replicated shards: keeps two copies of each and a coordinator, at any placement.

The supervisor, a thread, replaces processes that have died: the coordinator by one with the same
record and port, a copy by an empty process, which catches up while training continues. Only the
coordinator decides which copy serves; the supervisor merely offers processes. `ProcessFactory`
defines how a placement starts a process.

With CURVE, each process makes its own key, and reports the public half as part of its endpoint. So
no process receives a secret, and the supervisor, as the operator, registers the copies' keys with
the coordinator (coordinator_server.py).

Both copies of a shard may have to start on one machine because the other machine joins later. Then
an empty process is started on the new machine, and once it has reported that it serves, the backup
is stopped and the new process takes its place. The primary is not interrupted, and a machine on
which no process ever serves costs nothing. Until the new backup has caught up the shard has one
copy, so only one shard at a time is treated in this way.
"""

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

from msgspec.structs import replace

from ps.cluster import Cluster
from ps.job_spec import make_cluster
from ps.launch.child_protocol import CoordinatorLaunch, CopyLaunch
from ps.launch.launch_plan import START_S, LaunchPlan, bind_again, join_advice, remedy
from ps.launch.process_handle import ProcessHandle
from ps.launch.restart import RestartPolicy
from ps.logs import logger
from ps.process_owner import OwnerStack
from ps.security.keys import KeyPair, address_of
from ps.socket_context import SocketContext
from ps.transport.coordinator_messages import PrimaryInfo
from ps.transport.primary_resolver import PrimaryResolver
from shards.errors import GiveUp, WrongBuild

_POLL_S = 0.1
_AGAIN_S = 2.0  # pause after a process that never served
_AGAIN_MAX_S = 60.0  # longest pause before another coordinator: its disk may be repaired by then
_SILENT_S = 5.0  # a running coordinator answers ten times a second
_SPARE_S = 30.0  # how long a process may take to become a primary or backup
_SEPARATE_S = 5.0  # between two checks whether copies on one machine can be separated
_START_S = 3 * START_S  # for two processes a shard, and the coordinator


class ProcessFactory(Protocol):
    """The ways in which a placement starts processes; no method waits for one to serve."""

    def coordinator(self, order: CoordinatorLaunch) -> ProcessHandle:
        """Start a coordinator; all coordinators of a job use the same record."""
        ...

    def copy(self, order: CopyLaunch, apart_from: Collection[int]) -> ProcessHandle:
        """Start a copy, preferably on a machine without the copies of boot numbers `apart_from`."""
        ...

    def same_machine(self, boot: int, other: int) -> bool:
        """Return whether these two copies run on one machine, and so would die together."""
        ...

    def has_other_machine(self, boot: int) -> bool:
        """Return whether there is now a machine other than the one that runs this copy."""
        ...


@contextmanager
def supervise(
    plan: LaunchPlan, starts: ProcessFactory, record: str
) -> Iterator["ReplicatedShards"]:
    """Start a coordinator and two copies of each shard in `plan`; end them on leaving.

    Returns when each shard has a backup. All listen on `plan.host`; where that is 0.0.0.0, each is
    published under its own machine's address. `record` is the path of the
    coordinator's record on the machine where it runs. A copy counts as dead after `plan.silence_s`
    of silence, or at once if its connection breaks.
    Raises BadInput when an address is unavailable, GiveUp with the cause when a process does not
    start within minutes, WrongBuild when it runs other code.
    """
    shards = ReplicatedShards(plan, starts, record)
    with OwnerStack() as stack:
        stack.callback(shards._stop)
        shards._begin()
        yield shards


class ReplicatedShards:
    """The processes of one job, and the cluster they form.

    Missing processes are started from the caller's thread in `_begin`, then from a thread.
    """

    restart_enabled = True
    """No effect when set: failing over to a backup loses no acknowledged push."""

    cluster: Cluster

    def __init__(self, plan: LaunchPlan, starts: ProcessFactory, record: str) -> None:
        self._specs = plan.specs
        self._starts = starts
        self._bind, self._advertised = plan.copy_bind, plan.advertised()
        self._access, self._admission = plan.issue_keys()
        self._order = CoordinatorLaunch(
            plan.specs[0].job,
            len(plan.specs),
            record,
            plan.coordinator_bind,
            plan.silence_s,
            self._admission,
            self._advertised,
        )
        self._coordinator_at = ""
        self._keys: dict[int, str] = {}  # by boot number, of copies that have reported
        self._coordinator: ProcessHandle | None = None
        self._copies: dict[int, tuple[int, ProcessHandle]] = {}  # shard and process, by boot number
        self._offered: dict[int, tuple[int, float]] = {}  # each shard's newest process, its start
        self._used: set[int] = set()
        self._moves: set[int] = set()  # backups being replaced by one on another machine
        self._separate_at = 0.0
        self._restarts = RestartPolicy(_AGAIN_S, _AGAIN_MAX_S)  # of the coordinator
        # When the coordinator was started, and from when on it may be started again.
        self._began_at = self._restart_at = 0.0
        self._heard_at = 0.0
        self._boot = 0
        self._primaries: dict[int, PrimaryInfo] = {}
        self._lost: dict[int, str] = {}  # how a shard's last process ended
        self._lost_coordinator = "it runs, but is silent"
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._logger = logger(__name__, job=self._order.job)
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._context = SocketContext()
        self._resolver: PrimaryResolver | None = None

    # --- queries ----------------------------------------------------------------------------------

    @property
    def pids(self) -> dict[str, int]:
        """The ids of living processes by role: `coordinator`, `shard 0 primary`, `shard 0 backup`.

        A process without a role yet is a `shard 0 spare`. The values are a moment old. In Ray each
        id is valid on the node where the process runs.
        """
        coordinator = self._coordinator  # the thread may replace it
        processes = {} if coordinator is None else {"coordinator": coordinator}
        for boot, (shard, process) in list(self._copies.items()):
            if process.alive:
                processes[f"shard {shard} {self._part(boot, shard)}"] = process
        return {
            part: pid for part, process in processes.items() if (pid := process.pid) is not None
        }

    @property
    def redundant(self) -> bool:
        """True if every shard could lose a copy now without losing an acknowledged push."""
        return all(
            shard in self._primaries and len(self._living(self._primaries[shard])) == 2
            for shard in range(len(self._specs))
        )

    @property
    def degraded_reason(self) -> str:
        """Why the job might not survive the next death, in words; empty if it would."""
        risks = []
        if time.monotonic() - self._heard_at > _SILENT_S:
            risks.append(f"no coordinator answers: {self._lost_coordinator}")
        for shard, info in sorted(self._primaries.items()):
            if len(self._living(info)) < 2:
                how = self._lost.get(shard, "the other has not caught up")
                risks.append(f"shard {shard} has one copy only: {how}")
        return "; ".join(risks)

    def check(self) -> None:
        """Raise GiveUp naming a shard that has lost every up-to-date copy."""
        if self._failure is not None:
            raise self._failure
        if loss := self._describe_loss():
            raise GiveUp(loss)

    def _describe_loss(self) -> str:
        """The first shard that has lost every up-to-date copy, in words; empty if there is none."""
        for shard, info in list(self._primaries.items()):
            if not self._living(info):
                how = self._lost.get(shard, "its processes have died")
                return f"shard {shard} has no copy left that holds its pushes: {how}"
        return ""

    def lost_updates(self) -> list[str]:
        """Always empty: a death that the job survives costs no acknowledged push."""
        return []

    def delete_logs(self) -> None:
        """Do nothing: replicated shards keep no logs."""

    # --- start and stop ---------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start all processes, and wait until each shard has a backup."""
        until = time.monotonic() + _START_S
        self._coordinator = self._starts.coordinator(self._order)
        self._coordinator_at = self._coordinator.endpoint(until)
        self._order = replace(self._order, bind=bind_again(self._order.bind, self._coordinator_at))
        for spec in (*self._specs, *self._specs):
            self._offer(spec.shard)
        for boot, (_, process) in list(self._copies.items()):
            self._keys[boot] = address_of(process.endpoint(until)).key
        cluster = make_cluster(self._specs, [""] * len(self._specs), self._access)
        cluster = replace(cluster, coordinator=self._coordinator_at)
        operator_keys = None if self._access is None else KeyPair.of(self._access.operator)
        self._resolver = PrimaryResolver(cluster, self._context, operator_keys)
        while not self.redundant:
            if time.monotonic() > until:
                raise GiveUp(f"replicated shards: not all had a backup within {_START_S:g} s")
            for _, process in self._copies.values():
                process.check()
            self._look()
        endpoints = tuple(self._primaries[shard].endpoint for shard in range(len(self._specs)))
        self.cluster = replace(cluster, endpoints=endpoints)
        self._thread.start()

    def _stop(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        processes = [process for _, process in self._copies.values()]
        if self._coordinator is not None:
            processes.append(self._coordinator)
        for process in processes:
            process.ask_to_end()
        for process in processes:
            process.end()
        self._context.destroy(linger=0)

    # --- supervision ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._keep()
        except BaseException as error:  # whatever it is, `check` raises it
            self._failure = error
            self._logger.exception("the shards' processes are no longer supervised")

    def _keep(self) -> None:
        self._keep_coordinator()
        lost, heard_at = self._describe_loss(), self._heard_at
        self._look()
        self._report_deaths()
        # Judged by two answers: the coordinator may have found another copy after the first.
        if lost and self._heard_at > heard_at and (loss := self._describe_loss()):
            self._end_job(loss)
        for info in list(self._primaries.values()):
            if info.under_replicated and not self._waits(info.shard):
                self._offer(info.shard)
        if (now := time.monotonic()) >= self._separate_at:
            self._separate_at = now + _SEPARATE_S
            for info in list(self._primaries.values()):
                self._separate_copies(info)

    def _end_job(self, loss: str) -> None:
        """Have every client learn at once that the job cannot continue, and the remedy."""
        assert self._resolver is not None
        self._resolver.end_job(join_advice(loss, remedy(None, None)))

    def _keep_coordinator(self) -> None:
        """Restart a dead coordinator, after a growing pause while none of them answers."""
        now = time.monotonic()
        if self._coordinator is None:
            if now >= self._restart_at:
                self._began_at = now
                self._coordinator = self._starts.coordinator(self._order)
            return
        try:
            self._coordinator.check()
        except GiveUp as error:
            self._lost_coordinator = str(error)
            self._logger.warning("%s; restarting it", error)
            served_s = self._heard_at - self._began_at
            self._restarts.count_death(served_s if served_s > 0 else None)
            self._restart_at = now + self._restarts.pause_s
            self._coordinator.end()
            self._coordinator = None

    def _look(self) -> None:
        """Receive the coordinator's decisions; takes up to `_POLL_S`."""
        assert self._resolver is not None
        if self._admission is not None:
            self._learn_keys()
            self._resolver.admit(self._keys)
        self._resolver.ask(again=True)
        until = time.monotonic() + _POLL_S
        while (left_s := until - time.monotonic()) > 0 and not self._ended.is_set():
            if self._resolver.listen(left_s):
                self._heard_at = time.monotonic()
                self._primaries = dict(self._resolver.primaries)
                for info in self._primaries.values():
                    self._used |= (
                        {info.primary} if info.backup is None else {info.primary, info.backup}
                    )

    def _learn_keys(self) -> None:
        """Record the keys in the endpoints that processes have reported by now."""
        for boot, (shard, process) in self._copies.items():
            if boot not in self._keys:
                try:
                    self._keys[boot] = address_of(process.endpoint(time.monotonic())).key
                except WrongBuild as error:
                    self._lost[shard] = str(error)
                except GiveUp:
                    pass  # no endpoint yet; or it has ended, and `_report_deaths` finds out how

    def _report_deaths(self) -> None:
        """Forget processes that have ended, and record how."""
        for boot, (shard, process) in list(self._copies.items()):
            try:
                process.check()
            except GiveUp as error:
                moves = boot in self._moves
                self._lost[shard] = "the other moves to another machine" if moves else str(error)
                # No warning: a replaced copy ends as planned. `degraded_reason` warns if needed.
                logger(__name__, job=self._order.job, shard=shard).info("one copy ended: %s", error)
                self._moves.discard(boot)
                del self._copies[boot]
                self._keys.pop(boot, None)
                process.end()

    def _separate_copies(self, info: PrimaryInfo) -> None:
        """Replace a backup on its primary's machine by one on another machine.

        Does nothing while anything else is at risk.
        """
        same_machine, shard = self._starts.same_machine, info.shard
        if info.backup is None or self.degraded_reason or self._moves:
            return
        if not same_machine(info.primary, info.backup):
            return
        boot, since = self._offered[shard]
        has_part = {*self._used, info.primary, info.backup}
        spare = self._copies[boot][1] if boot in self._copies.keys() - has_part else None
        if spare is None:
            if time.monotonic() - since > _SPARE_S and self._starts.has_other_machine(info.primary):
                self._offer(shard)
        elif spare.pid is not None and self._serves(spare):
            if same_machine(info.primary, boot):
                spare.ask_to_end()  # it was placed on their machine after all
            else:
                self._moves.add(info.backup)
                self._copies[info.backup][1].ask_to_end()

    def _serves(self, spare: ProcessHandle) -> bool:
        """Return whether a process that reported its endpoint runs this build; stop it if not."""
        try:
            return bool(spare.endpoint(time.monotonic()))
        except WrongBuild:
            spare.ask_to_end()
        except GiveUp:
            pass  # it has died since, and `_report_deaths` finds out how
        return False

    def _waits(self, shard: int) -> bool:
        """Return whether a process is starting already, or one has failed a moment ago."""
        boot, since = self._offered[shard]
        age_s = time.monotonic() - since
        if boot in self._used:
            return False
        return age_s < (_SPARE_S if boot in self._copies else _AGAIN_S)

    def _offer(self, shard: int) -> None:
        """Start an empty process of this shard, for the coordinator to use."""
        self._boot = max(self._boot + 1, time.time_ns() // 1000)
        self._offered[shard] = self._boot, time.monotonic()
        order = CopyLaunch(
            self._specs[shard],
            self._boot,
            self._coordinator_at,
            self._bind,
            self._admission,
            self._advertised,
        )
        self._copies[self._boot] = shard, self._starts.copy(order, self._other_copies(shard))

    def _other_copies(self, shard: int) -> list[int]:
        """The boot numbers of the copies that a further copy of the shard should be apart from.

        Leaves out a replaced copy: it counts as dead, even if its process has yet to end.
        """
        info = self._primaries.get(shard)
        return [
            boot
            for boot, (of, _) in self._copies.items()
            if of == shard and (info is None or boot in {info.primary, info.backup})
        ]

    def _living(self, info: PrimaryInfo) -> list[int]:
        """The boot numbers of living processes that hold every acknowledged push."""
        copies = dict(self._copies)
        return [boot for boot in info.promotable if boot in copies and copies[boot][1].alive]

    def _part(self, boot: int, shard: int) -> str:
        info = self._primaries.get(shard)
        if info is not None and boot == info.primary:
            return "primary"
        return "backup" if info is not None and boot == info.backup else "spare"
