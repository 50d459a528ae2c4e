"""What a seed stands for: a cluster, and faults drawn for it.

Swarm testing (Groce et al. 2012): each seed leaves out most kinds of faults, because a run with all
of them seldom gets far enough to meet the rare states. Which are on, how often, when and how hard
is drawn here, once and in advance, so that a run is data: it can be written down, and made smaller.
"""

import random
from collections.abc import Callable

import msgspec

from ps.durability import Durability
from ps.simulation import faults
from ps.simulation.faults import AnyFault
from ps.simulation.scenarios import Profile, Scenario
from ps.simulation.setting import Cluster, Setting
from shards.spec import Merge

Draw = random.Random
Drawn = Callable[[Draw, Setting], list[AnyFault]]

ON = 0.4  # the share of seeds in which a kind of fault happens at all
MOVED = 0.25  # the share in which the job moves
BURSTS = 0.4  # the share of bounded clusters in memory that push more than once a read
SLOTS = 0.4  # the share whose update rule keeps slots, as far as its pushes arrive as they were
FIRST_S = 0.3

HALVES = ("fp16", "bf16")
_LEVELS = (Durability.PROCESS, Durability.LOGGED, Durability.LOGGED)
SPARSE_CHANGES = "topk:0.02"
SPARSE = ("topk:0.004", "threshold:30", "threshold:100")
CHANGES = ("int8", "4bit", SPARSE_CHANGES)
# One slot that forgets and one that sums up; two of them, and a step that depends on the count.
RULES_WITH_SLOTS = ("momentum", "adagrad", "adam")


def swarm(seed: int, profile: Profile = Profile.WITHIN, cluster: Cluster | None = None) -> Scenario:
    """The scenario of a seed; the kind of cluster is drawn, too, unless it is named."""
    draw = random.Random(f"{profile} {seed}")
    kind = cluster or draw.choices(list(Cluster), (3, 1, 2, 4))[0]
    setting = _setting(draw, kind)
    if kind is Cluster.LOGGED and profile is Profile.BEYOND:
        setting = msgspec.structs.replace(setting, durability=Durability.PROCESS)
    found: list[AnyFault] = []
    for wanted in _wanted(setting, profile):
        if draw.random() < ON:
            for _ in range(draw.randint(1, 3)):
                found += wanted(draw, setting)
    if profile is Profile.WITHIN and setting.durability is Durability.PROCESS:
        found = [_with_the_power_on(fault) for fault in found]
    if profile is Profile.WITHIN and draw.random() < MOVED:
        found += _move(draw, setting)
        # A shard in memory that dies ends its job; only a log brings back where it was moving.
        found = [f for f in found if kind is Cluster.LOGGED or not isinstance(f, faults.Restart)]
    found.sort(key=lambda fault: fault.at)
    if draw.random() < SLOTS and setting.push not in SPARSE:
        rule, state_s = draw.choice(RULES_WITH_SLOTS), draw.choice([0.0, 0.5])
        setting = msgspec.structs.replace(setting, rule=rule, state_s=state_s)
    if _may_burst(setting) and draw.random() < BURSTS:
        setting = msgspec.structs.replace(setting, burst=draw.choice([2, 3]))
    return Scenario(seed=seed, profile=profile, setting=setting, faults=tuple(found))


def _setting(draw: Draw, cluster: Cluster) -> Setting:
    replicated, logged = cluster is Cluster.REPLICATED, cluster is Cluster.LOGGED
    push, pull = _compression(draw) if cluster is Cluster.COMPRESSED else ("none", "none")
    rounds = push not in SPARSE and draw.random() < 0.3
    bound = 0 if rounds else draw.choice([0, 1, 2, 4, None])
    return Setting(
        cluster=cluster,
        shards=draw.choice([1, 1, 2] if replicated else [1, 2, 2, 3]),
        workers=draw.randint(1, 3),
        bound=bound,
        steps=draw.choice([4, 6, 9]),
        in_flight=draw.randint(1, 3),
        prefetch=bound != 0 and draw.random() < 0.5,
        merge=Merge.ROUND if rounds else Merge.EACH,
        warm_steps=draw.choice([0, 0, 3, 10]),
        lease_s=draw.choice([2.0, 4.0]),
        delay_s=draw.choice([0.02, 0.1, 0.3]),
        busy_s=0.0 if replicated else draw.choice([0.0, 0.0, 0.5]),
        push=push,
        pull=pull,
        durability=draw.choice(_LEVELS) if logged else Durability.LOGGED,
        log_bytes=draw.choice([1 << 12, 1 << 13, 1 << 20]) if logged else 1 << 20,
    )


def _may_burst(setting: Setting) -> bool:
    """Where shards are rolled back; a round takes one push of each worker."""
    in_memory = setting.cluster in (Cluster.SINGLE, Cluster.COMPRESSED)
    return in_memory and setting.bound is not None and setting.merge is Merge.EACH


def _compression(draw: Draw) -> tuple[str, str]:
    """Codecs that are exact on the simulation's whole numbers."""
    push = draw.choice(("none", *HALVES, *SPARSE))
    return push, draw.choice(("none", "bf16") if push in SPARSE else ("none", *CHANGES))


def _wanted(setting: Setting, profile: Profile) -> list[Drawn]:
    """The kinds of faults that may befall a cluster."""
    kinds: list[Drawn] = [_lose, _double, _delay, _cut, _clogs, _freeze, _skew]
    if setting.push not in SPARSE:
        kinds += [_kill]  # a new life begins without a residual, which would be missed
        # Sparse changes that are cut short may be fewer changes, which TCP would notice.
        kinds += [] if setting.pull == SPARSE_CHANGES else [_mangle]
    if setting.cluster is Cluster.REPLICATED:
        kinds += [_coordinator, _crash, _ambush, _break]
        return [*kinds, _reckless] if profile is Profile.BEYOND else kinds
    if setting.cluster is Cluster.LOGGED:
        return [*kinds, _restart, _tear, _tear, _outage, _full_disk]
    return [*kinds, *((_unnoticed,) if profile is Profile.BEYOND else (_restart, _roll_back))]


# --- who and when ---------------------------------------------------------------------------------


def _time(draw: Draw, setting: Setting) -> float:
    return _rounded(draw.uniform(FIRST_S, setting.quiet_s))


def _rounded(value: float) -> float:
    return round(value, 3)


def _lasting(draw: Draw, longest_s: float) -> float:
    return _rounded(draw.uniform(0.1, longest_s))


def _worker(draw: Draw, setting: Setting) -> str:
    return f"w{draw.randrange(setting.workers)}"


def _shard(draw: Draw, setting: Setting) -> str:
    number = draw.randrange(setting.shards)
    if setting.cluster is Cluster.REPLICATED:
        return f"{draw.choice(('primary', 'primary', 'backup'))} {number}"
    return f"shard {number}"


def _anybody(draw: Draw, setting: Setting) -> str:
    if setting.cluster is Cluster.REPLICATED and draw.random() < 0.2:
        return "coordinator"
    return draw.choice((_worker, _shard, _shard))(draw, setting)


def _link(draw: Draw, setting: Setting) -> dict[str, str]:
    """Both ends of a link, or one end and everybody."""
    a = _anybody(draw, setting)
    if a.startswith("w"):
        return {"a": a, "b": draw.choice(("", _shard(draw, setting)))}
    if setting.cluster is not Cluster.REPLICATED:
        return {"a": a, "b": draw.choice(("", _worker(draw, setting)))}
    number = draw.randrange(setting.shards)
    others = ("", f"primary {number}", f"backup {number}", "coordinator")
    return {"a": a, "b": draw.choice([name for name in others if name != a])}


def _everywhere(draw: Draw, setting: Setting) -> dict[str, str]:
    return {} if draw.random() < 0.7 else _link(draw, setting)


# --- the kinds ------------------------------------------------------------------------------------


def _lose(draw: Draw, setting: Setting) -> list[AnyFault]:
    at, for_s, share = _time(draw, setting), _lasting(draw, 4), draw.choice([0.1, 0.3, 0.6])
    return [faults.Lose(at=at, for_s=for_s, share=share, **_everywhere(draw, setting))]


def _double(draw: Draw, setting: Setting) -> list[AnyFault]:
    at, for_s, share = _time(draw, setting), _lasting(draw, 6), draw.choice([0.1, 0.5])
    return [faults.Double(at=at, for_s=for_s, share=share, **_everywhere(draw, setting))]


def _delay(draw: Draw, setting: Setting) -> list[AnyFault]:
    at, for_s, by_s = _time(draw, setting), _lasting(draw, 4), draw.choice([0.3, 1.0, 2.5])
    return [faults.Delay(at=at, for_s=for_s, by_s=by_s, **_everywhere(draw, setting))]


def _mangle(draw: Draw, setting: Setting) -> list[AnyFault]:
    at, for_s = _time(draw, setting), _lasting(draw, 2)
    return [faults.Mangle(at=at, for_s=for_s, share=0.3, **_everywhere(draw, setting))]


def _cut(draw: Draw, setting: Setting) -> list[AnyFault]:
    at, for_s = _time(draw, setting), _lasting(draw, 1.5 * setting.lease_s)
    return [faults.Cut(at=at, for_s=for_s, one_way=draw.random() < 0.4, **_link(draw, setting))]


def _clogs(draw: Draw, setting: Setting) -> list[AnyFault]:
    """Swizzled: one after another some are clogged, and they come free in another order."""
    begin, found = _time(draw, setting), list[AnyFault]()
    for _ in range(draw.randint(1, 3)):
        at = _rounded(begin + draw.uniform(0, 1))
        found.append(faults.Clog(at=at, for_s=_lasting(draw, 3), a=_anybody(draw, setting)))
    return found


def _freeze(draw: Draw, setting: Setting) -> list[AnyFault]:
    at, who = _time(draw, setting), _anybody(draw, setting)
    return [faults.Freeze(at=at, who=who, for_s=_lasting(draw, 2 * setting.lease_s))]


def _skew(draw: Draw, setting: Setting) -> list[AnyFault]:
    at, who = _time(draw, setting), _anybody(draw, setting)
    return [faults.Skew(at=at, who=who, rate=draw.choice([0.8, 0.95, 1.05, 1.25]))]


def _kill(draw: Draw, setting: Setting) -> list[AnyFault]:
    at, who = _time(draw, setting), _worker(draw, setting)
    back_s = _lasting(draw, 2 * setting.lease_s)
    return [faults.Kill(at=at, who=who, back_s=back_s, zombie=draw.random() < 0.4)]


def _restart(draw: Draw, setting: Setting) -> list[AnyFault]:
    return [faults.Restart(at=_time(draw, setting), shard=draw.randrange(setting.shards))]


def _roll_back(draw: Draw, setting: Setting) -> list[AnyFault]:
    at, shard = _time(draw, setting), draw.randrange(setting.shards)
    return [faults.Restart(at=at, shard=shard, lost_s=_lasting(draw, 3))]


def _unnoticed(draw: Draw, setting: Setting) -> list[AnyFault]:
    return [msgspec.structs.replace(f, told=False) for f in _roll_back(draw, setting)]


def _tear(draw: Draw, setting: Setting) -> list[AnyFault]:
    at, shard, back_s = _time(draw, setting), draw.randrange(setting.shards), _lasting(draw, 2)
    operations, power = draw.randrange(12), draw.random() < 0.6
    return [faults.Tear(at=at, shard=shard, operations=operations, back_s=back_s, power=power)]


def _outage(draw: Draw, setting: Setting) -> list[AnyFault]:
    at, back_s = _time(draw, setting), _lasting(draw, 2)
    return [faults.Outage(at=at, back_s=back_s, power=draw.random() < 0.6)]


def _full_disk(draw: Draw, setting: Setting) -> list[AnyFault]:
    at, shard = _time(draw, setting), draw.randrange(setting.shards)
    return [faults.FullDisk(at=at, shard=shard, for_s=_lasting(draw, 2))]


def _move(draw: Draw, setting: Setting) -> list[AnyFault]:
    times = range(draw.choice((1, 1, 1, 2)))
    moves = [faults.Move(at=_time(draw, setting), shards=draw.randint(1, 3)) for _ in times]
    if setting.cluster not in (Cluster.LOGGED, Cluster.REPLICATED):
        return [*moves]
    return [fault for move in moves for fault in _with_a_death(draw, setting, move)]


def _with_a_death(draw: Draw, setting: Setting, move: faults.Move) -> list[AnyFault]:
    """The moments between two questions are too short for other faults to strike often."""
    before = draw.choice(("", "Hold", "Export", "Install", "Retire", "Retire"))
    dies = draw.randrange(setting.shards)
    replicated = setting.cluster is Cluster.REPLICATED
    fresh = replicated and draw.random() < 0.3
    after_s = _rounded(draw.uniform(0.0, 4 * setting.delay_s)) if before == "Install" else 0.0
    found: list[AnyFault] = [
        msgspec.structs.replace(move, before=before, after_s=after_s, shard=dies, fresh=fresh)
    ]
    if before == "Retire" and draw.random() < 0.5:
        at = _rounded(move.at + draw.uniform(0.3, 1.5))  # shard 0, which decides, is not heard
        first = "primary 0" if replicated else "shard 0"
        found.append(faults.Cut(at=at, for_s=_lasting(draw, 4), a=first))
    return found


def _with_the_power_on(fault: AnyFault) -> AnyFault:
    """The page cache survives processes, which is all that `process` promises."""
    powerless = isinstance(fault, faults.Tear | faults.Outage)
    return msgspec.structs.replace(fault, power=False) if powerless else fault


def _coordinator(draw: Draw, setting: Setting) -> list[AnyFault]:
    return [faults.CoordinatorCrash(at=_time(draw, setting), back_s=_lasting(draw, 4))]


def _crash(draw: Draw, setting: Setting) -> list[AnyFault]:
    at, who = _time(draw, setting), _shard(draw, setting)
    back_s, told = _lasting(draw, 3), draw.random() < 0.3
    return [faults.Crash(at=at, who=who, back_s=back_s, told=told)]


def _reckless(draw: Draw, setting: Setting) -> list[AnyFault]:
    at, who = _time(draw, setting), _shard(draw, setting)
    return [faults.Crash(at=at, who=who, back_s=_lasting(draw, 3), reckless=True)]


def _break(draw: Draw, setting: Setting) -> list[AnyFault]:
    return [faults.Break(at=_time(draw, setting), who=_shard(draw, setting))]


def _ambush(draw: Draw, setting: Setting) -> list[AnyFault]:
    at, who = _time(draw, setting), _shard(draw, setting)
    after_s = draw.choice([0.0, 0.01, 0.05])
    return [faults.Ambush(at=at, who=who, after_s=after_s, back_s=_lasting(draw, 3))]
