"""What is kept of replicated shards: two copies each, and a coordinator, wherever they run.

A thread, the keeper, sees to it that what died is followed: the coordinator by one with the same
record and port, a copy by an empty process, which is brought up to date while training goes on. Who
serves is the coordinator's decision alone; the keeper only offers processes. How one is started and
watched is its host's to say: `ProcessFactory` and `ProcessHandle`.

Where they speak CURVE, each process makes a key of its own, which is in the endpoint that it tells.
So nothing secret is told to any of them, and the keeper, as the operator, tells the coordinator
which keys are the copies' (copy_registry.py).

Two copies may have to begin on one machine, for the other one joins later. Then an empty process is
started there, and once it has told that it serves, the backup ends and it is given the part: the
primary goes on, and a machine where nothing comes to serve costs nothing. Until the new backup has
caught up the shard has one copy, so shards do this one after another.
"""

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec
import zmq

from ps.cluster import Access, Cluster
from ps.job_spec import make_cluster
from ps.launch.child_protocol import CoordinatorLaunch, CopyLaunch
from ps.launch.launcher import (
    START_S,
    bind_address,
    bind_again,
    check_place,
    check_silence,
    keys_for,
)
from ps.security.authorization import Admission
from ps.security.keys import KeyPair, address_of
from ps.transport.coordinator_messages import PrimaryInfo
from ps.transport.primary_resolver import PrimaryResolver
from shards.errors import GiveUp, WrongBuild
from shards.spec import ShardSpec

_LOOK_S = 0.1
_AGAIN_S = 2.0  # after one that came to nothing
_AGAIN_MOST_S = 60.0  # when one coordinator after another comes to nothing: its disk may be mended
_SILENT_S = 5.0  # a coordinator that is there answers ten times a second
_SPARE_S = 30.0  # that a process may take to be given a part
_APART_S = 5.0  # between two looks at whether copies can be apart that are not
_START_S = 3 * START_S  # two processes a shard, and one more


class ProcessHandle(Protocol):
    """One process, from its host's side."""

    @property
    def pid(self) -> int | None:
        """Its process id where it runs; None until it has told."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it has not ended, as far as is known; returns at once."""
        ...

    def endpoint(self, until: float) -> str:
        """Where it listens; waits until `until` on the monotonic clock, and raises why not."""
        ...

    def check(self) -> None:
        """Raise GiveUp with how it ended, if it has; returns at once."""
        ...

    def ask_to_end(self) -> None: ...

    def end(self) -> None:
        """Wait until it has ended; kill it when that takes long."""
        ...


class ProcessFactory(Protocol):
    """How a host starts processes; neither call waits for one."""

    def coordinator(self, order: CoordinatorLaunch) -> ProcessHandle:
        """Start it; every one of a job finds the same record."""
        ...

    def copy(self, order: CopyLaunch, beside: Collection[int]) -> ProcessHandle:
        """Start a copy; `beside` are the boot numbers of those that it should not die with."""
        ...

    def together(self, boot: int, other: int) -> bool:
        """Whether these two copies die together with the machine that they are on."""
        ...

    def elsewhere(self, boot: int) -> bool:
        """Whether there is a machine now that this copy is not on."""
        ...


class ReplicatedShards:
    """The processes of one job, and the cluster they form."""

    restart_enabled = True
    """Whatever it is set to: a backup that follows takes nothing back."""

    def __init__(self, cluster: Cluster, keeper: "_ReplicaSupervisor") -> None:
        self.cluster = cluster
        self._keeper = keeper

    @property
    def pids(self) -> dict[str, int]:
        """Each living process by its part: `coordinator`, `shard 0 primary`, `shard 0 backup`.

        One that has no part yet is a `shard 0 spare`. As of a moment ago. In Ray the ids are those
        of the nodes where they run.
        """
        return self._keeper.pids()

    @property
    def redundant(self) -> bool:
        """Whether every shard could lose a copy now and no acknowledged push; as of just now."""
        return self._keeper.redundant

    @property
    def degraded_reason(self) -> str:
        """Why the next death would not be survived, in words; empty where it would."""
        return self._keeper.degraded_reason

    def check(self) -> None:
        """Raise GiveUp naming a shard that nobody is left of who holds its pushes."""
        self._keeper.check()

    def lost_updates(self) -> list[str]:
        """Nothing: a death that is survived costs nothing that was acknowledged."""
        return []

    def delete_logs(self) -> None:
        """Nothing: they keep none."""


@contextmanager
def supervise(
    specs: Sequence[ShardSpec],
    starts: ProcessFactory,
    *,
    host: str,
    silence_s: float,
    record: str,
    secure: bool | None = None,
) -> Iterator[ReplicatedShards]:
    """Start a coordinator and two copies a spec by `starts`; end them on leaving.

    Returns when each shard has a backup. All listen on `host`, wherever is free, and are told as
    their own machine's address where that is 0.0.0.0; the coordinator's `record` is a path where it
    runs. `silence_s` is how long a copy may be silent before it counts as dead; one whose
    connection breaks does so at once. Where other hosts can reach them, all links speak CURVE and
    let in this job's alone, unless `secure` says otherwise.
    Raises BadInput when an address cannot be had, GiveUp with the cause when a process does not
    start within minutes, WrongBuild when it runs other code.
    """
    check_place(specs, host, secure=secure)
    check_silence(silence_s, specs[0].lease_s)
    keeper = _ReplicaSupervisor(
        specs, starts, host, silence_s, record, keys_for(specs, host, secure)
    )
    try:
        cluster = keeper.begin()
        keeper.start()
        yield ReplicatedShards(cluster, keeper)
    finally:
        keeper.stop()


class _ReplicaSupervisor:
    """Starts what is missing. Its thread begins when all are there; until then it is the caller."""

    def __init__(
        self,
        specs: Sequence[ShardSpec],
        starts: ProcessFactory,
        host: str,
        silence_s: float,
        record: str,
        keys: tuple[Access | None, Admission | None],
    ) -> None:
        self._specs = specs
        self._starts = starts
        self._host = host
        self._access, self._admission = keys
        self._order = CoordinatorLaunch(
            specs[0].job, len(specs), record, bind_address(host, 0, 0), silence_s, self._admission
        )
        self._coordinator_at = ""
        self._keys: dict[int, str] = {}  # by boot number, of those that have told
        self._coordinator: ProcessHandle | None = None
        self._copies: dict[int, tuple[int, ProcessHandle]] = {}  # shard and process, by boot number
        self._offered: dict[int, tuple[int, float]] = {}  # the last process of each shard, and when
        self._used: set[int] = set()
        self._moves: set[int] = set()  # backups that end for one on another machine
        self._apart_at = 0.0
        self._began_at = 0.0
        self._pause_s = _AGAIN_S  # between one coordinator's beginning and the next one's
        self._heard_at = 0.0
        self._boot = 0
        self._seats: dict[int, PrimaryInfo] = {}
        self._lost: dict[int, str] = {}  # how a shard's last process ended
        self._lost_coordinator = "it is there, and silent"
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        self._context = zmq.Context()
        self._guide: PrimaryResolver | None = None

    # --- what others ask --------------------------------------------------------------------------

    def pids(self) -> dict[str, int]:
        lives = {} if self._coordinator is None else {"coordinator": self._coordinator}
        for boot, (shard, life) in list(self._copies.items()):
            if life.alive:
                lives[f"shard {shard} {self._part(boot, shard)}"] = life
        return {part: pid for part, life in lives.items() if (pid := life.pid) is not None}

    @property
    def redundant(self) -> bool:
        return all(
            shard in self._seats and len(self._living(self._seats[shard])) == 2
            for shard in range(len(self._specs))
        )

    @property
    def degraded_reason(self) -> str:
        risks = []
        if time.monotonic() - self._heard_at > _SILENT_S:
            risks.append(f"no coordinator answers: {self._lost_coordinator}")
        for shard, seat in sorted(self._seats.items()):
            if len(self._living(seat)) < 2:
                how = self._lost.get(shard, "the other has not caught up")
                risks.append(f"shard {shard} has one copy only: {how}")
        return "; ".join(risks)

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure
        for shard, seat in list(self._seats.items()):
            if not self._living(seat):
                how = self._lost.get(shard, "its processes have died")
                raise GiveUp(f"shard {shard} has no copy left that holds its pushes: {how}")

    # --- beginning and end ------------------------------------------------------------------------

    def begin(self) -> Cluster:
        """Start everything, and wait until each shard has a backup."""
        until = time.monotonic() + _START_S
        self._coordinator = self._starts.coordinator(self._order)
        self._coordinator_at = self._coordinator.endpoint(until)
        again = bind_again(self._order.bind, self._coordinator_at)
        self._order = msgspec.structs.replace(self._order, bind=again)
        for spec in (*self._specs, *self._specs):
            self._offer(spec.shard)
        for boot, (_, life) in list(self._copies.items()):
            self._keys[boot] = address_of(life.endpoint(until)).key
        cluster = make_cluster(self._specs, [""] * len(self._specs), self._access)
        cluster = msgspec.structs.replace(cluster, coordinator=self._coordinator_at)
        own = None if self._access is None else KeyPair.of(self._access.operator)
        self._guide = PrimaryResolver(cluster, self._context, own)
        while not self.redundant:
            if time.monotonic() > until:
                raise GiveUp(f"replicated shards: not all had a backup within {_START_S:g} s")
            for _, life in self._copies.values():
                life.check()
            self._look()
        endpoints = tuple(self._seats[shard].endpoint for shard in range(len(self._specs)))
        return msgspec.structs.replace(cluster, endpoints=endpoints)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        lives = [life for _, life in self._copies.values()]
        if self._coordinator is not None:
            lives.append(self._coordinator)
        for life in lives:
            life.ask_to_end()
        for life in lives:
            life.end()
        self._context.destroy(linger=0)

    # --- keeping ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._keep()
        except BaseException as error:  # noqa: BLE001  # whatever it is, `check` raises it
            self._failure = error

    def _keep(self) -> None:
        self._keep_coordinator()
        self._look()
        self._report_deaths()
        for seat in list(self._seats.values()):
            if seat.lonely and not self._waits(seat.shard):
                self._offer(seat.shard)
        if (now := time.monotonic()) >= self._apart_at:
            self._apart_at = now + _APART_S
            for seat in list(self._seats.values()):
                self._part_copies(seat)

    def _keep_coordinator(self) -> None:
        """Start it again, at longer intervals while none of them comes to answer."""
        assert self._coordinator is not None
        try:
            self._coordinator.check()
        except GiveUp as error:
            self._lost_coordinator = str(error)
            if time.monotonic() - self._began_at > self._pause_s:
                self._began_at = time.monotonic()
                self._pause_s = min(2 * self._pause_s, _AGAIN_MOST_S)
                self._coordinator.end()
                self._coordinator = self._starts.coordinator(self._order)

    def _look(self) -> None:
        """Hear what the coordinator has decided; takes a moment."""
        assert self._guide is not None
        if self._admission is not None:
            self._learn_keys()
            self._guide.admit(self._keys)
        self._guide.ask(again=True)
        until = time.monotonic() + _LOOK_S
        while (left_s := until - time.monotonic()) > 0 and not self._ended.is_set():
            if self._guide.listen(left_s):
                self._heard_at, self._pause_s = time.monotonic(), _AGAIN_S
                self._seats = dict(self._guide.seats)
                for seat in self._seats.values():
                    self._used |= {
                        seat.primary,
                        seat.primary if seat.backup is None else seat.backup,
                    }

    def _learn_keys(self) -> None:
        """By the endpoints of processes that have told theirs by now."""
        for boot, (shard, life) in self._copies.items():
            if boot not in self._keys:
                try:
                    self._keys[boot] = address_of(life.endpoint(time.monotonic())).key
                except WrongBuild as error:
                    self._lost[shard] = str(error)
                except GiveUp:
                    pass  # not yet; or it has ended, and `_bury` asks how

    def _report_deaths(self) -> None:
        """Forget processes that have ended."""
        for boot, (shard, life) in list(self._copies.items()):
            try:
                life.check()
            except GiveUp as error:
                moves = boot in self._moves
                self._lost[shard] = "the other goes to another machine" if moves else str(error)
                self._moves.discard(boot)
                del self._copies[boot]
                self._keys.pop(boot, None)
                life.end()

    def _part_copies(self, seat: PrimaryInfo) -> None:
        """Have a backup that would die together with its primary be followed by one that would not.

        Nothing while anything else is at risk.
        """
        together, shard = self._starts.together, seat.shard
        if seat.backup is None or self.degraded_reason or self._moves:
            return
        if not together(seat.primary, seat.backup):
            return
        boot, since = self._offered[shard]
        has_part = {*self._used, seat.primary, seat.backup}
        spare = self._copies[boot][1] if boot in self._copies.keys() - has_part else None
        if spare is None:
            if time.monotonic() - since > _SPARE_S and self._starts.elsewhere(seat.primary):
                self._offer(shard)
        elif spare.pid is not None and self._serves(spare):
            if together(seat.primary, boot):
                spare.ask_to_end()  # it has come up beside them all the same
            else:
                self._moves.add(seat.backup)
                self._copies[seat.backup][1].ask_to_end()

    def _serves(self, spare: ProcessHandle) -> bool:
        """Whether one that has told where it listens runs this build; another build's is ended."""
        try:
            return bool(spare.endpoint(time.monotonic()))
        except WrongBuild:
            spare.ask_to_end()
        except GiveUp:
            pass  # it has died since, and `_bury` asks how
        return False

    def _waits(self, shard: int) -> bool:
        """Whether a process is on its way already, or the last one came to nothing just now."""
        boot, since = self._offered[shard]
        age_s = time.monotonic() - since
        if boot in self._used:
            return False
        return age_s < (_SPARE_S if boot in self._copies else _AGAIN_S)

    def _offer(self, shard: int) -> None:
        """Start an empty process."""
        self._boot = max(self._boot + 1, time.time_ns() // 1000)
        self._offered[shard] = self._boot, time.monotonic()
        bind = bind_address(self._host, 0, 0)
        order = CopyLaunch(
            self._specs[shard], self._boot, self._coordinator_at, bind, self._admission
        )
        self._copies[self._boot] = shard, self._starts.copy(order, self._colocated(shard))

    def _colocated(self, shard: int) -> list[int]:
        """The copies of a shard, of which a further one should be apart.

        Not one that was replaced: it counts as dead, whatever its host knows by now.
        """
        seat = self._seats.get(shard)
        return [
            boot
            for boot, (of, _) in self._copies.items()
            if of == shard and (seat is None or boot in {seat.primary, seat.backup})
        ]

    def _living(self, seat: PrimaryInfo) -> list[int]:
        """The processes that hold every acknowledged push."""
        copies = dict(self._copies)
        return [boot for boot in seat.promotable if boot in copies and copies[boot][1].alive]

    def _part(self, boot: int, shard: int) -> str:
        seat = self._seats.get(shard)
        if seat is not None and boot == seat.primary:
            return "primary"
        return "backup" if seat is not None and boot == seat.backup else "spare"
