"""Draws a scenario from a seed: a cluster, and faults for it.

This is swarm testing (Groce et al. 2012): each seed leaves out most kinds of faults, because a run
with all of them seldom gets far enough to reach rare states. The kinds, numbers, times and
strengths of the faults are all drawn in advance, so that a run is data: it can be written to a file
and reduced.
"""

import random
from collections.abc import Callable

import msgspec

from deploy.simulation import faults
from deploy.simulation.config import SimulationConfig
from deploy.simulation.faults import AnyFault
from deploy.simulation.scenarios import Scenario
from deploy.simulation_kinds import ClusterConfig, Profile
from ps.durability import Durability
from shards.rules import ROW_RULES

Draw = random.Random
Drawn = Callable[[Draw, SimulationConfig], list[AnyFault]]

ON = 0.4  # the share of seeds in which a kind of fault happens at all
RESHARDED = 0.25  # the share of seeds in which the job is resharded
HELD = 0.2  # the share of seeds in which other operators quiesce the shards
CHANGED = 0.3  # the share of seeds in which operators change settings while the job trains
BURSTS = 0.4  # the share of bounded in-memory clusters with several pushes per read
TABLES = 0.4  # the share of seeds with a second table, among those with lossless pushes
SLOTS = 0.4  # the share of seeds with a rule that keeps slots, among those with lossless pushes
REPORTS = 0.25  # the share of seeds with a quorum, among those in which one is possible
MERGED = 0.25  # the share of seeds with a buffer, or with backup workers in their rounds
LIMITED = 0.25  # the share of seeds with a limit on staleness, among those without merging
ROWS = 0.4  # the share of seeds with a sparse table, among those without a buffer
ROUNDED = 0.5  # the share of those with rows in fewer bits
PIECES = 0.7  # the share of seeds in which a state travels in several pieces
FIRST_S = 0.3

FACTORS = (0.25, 0.5, 2.0, 4.0)
HALVES = ("fp16", "bf16")
_LEVELS = (Durability.PROCESS, Durability.LOGGED, Durability.LOGGED)
SPARSE_CHANGES = "topk:0.02"
SPARSE = ("topk:0.004", "threshold:30", "threshold:100")
CHANGES = ("int8", "4bit", SPARSE_CHANGES)
# One slot that decays, one that accumulates, and two slots with a step that depends on the count.
RULES_WITH_SLOTS = ("momentum", "adagrad", "adam")


def swarm(
    seed: int, profile: Profile = Profile.WITHIN, cluster: ClusterConfig | None = None
) -> Scenario:
    """The scenario of a seed; the kind of cluster is drawn as well unless it is given."""
    draw = random.Random(f"{profile} {seed}")
    kind = cluster or draw.choices(list(ClusterConfig), (3, 1, 2, 4))[0]
    setting = _setting(draw, kind)
    if kind is ClusterConfig.LOGGED and profile is Profile.BEYOND:
        setting = msgspec.structs.replace(setting, durability=Durability.PROCESS)
    schedule: list[AnyFault] = []
    for draw_fault in _possible_kinds(setting, profile):
        if draw.random() < ON:
            for _ in range(draw.randint(1, 3)):
                schedule += draw_fault(draw, setting)
    if profile is Profile.WITHIN and setting.durability is Durability.PROCESS:
        schedule = [_with_the_power_on(fault) for fault in schedule]
    if profile is Profile.WITHIN and draw.random() < RESHARDED:
        schedule += _reshard(draw, setting)
        # If a shard in memory dies during a resharding, its job ends: only a log could recover it.
        schedule = [
            f for f in schedule if kind is ClusterConfig.LOGGED or not isinstance(f, faults.Restart)
        ]
    schedule.sort(key=lambda fault: fault.at)
    if draw.random() < SLOTS and setting.push not in SPARSE:
        rule, state_s = draw.choice(RULES_WITH_SLOTS), draw.choice([0.0, 0.5])
        setting = msgspec.structs.replace(setting, rule=rule, state_s=state_s)
    if _may_burst(setting) and draw.random() < BURSTS:
        setting = msgspec.structs.replace(setting, burst=draw.choice([2, 3]))
    setting = _merging(draw, setting)
    if draw.random() < TABLES and setting.push not in SPARSE:
        others = [rule for rule in ("sgd", *RULES_WITH_SLOTS) if rule != setting.rule]
        setting = msgspec.structs.replace(setting, second=draw.choice(others))
    # Drawn last, so that the other draws of a seed do not change.
    if setting.merge == "each" and setting.push not in SPARSE and draw.random() < LIMITED:
        after, drop = draw.choice([1, 2, 3]), draw.random() < 0.5
        setting = msgspec.structs.replace(setting, stale_after=after, stale_drop=drop)
    if draw.random() < PIECES:
        setting = msgspec.structs.replace(setting, piece_bytes=draw.choice([256, 1024]))
    if profile is Profile.WITHIN and _keeps_quiesces(setting, schedule) and draw.random() < HELD:
        schedule = sorted([*schedule, *_holds(draw, setting)], key=lambda fault: fault.at)
    if profile is Profile.WITHIN and draw.random() < CHANGED:
        changes = _changes(draw, setting)
        schedule = sorted([*schedule, *changes], key=lambda fault: fault.at)
        rates = any(change.rate_factor is not None for change in changes)
        setting = msgspec.structs.replace(setting, changes_rate=rates)
    if setting.merge != "buffer" and draw.random() < ROWS:
        setting = msgspec.structs.replace(setting, rows=draw.choice(tuple(ROW_RULES)))
    plain = setting.merge == "each" and setting.push not in SPARSE and not setting.changes_rate
    if plain and not (setting.rows or setting.stale_after) and draw.random() < REPORTS:
        setting = msgspec.structs.replace(setting, merge="quorum", quorum=draw.choice([1, 2, 3]))
    if setting.rows and draw.random() < ROUNDED:
        push, pull = draw.choice(["bf16", "int8"]), draw.choice(["none", "bf16"])
        setting = msgspec.structs.replace(setting, row_push=push, row_pull=pull)
    return Scenario(seed=seed, profile=profile, setting=setting, faults=tuple(schedule))


def _merging(draw: Draw, setting: SimulationConfig) -> SimulationConfig:
    """Draw backup workers for some rounds, and a buffer for some clusters without rounds."""
    if setting.push in SPARSE or draw.random() >= MERGED:
        return setting
    if setting.merge == "round":
        return msgspec.structs.replace(setting, backups=1)
    return msgspec.structs.replace(setting, merge="buffer", buffer=draw.choice([2, 3]))


def _setting(draw: Draw, cluster: ClusterConfig) -> SimulationConfig:
    replicated, logged = cluster is ClusterConfig.REPLICATED, cluster is ClusterConfig.LOGGED
    push, pull = _compression(draw) if cluster is ClusterConfig.COMPRESSED else ("none", "none")
    rounds = push not in SPARSE and draw.random() < 0.3
    bound = 0 if rounds else draw.choice([0, 1, 2, 4, None])
    return SimulationConfig(
        cluster=cluster,
        shards=draw.choice([1, 1, 2] if replicated else [1, 2, 2, 3]),
        workers=draw.randint(1, 3),
        bound=bound,
        steps=draw.choice([4, 6, 9]),
        in_flight=draw.randint(1, 3),
        prefetch=bound != 0 and draw.random() < 0.5,
        merge="round" if rounds else "each",
        warm_steps=draw.choice([0, 0, 3, 10]),
        lease_s=draw.choice([2.0, 4.0]),
        delay_s=draw.choice([0.02, 0.1, 0.3]),
        busy_s=0.0 if replicated else draw.choice([0.0, 0.0, 0.5]),
        push=push,
        pull=pull,
        durability=draw.choice(_LEVELS) if logged else Durability.LOGGED,
        log_bytes=draw.choice([1 << 12, 1 << 13, 1 << 20]) if logged else 1 << 20,
    )


def _may_burst(setting: SimulationConfig) -> bool:
    """True if the shards may be rolled back, and take more than one push of a worker at a time."""
    in_memory = setting.cluster in (ClusterConfig.SINGLE, ClusterConfig.COMPRESSED)
    return in_memory and setting.bound is not None and setting.merge == "each"


def _compression(draw: Draw) -> tuple[str, str]:
    """Draw codecs that are exact on the simulation's whole numbers."""
    push = draw.choice(("none", *HALVES, *SPARSE))
    return push, draw.choice(("none", "bf16") if push in SPARSE else ("none", *CHANGES))


def _possible_kinds(setting: SimulationConfig, profile: Profile) -> list[Drawn]:
    """The kinds of faults that are possible for a cluster."""
    kinds: list[Drawn] = [_lose, _double, _delay, _cut, _clogs, _freeze, _skew]
    if setting.push not in SPARSE:
        kinds += [_kill]  # a new incarnation starts without the residual, so sums would be off
        # Truncated sparse changes may be valid with fewer changes; in reality TCP prevents that.
        kinds += [] if setting.pull == SPARSE_CHANGES else [_mangle]
    if setting.cluster is ClusterConfig.REPLICATED:
        kinds += [_coordinator, _crash, _ambush, _break]
        return [*kinds, _reckless] if profile is Profile.BEYOND else kinds
    if setting.cluster is ClusterConfig.LOGGED:
        return [*kinds, _restart, _tear, _tear, _outage, _full_disk]
    return [
        *kinds,
        *((_roll_back_unreported,) if profile is Profile.BEYOND else (_restart, _roll_back)),
    ]


# --- targets and times ----------------------------------------------------------------------------


def _time(draw: Draw, setting: SimulationConfig) -> float:
    return _round_time(draw.uniform(FIRST_S, setting.quiet_s))


def _round_time(value: float) -> float:
    return round(value, 3)


def _lasting(draw: Draw, longest_s: float) -> float:
    return _round_time(draw.uniform(0.1, longest_s))


def _worker(draw: Draw, setting: SimulationConfig) -> str:
    return f"w{draw.randrange(setting.workers)}"


def _shard(draw: Draw, setting: SimulationConfig) -> str:
    number = draw.randrange(setting.shards)
    if setting.cluster is ClusterConfig.REPLICATED:
        return f"{draw.choice(('primary', 'primary', 'backup'))} {number}"
    return f"shard {number}"


def _any_process(draw: Draw, setting: SimulationConfig) -> str:
    if setting.cluster is ClusterConfig.REPLICATED and draw.random() < 0.2:
        return "coordinator"
    return draw.choice((_worker, _shard, _shard))(draw, setting)


def _link(draw: Draw, setting: SimulationConfig) -> dict[str, str]:
    """Both ends of a link, or one end and all others."""
    a = _any_process(draw, setting)
    if a.startswith("w"):
        return {"a": a, "b": draw.choice(("", _shard(draw, setting)))}
    if setting.cluster is not ClusterConfig.REPLICATED:
        return {"a": a, "b": draw.choice(("", _worker(draw, setting)))}
    number = draw.randrange(setting.shards)
    others = ("", f"primary {number}", f"backup {number}", "coordinator")
    return {"a": a, "b": draw.choice([name for name in others if name != a])}


def _everywhere(draw: Draw, setting: SimulationConfig) -> dict[str, str]:
    return {} if draw.random() < 0.7 else _link(draw, setting)


# --- the kinds ------------------------------------------------------------------------------------


def _lose(draw: Draw, setting: SimulationConfig) -> list[AnyFault]:
    at, for_s, share = _time(draw, setting), _lasting(draw, 4), draw.choice([0.1, 0.3, 0.6])
    return [faults.Lose(at=at, for_s=for_s, share=share, **_everywhere(draw, setting))]


def _double(draw: Draw, setting: SimulationConfig) -> list[AnyFault]:
    at, for_s, share = _time(draw, setting), _lasting(draw, 6), draw.choice([0.1, 0.5])
    return [faults.Double(at=at, for_s=for_s, share=share, **_everywhere(draw, setting))]


def _delay(draw: Draw, setting: SimulationConfig) -> list[AnyFault]:
    at, for_s, by_s = _time(draw, setting), _lasting(draw, 4), draw.choice([0.3, 1.0, 2.5])
    return [faults.Delay(at=at, for_s=for_s, by_s=by_s, **_everywhere(draw, setting))]


def _mangle(draw: Draw, setting: SimulationConfig) -> list[AnyFault]:
    at, for_s = _time(draw, setting), _lasting(draw, 2)
    return [faults.Mangle(at=at, for_s=for_s, share=0.3, **_everywhere(draw, setting))]


def _cut(draw: Draw, setting: SimulationConfig) -> list[AnyFault]:
    at, for_s = _time(draw, setting), _lasting(draw, 1.5 * setting.lease_s)
    return [faults.CutLink(at=at, for_s=for_s, one_way=draw.random() < 0.4, **_link(draw, setting))]


def _clogs(draw: Draw, setting: SimulationConfig) -> list[AnyFault]:
    """Clog some processes one after another, and unclog them in another order ("swizzling")."""
    begin, clogs = _time(draw, setting), list[AnyFault]()
    for _ in range(draw.randint(1, 3)):
        at = _round_time(begin + draw.uniform(0, 1))
        clogs.append(faults.Clog(at=at, for_s=_lasting(draw, 3), a=_any_process(draw, setting)))
    return clogs


def _freeze(draw: Draw, setting: SimulationConfig) -> list[AnyFault]:
    at, target = _time(draw, setting), _any_process(draw, setting)
    return [faults.Freeze(at=at, target=target, for_s=_lasting(draw, 2 * setting.lease_s))]


def _skew(draw: Draw, setting: SimulationConfig) -> list[AnyFault]:
    at, target = _time(draw, setting), _any_process(draw, setting)
    return [faults.Skew(at=at, target=target, rate=draw.choice([0.8, 0.95, 1.05, 1.25]))]


def _kill(draw: Draw, setting: SimulationConfig) -> list[AnyFault]:
    at, target = _time(draw, setting), _worker(draw, setting)
    back_s = _lasting(draw, 2 * setting.lease_s)
    return [faults.Kill(at=at, target=target, back_s=back_s, zombie=draw.random() < 0.4)]


def _restart(draw: Draw, setting: SimulationConfig) -> list[AnyFault]:
    return [faults.Restart(at=_time(draw, setting), shard=draw.randrange(setting.shards))]


def _roll_back(draw: Draw, setting: SimulationConfig) -> list[AnyFault]:
    at, shard = _time(draw, setting), draw.randrange(setting.shards)
    return [faults.Restart(at=at, shard=shard, lost_s=_lasting(draw, 3))]


def _roll_back_unreported(draw: Draw, setting: SimulationConfig) -> list[AnyFault]:
    return [msgspec.structs.replace(f, reported=False) for f in _roll_back(draw, setting)]


def _tear(draw: Draw, setting: SimulationConfig) -> list[AnyFault]:
    at, shard, back_s = _time(draw, setting), draw.randrange(setting.shards), _lasting(draw, 2)
    operations, power = draw.randrange(12), draw.random() < 0.6
    return [faults.Tear(at=at, shard=shard, operations=operations, back_s=back_s, power=power)]


def _outage(draw: Draw, setting: SimulationConfig) -> list[AnyFault]:
    at, back_s = _time(draw, setting), _lasting(draw, 2)
    return [faults.Outage(at=at, back_s=back_s, power=draw.random() < 0.6)]


def _full_disk(draw: Draw, setting: SimulationConfig) -> list[AnyFault]:
    at, shard = _time(draw, setting), draw.randrange(setting.shards)
    return [faults.FullDisk(at=at, shard=shard, for_s=_lasting(draw, 2))]


def _reshard(draw: Draw, setting: SimulationConfig) -> list[AnyFault]:
    times = range(draw.choice((1, 1, 1, 2)))
    moves = [faults.ReshardFault(at=_time(draw, setting), shards=draw.randint(1, 3)) for _ in times]
    if setting.cluster not in (ClusterConfig.LOGGED, ClusterConfig.REPLICATED):
        return [*moves]
    return [fault for move in moves for fault in _with_a_death(draw, setting, move)]


def _with_a_death(
    draw: Draw, setting: SimulationConfig, move: faults.ReshardFault
) -> list[AnyFault]:
    """A resharding during which a shard dies; other faults seldom hit these short moments."""
    before = draw.choice(("", "Quiesce", "Export", "Install", "HandOver", "HandOver"))
    dies = draw.randrange(setting.shards)
    replicated = setting.cluster is ClusterConfig.REPLICATED
    fresh = replicated and draw.random() < 0.3
    after_s = _round_time(draw.uniform(0.0, 4 * setting.delay_s)) if before == "Install" else 0.0
    schedule: list[AnyFault] = [
        msgspec.structs.replace(move, before=before, after_s=after_s, shard=dies, fresh=fresh)
    ]
    if before == "HandOver" and draw.random() < 0.5:
        # Cut off shard 0: its hand-over decides the resharding.
        at = _round_time(move.at + draw.uniform(0.3, 1.5))
        first = "primary 0" if replicated else "shard 0"
        schedule.append(faults.CutLink(at=at, for_s=_lasting(draw, 4), a=first))
    return schedule


def _keeps_quiesces(setting: SimulationConfig, schedule: list[AnyFault]) -> bool:
    """Return whether no shard forgets a quiesce; a shard in memory forgets it when it restarts."""
    logged = setting.cluster is ClusterConfig.LOGGED
    return logged or not any(isinstance(fault, faults.Restart) for fault in schedule)


def _holds(draw: Draw, setting: SimulationConfig) -> list[AnyFault]:
    """Operators that quiesce the shards; a second one may come while the first is still active."""
    at, for_s = _time(draw, setting), _round_time(draw.uniform(0.1, 2.0))
    first = faults.HoldFault(at=at, for_s=for_s)
    if draw.random() < 0.5:
        return [first]
    later = _round_time(at + draw.uniform(0.0, for_s + 4 * setting.delay_s))
    return [first, faults.HoldFault(at=later, for_s=_round_time(draw.uniform(0.1, 1.0)))]


def _changes(draw: Draw, setting: SimulationConfig) -> list[faults.SetFault]:
    """Operators that change the bound, the rate or both; each rate is another power of two.

    With buffers the rate stays: one may be applied without a push, at a rate that no record has.
    """
    bounded = setting.merge != "round"
    rated = setting.merge not in ("buffer", "quorum") and setting.push not in SPARSE
    factors = draw.sample(FACTORS, 3)
    changes: list[faults.SetFault] = []
    for number in range(draw.randint(1, 3) if bounded or rated else 0):
        change = faults.SetFault(at=_time(draw, setting))
        if bounded and (not rated or draw.random() < 0.7):
            bound = draw.choice([0, 1, 2, 4, None])
            bound = bound if bound is None else max(bound, int(setting.prefetch))
            change = msgspec.structs.replace(change, sets_bound=True, bound=bound)
        if rated and (not change.sets_bound or draw.random() < 0.5):
            change = msgspec.structs.replace(change, rate_factor=factors[number])
        changes.append(change)
    return changes


def _with_the_power_on(fault: AnyFault) -> AnyFault:
    """Keep the power on: the level `process` relies on the page cache, which survives processes."""
    powerless = isinstance(fault, faults.Tear | faults.Outage)
    return msgspec.structs.replace(fault, power=False) if powerless else fault


def _coordinator(draw: Draw, setting: SimulationConfig) -> list[AnyFault]:
    return [faults.CoordinatorCrash(at=_time(draw, setting), back_s=_lasting(draw, 4))]


def _crash(draw: Draw, setting: SimulationConfig) -> list[AnyFault]:
    at, target = _time(draw, setting), _shard(draw, setting)
    back_s, reported = _lasting(draw, 3), draw.random() < 0.3
    return [faults.Crash(at=at, target=target, back_s=back_s, reported=reported)]


def _reckless(draw: Draw, setting: SimulationConfig) -> list[AnyFault]:
    at, target = _time(draw, setting), _shard(draw, setting)
    return [faults.Crash(at=at, target=target, back_s=_lasting(draw, 3), reckless=True)]


def _break(draw: Draw, setting: SimulationConfig) -> list[AnyFault]:
    return [faults.Break(at=_time(draw, setting), target=_shard(draw, setting))]


def _ambush(draw: Draw, setting: SimulationConfig) -> list[AnyFault]:
    at, target = _time(draw, setting), _shard(draw, setting)
    after_s = draw.choice([0.0, 0.01, 0.05])
    return [faults.Ambush(at=at, target=target, after_s=after_s, back_s=_lasting(draw, 3))]
