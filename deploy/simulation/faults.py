"""What can go wrong, as values with a time: a run is its setting, its seed and a list of these.

A fault names whom it strikes as a person would: `w1` is a worker, `shard 0` the process of a shard,
`primary 0` and `backup 0` whichever copy of shard 0 holds that part when the fault strikes,
`coordinator`. An empty name is everybody. One that strikes nobody (the backup that has just died)
does nothing, so any fault can be taken out of a list, or all but it, and the rest still is a run.

A new kind of fault is one class here, and one line in fault_generator.py that draws it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from deploy.simulation.network import FaultKind, LinkFault

if TYPE_CHECKING:
    from deploy.simulation.shard_hosts import ShardHost
    from deploy.simulation.simulation import Simulation

NOBODY = "nobody"  # the end of a link that is not there
AGAIN_S = 0.5  # later, a crash that would break the budget tries once more


class Fault(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="fault",
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """Something that goes wrong `at` so many seconds from the start."""

    at: float

    def strike(self, world: "Simulation") -> None:
        """Make it happen."""
        raise NotImplementedError


# --- the links ------------------------------------------------------------------------------------


class OnLinks(Fault, frozen=True, kw_only=True):
    """For `for_s` seconds, between `a` and `b`; empty is everybody."""

    for_s: float
    a: str = ""
    b: str = ""

    def _suffer(
        self,
        world: "Simulation",
        ill: FaultKind,
        *,
        share: float = 1.0,
        slow_s: float = 0.0,
        one_way: bool = False,
    ) -> None:
        a, b = _end(world, self.a), _end(world, self.b)
        if NOBODY not in {a, b}:
            until = world.clock.now + self.for_s
            world.network.suffer(LinkFault(ill, until, a, b, one_way, share, slow_s))


class Lose(OnLinks, frozen=True, kw_only=True, tag="lose"):
    """A share of the messages is lost."""

    share: float

    def strike(self, world: "Simulation") -> None:
        self._suffer(world, FaultKind.LOST, share=self.share)


class Double(OnLinks, frozen=True, kw_only=True, tag="double"):
    """A share of the messages arrives twice."""

    share: float

    def strike(self, world: "Simulation") -> None:
        self._suffer(world, FaultKind.DOUBLED, share=self.share)


class Delay(OnLinks, frozen=True, kw_only=True, tag="delay"):
    """Messages take up to `by_s` longer, each its own time, so that they overtake each other."""

    by_s: float

    def strike(self, world: "Simulation") -> None:
        self._suffer(world, FaultKind.SLOW, slow_s=self.by_s)


class Mangle(OnLinks, frozen=True, kw_only=True, tag="mangle"):
    """A share of the messages between workers and shards arrives as noise, or cut short."""

    share: float

    def strike(self, world: "Simulation") -> None:
        self._suffer(world, FaultKind.MANGLED, share=self.share)


class CutLink(OnLinks, frozen=True, kw_only=True, tag="cut"):
    """Nothing gets through; with `one_way`, nothing from `a` to `b`."""

    one_way: bool = False

    def strike(self, world: "Simulation") -> None:
        self._suffer(world, FaultKind.LOST, one_way=self.one_way)


class Clog(OnLinks, frozen=True, kw_only=True, tag="clog"):
    """Messages are held, and arrive together when it is over."""

    def strike(self, world: "Simulation") -> None:
        self._suffer(world, FaultKind.HELD)


def _end(world: "Simulation", name: str) -> str | None:
    """The end of a link that is meant: None is any."""
    if not name:
        return None
    party = world.party(name)
    return NOBODY if party is None else party.name


# --- processes ------------------------------------------------------------------------------------


class Kill(Fault, frozen=True, kw_only=True, tag="kill"):
    """A worker dies, and its next life begins `back_s` later; a `zombie` was only believed dead."""

    who: str
    back_s: float
    zombie: bool = False

    def strike(self, world: "Simulation") -> None:
        world.kill(self.who, self.back_s, self.zombie)


class Freeze(Fault, frozen=True, kw_only=True, tag="freeze"):
    """A process stops for `for_s` seconds, as by SIGSTOP, and goes on where it was."""

    who: str
    for_s: float

    def strike(self, world: "Simulation") -> None:
        party = world.party(self.who)
        if party is not None:
            party.frozen_until = world.clock.now + self.for_s
            world.thawed_at = max(world.thawed_at, party.frozen_until)


class Skew(Fault, frozen=True, kw_only=True, tag="skew"):
    """A process's monotonic clock runs at `rate` from now on."""

    who: str
    rate: float

    def strike(self, world: "Simulation") -> None:
        party = world.party(self.who)
        if party is not None:
            party.skew(self.rate)


class Restart(Fault, frozen=True, kw_only=True, tag="restart"):
    """A shard dies and comes back with the state it had.

    With `lost_s` it is rolled back to an older one; beyond the budget nobody is `told` so. Of
    shards in single processes; one with a log is killed, and goes on from its log.
    """

    shard: int
    lost_s: float = 0.0
    told: bool = True

    def strike(self, world: "Simulation") -> None:
        for host in world.hosts[self.shard : self.shard + 1]:
            host.restart(self.lost_s, told=self.told)


class Tear(Fault, frozen=True, kw_only=True, tag="tear"):
    """A shard with a log dies in the midst of its disk's next operation but so many.

    With `power` the machine dies with it, and what was not safe is lost or torn.
    """

    shard: int
    operations: int
    back_s: float
    power: bool = False

    def strike(self, world: "Simulation") -> None:
        for host in world.hosts[self.shard : self.shard + 1]:
            host.die(self.back_s, power=self.power, operations=self.operations + 1)


class Outage(Fault, frozen=True, kw_only=True, tag="outage"):
    """Everything dies at once, workers, too; with `power`, as when that fails."""

    back_s: float
    power: bool = False

    def strike(self, world: "Simulation") -> None:
        for host in world.hosts:
            host.die(self.back_s, power=self.power, operations=0)
        for number in range(world.setting.workers):
            world.kill(f"w{number}", self.back_s, zombie=False)


class FullDisk(Fault, frozen=True, kw_only=True, tag="full disk"):
    """For `for_s` seconds there is no room on a shard's disk."""

    shard: int
    for_s: float

    def strike(self, world: "Simulation") -> None:
        for host in world.hosts[self.shard : self.shard + 1]:
            host.fill(self.for_s)


class ReshardFault(Fault, frozen=True, kw_only=True, tag="move"):
    """No fault, but what others may strike: an operator moves the job to so many shards.

    Just `before` it first asks a question of this kind, or `after_s` seconds later, the old `shard`
    dies, or the `fresh` one: if it keeps a log; and of a group that is whole, its primary.
    """

    shards: int
    before: str = ""
    after_s: float = 0.0
    shard: int = 0
    fresh: bool = False

    def strike(self, world: "Simulation") -> None:
        world.move(self)


class Crash(Fault, frozen=True, kw_only=True, tag="crash"):
    """A copy dies and remembers nothing; an empty one follows `back_s` later.

    Within the budget it waits until its group is whole; `reckless` it does not. The coordinator is
    `told` by a connection that broke, or notices the silence.
    """

    who: str
    back_s: float
    reckless: bool = False
    told: bool = False

    def strike(self, world: "Simulation") -> None:
        for host in _hosts(world, self.who):
            died = host.crash(self.who, self.back_s, reckless=self.reckless, told=self.told)
            if not died and world.clock.now < world.setting.quiet_s:
                world.clock.after(AGAIN_S, self.strike, world)


class Ambush(Fault, frozen=True, kw_only=True, tag="ambush"):
    """A copy dies `after_s` seconds after its group next comes in sync: as the promise begins."""

    who: str
    after_s: float
    back_s: float

    def strike(self, world: "Simulation") -> None:
        for host in _hosts(world, self.who):
            host.ambushes.append(self)


class Break(Fault, frozen=True, kw_only=True, tag="break"):
    """The coordinator's connection to a living copy breaks, which is taken for its death."""

    who: str

    def strike(self, world: "Simulation") -> None:
        for host in _hosts(world, self.who):
            host.lose_connection(self.who)


class CoordinatorCrash(Fault, frozen=True, kw_only=True, tag="coordinator crash"):
    """The coordinator dies, and comes back from its record `back_s` later."""

    back_s: float

    def strike(self, world: "Simulation") -> None:
        world.crash_coordinator(self.back_s)


def _hosts(world: "Simulation", role: str) -> "Sequence[ShardHost]":
    """The shard in a name like `primary 0`, where the job has one of that number now."""
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
    | Crash
    | Ambush
    | Break
    | CoordinatorCrash
)
