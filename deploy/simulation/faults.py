"""Faults as values with a time: a run is its setting, its seed and a list of faults.

A fault names its target: `w1` is a worker, `shard 0` the process of a shard, `primary 0` and
`backup 0` the copy of shard 0 that has this role when the fault strikes, and `coordinator` the
coordinator. An empty name stands for all. A fault without a target (a backup that has just died)
does nothing, so any subset of a list of faults is still a valid run.

To add a kind of fault, write a class here and a function in fault_generator.py that draws it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from deploy.simulation.network import FaultKind, LinkFault
from ps.session.admin_plans import SettingsChange

if TYPE_CHECKING:
    from deploy.simulation.shard_hosts import ShardHost
    from deploy.simulation.simulation import Simulation

NO_PROCESS = "no process"  # the end of a link without a process
AGAIN_S = 0.5  # a crash that would exceed the fault budget is retried after this


class Fault(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="fault",
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """A fault that strikes `at` this number of seconds from the start."""

    at: float

    def strike(self, world: "Simulation") -> None:
        """Apply the fault to the simulated cluster."""
        raise NotImplementedError


# --- the links ------------------------------------------------------------------------------------


class OnLinks(Fault, frozen=True, kw_only=True):
    """A fault of the links between `a` and `b` (empty: all processes) for `for_s` seconds."""

    for_s: float
    a: str = ""
    b: str = ""

    def _begin(
        self,
        world: "Simulation",
        kind: FaultKind,
        *,
        share: float = 1.0,
        slow_s: float = 0.0,
        one_way: bool = False,
    ) -> None:
        a, b = _end(world, self.a), _end(world, self.b)
        if NO_PROCESS not in {a, b}:
            until = world.clock.now + self.for_s
            world.network.begin(LinkFault(kind, until, a, b, one_way, share, slow_s))


class Lose(OnLinks, frozen=True, kw_only=True, tag="lose"):
    """A share of the messages is lost."""

    share: float

    def strike(self, world: "Simulation") -> None:
        self._begin(world, FaultKind.LOST, share=self.share)


class Double(OnLinks, frozen=True, kw_only=True, tag="double"):
    """A share of the messages arrives twice."""

    share: float

    def strike(self, world: "Simulation") -> None:
        self._begin(world, FaultKind.DOUBLED, share=self.share)


class Delay(OnLinks, frozen=True, kw_only=True, tag="delay"):
    """Each message takes up to `by_s` s longer, at random, so messages overtake each other."""

    by_s: float

    def strike(self, world: "Simulation") -> None:
        self._begin(world, FaultKind.SLOW, slow_s=self.by_s)


class Mangle(OnLinks, frozen=True, kw_only=True, tag="mangle"):
    """A share of the messages between workers and shards arrives as noise, or cut short."""

    share: float

    def strike(self, world: "Simulation") -> None:
        self._begin(world, FaultKind.MANGLED, share=self.share)


class CutLink(OnLinks, frozen=True, kw_only=True, tag="cut"):
    """All messages are lost; with `one_way`, only those from `a` to `b`."""

    one_way: bool = False

    def strike(self, world: "Simulation") -> None:
        self._begin(world, FaultKind.LOST, one_way=self.one_way)


class Clog(OnLinks, frozen=True, kw_only=True, tag="clog"):
    """Messages are held back, and arrive together when the fault is over."""

    def strike(self, world: "Simulation") -> None:
        self._begin(world, FaultKind.HELD)


def _end(world: "Simulation", name: str) -> str | None:
    """The process at the end of a link; None: any."""
    if not name:
        return None
    process = world.process(name)
    return NO_PROCESS if process is None else process.name


# --- processes ------------------------------------------------------------------------------------


class Kill(Fault, frozen=True, kw_only=True, tag="kill"):
    """A worker dies, and its next incarnation starts `back_s` later; a `zombie` keeps running."""

    target: str
    back_s: float
    zombie: bool = False

    def strike(self, world: "Simulation") -> None:
        world.kill(self.target, self.back_s, self.zombie)


class Freeze(Fault, frozen=True, kw_only=True, tag="freeze"):
    """A process stops for `for_s` seconds, as by SIGSTOP, and then continues."""

    target: str
    for_s: float

    def strike(self, world: "Simulation") -> None:
        process = world.process(self.target)
        if process is not None:
            process.frozen_until = world.clock.now + self.for_s
            world.thawed_at = max(world.thawed_at, process.frozen_until)


class Skew(Fault, frozen=True, kw_only=True, tag="skew"):
    """A process's monotonic clock runs at `rate` times the true speed from now on."""

    target: str
    rate: float

    def strike(self, world: "Simulation") -> None:
        process = world.process(self.target)
        if process is not None:
            process.skew(self.rate)


class Restart(Fault, frozen=True, kw_only=True, tag="restart"):
    """A shard dies and is restarted with the state that it had. For shards in single processes.

    With `lost_s` it is rolled back to its state that many seconds ago; without `reported`, which is
    beyond the fault budget, workers do not learn of it. A shard with a log recovers from its log.
    """

    shard: int
    lost_s: float = 0.0
    reported: bool = True

    def strike(self, world: "Simulation") -> None:
        for host in world.hosts[self.shard : self.shard + 1]:
            host.restart(self.lost_s, reported=self.reported)


class Tear(Fault, frozen=True, kw_only=True, tag="tear"):
    """A shard with a log dies during a disk operation, after `operations` further ones.

    With `power` the machine fails as well, and unflushed data is lost or torn.
    """

    shard: int
    operations: int
    back_s: float
    power: bool = False

    def strike(self, world: "Simulation") -> None:
        for host in world.hosts[self.shard : self.shard + 1]:
            host.die(self.back_s, power=self.power, operations=self.operations + 1)


class Outage(Fault, frozen=True, kw_only=True, tag="outage"):
    """All shards and workers die at once; with `power`, by a power failure."""

    back_s: float
    power: bool = False

    def strike(self, world: "Simulation") -> None:
        for host in world.hosts:
            host.die(self.back_s, power=self.power, operations=0)
        for number in range(world.setting.workers):
            world.kill(f"w{number}", self.back_s, zombie=False)


class FullDisk(Fault, frozen=True, kw_only=True, tag="full disk"):
    """A shard's disk is full for `for_s` seconds."""

    shard: int
    for_s: float

    def strike(self, world: "Simulation") -> None:
        for host in world.hosts[self.shard : self.shard + 1]:
            host.fill(self.for_s)


class ReshardFault(Fault, frozen=True, kw_only=True, tag="reshard"):
    """An operator reshards the job to `shards` shards: not a fault, but a target for faults.

    Just `before` the operator first sends a message of this type, or `after_s` seconds later, the
    old `shard` dies, or the new one if `fresh`. It dies only if it keeps a log, or is the primary
    of a group that is whole.
    """

    shards: int
    before: str = ""
    after_s: float = 0.0
    shard: int = 0
    fresh: bool = False

    def strike(self, world: "Simulation") -> None:
        world.reshard(self)


class HoldFault(Fault, frozen=True, kw_only=True, tag="hold"):
    """An operator quiesces the shards for `for_s` seconds and then resumes them, as a consistent
    read does: not a fault, but it may meet another operator.
    """

    for_s: float

    def strike(self, world: "Simulation") -> None:
        world.hold(self.for_s)


class SetFault(Fault, frozen=True, kw_only=True, tag="set"):
    """An operator changes settings of the job: not a fault, but a target for faults.

    With `sets_bound` the staleness bound becomes `bound` (None: no bound). The factor on the rates
    becomes `rate_factor`, unless that is None.
    """

    sets_bound: bool = False
    bound: int | None = None
    rate_factor: float | None = None

    def strike(self, world: "Simulation") -> None:
        world.change_settings(SettingsChange(self.sets_bound, self.bound, self.rate_factor))


class Crash(Fault, frozen=True, kw_only=True, tag="crash"):
    """A copy dies and loses its state; an empty one starts `back_s` later.

    Within the fault budget the crash waits until its group is whole; a `reckless` one does not. If
    `reported`, the coordinator sees the connection break; otherwise it notices the silence.
    """

    target: str
    back_s: float
    reckless: bool = False
    reported: bool = False

    def strike(self, world: "Simulation") -> None:
        for host in _hosts(world, self.target):
            died = host.crash(
                self.target, self.back_s, reckless=self.reckless, reported=self.reported
            )
            if not died and world.clock.now < world.setting.quiet_s:
                world.clock.after(AGAIN_S, self.strike, world)


class Ambush(Fault, frozen=True, kw_only=True, tag="ambush"):
    """A copy dies `after_s` seconds after its group comes in sync: its death must lose nothing."""

    target: str
    after_s: float
    back_s: float

    def strike(self, world: "Simulation") -> None:
        for host in _hosts(world, self.target):
            host.ambushes.append(self)


class Break(Fault, frozen=True, kw_only=True, tag="break"):
    """The coordinator's connection to a living copy breaks, so that it counts as dead."""

    target: str

    def strike(self, world: "Simulation") -> None:
        for host in _hosts(world, self.target):
            host.lose_connection(self.target)


class CoordinatorCrash(Fault, frozen=True, kw_only=True, tag="coordinator crash"):
    """The coordinator dies, and is restarted from its record `back_s` later."""

    back_s: float

    def strike(self, world: "Simulation") -> None:
        world.crash_coordinator(self.back_s)


def _hosts(world: "Simulation", role: str) -> "Sequence[ShardHost]":
    """The shard of a name such as `primary 0`; empty if the job has no such shard now."""
    number = int(role.partition(" ")[2])
    return world.hosts[number : number + 1]


AnyFault = (
    Lose
    | Double
    | Delay
    | Mangle
    | CutLink
    | Clog
    | Kill
    | Freeze
    | Skew
    | Restart
    | Tear
    | Outage
    | FullDisk
    | ReshardFault
    | HoldFault
    | SetFault
    | Crash
    | Ambush
    | Break
    | CoordinatorCrash
)
