"""Checks that no lease expires of a worker that is alive, reachable and believes it is registered.

Other workers may wait for a push of that worker, while it waits for them at another shard. If
nothing makes it greet a shard that has forgotten it, they can only continue when its lease there
expires: the whole job would pause for a lease although every worker is alive.

The check applies to shards in single processes. In a group, a worker finds the serving copy by
trial, which may take several renewals.
"""

from typing import TYPE_CHECKING

from deploy.simulation.config import SimulationConfig
from deploy.simulation.invariants import Promise, Violation
from deploy.simulation.network import MIN_S
from shards.shard_status import Standing

if TYPE_CHECKING:
    from deploy.simulation.shard_hosts import ShardHost
    from deploy.simulation.simulation import Simulation

RENEWALS_A_LEASE = 3
_SLOWEST, _FASTEST = 0.8, 1.25  # rates of skewed clocks


def renewal_s(setting: SimulationConfig) -> float:
    """Seconds between a worker's renewals of its lease."""
    return setting.lease_s / RENEWALS_A_LEASE


def check_silent(world: "Simulation", host: "ShardHost", silent: list[str]) -> None:
    """Check the workers that a shard considers silent; raises Violation if one should not be."""
    setting, now = world.setting, world.clock.now
    if host.new_address is not None or not _can_renew_in_time(setting):
        return  # no worker waits at a shard that its job has left
    for name in silent:
        entry = host.shard.ledger.entries[name]
        worker = world.worker_at(f"{name}/{entry.incarnation}".encode())
        disturbed_until = max(world.network.quiet_since, world.thawed_at, worker.ready_at)
        registered = entry.standing is Standing.ACTIVE and worker.session.ready is not None
        if not worker.alive or worker.departed or host not in worker.due or not registered:
            continue
        still_s, owed = now - disturbed_until, worker.session._outstanding.to(host.number)
        if still_s >= setting.lease_s and not owed and not worker.leaving:
            raise Violation(
                Promise.PROGRESS,
                f"shard {host.number} expires the lease of {name}, which is alive and renews it",
            )


def _can_renew_in_time(setting: SimulationConfig) -> bool:
    """Return whether a renewal, its refusal and a greeting together fit into a lease."""
    trip_s = MIN_S + setting.delay_s + setting.busy_s
    return renewal_s(setting) / _SLOWEST + 3 * trip_s + 0.3 < setting.lease_s / _FASTEST
