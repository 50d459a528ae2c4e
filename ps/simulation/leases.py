"""No lease of a worker runs out that lives, can be heard, and believes itself registered.

Others may wait for what that worker has yet to push, while it waits for them at another shard. If
nothing makes it greet a shard that has forgotten it, only the end of its lease there would let
anyone continue: a job would stand still for a lease although everyone lives.

This is asked of shards in single processes. A worker finds the copy that serves in a group by
trying, which may take it several renewals.
"""

from typing import TYPE_CHECKING

from ps.simulation.invariants import Promise, Violation
from ps.simulation.network import LEAST_S
from ps.simulation.setting import Setting
from shards.messages import Standing

if TYPE_CHECKING:
    from ps.simulation.hosts import Host
    from ps.simulation.world import World

RENEWALS_A_LEASE = 3
_SLOWEST, _FASTEST = 0.8, 1.25  # clocks


def renewal_s(setting: Setting) -> float:
    """How often a worker renews its lease."""
    return setting.lease_s / RENEWALS_A_LEASE


def check_silent(world: "World", host: "Host", silent: list[str]) -> None:
    """A shard finds that these workers have been silent for a lease."""
    setting, now = world.setting, world.clock.now
    if host.moved_to is not None or not _heard_in_time(setting):
        return  # nobody waits at a shard that its job has left
    for name in silent:
        entry = host.shard.ledger.entries[name]
        life = world.life_at(f"{name}/{entry.incarnation}".encode())
        disturbed_until = max(world.network.quiet_since, world.thawed_at, life.ready_at)
        registered = entry.standing is Standing.ACTIVE and life.session.ready is not None
        if not life.alive or life.departed or host not in life.due or not registered:
            continue
        still_s, owed = now - disturbed_until, life.session._outstanding.to(host.number)
        if still_s >= setting.lease_s and not owed and not life.leaving:
            raise Violation(
                Promise.PROGRESS,
                f"shard {host.number} gives {name} up after a lease, which lives and renews it",
            )


def _heard_in_time(setting: Setting) -> bool:
    """Whether a renewal, its refusal and a greeting all fit into a lease."""
    trip_s = LEAST_S + setting.delay_s + setting.busy_s
    return renewal_s(setting) / _SLOWEST + 3 * trip_s + 0.3 < setting.lease_s / _FASTEST
