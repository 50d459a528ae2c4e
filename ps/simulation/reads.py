"""What each read lacks: the staleness bound, judged from what was applied and not from the ledger.

A read at clock c under bound s contains every push that a registered worker makes at a clock of at
most c - s, at each shard by itself. A breach shows at one of two moments:

- when the read is served: a push of such a clock is made already and is not in what is served;
- later: a worker makes a push of such a clock, so it was registered there at too high a clock.

Clocks are the worker's own account, as it sends them; what a shard's ledger says of them is what is
checked. Two things are not asked for:

- What a shard has acknowledged and lost when it was rolled back is in no read any more.
- A worker that a shard has lost and registers again may have pushes under way at that moment, sent
  or not. Those are late, and nobody waits for them.
"""

from typing import TYPE_CHECKING

from ps.simulation.invariants import Array, Promise, Violation, applied
from shards.messages import Push, Standing
from shards.shard import Shard

if TYPE_CHECKING:
    from ps.simulation.hosts import Host
    from ps.simulation.workers import Life
    from ps.simulation.world import World


class Due:
    """What the reads of one shard have promised of one life of a worker.

    Reads contain its pushes up to clock `promised`, except those numbered up to `late`.
    """

    def __init__(self) -> None:
        self.promised = -1
        self.late = 0

    def check(self, seq: int, clock: int, where: str) -> None:
        """The worker makes push `seq`, which brings it to `clock`."""
        if self.late < seq and clock <= self.promised:
            raise Violation(
                Promise.BOUND,
                f"push {seq} is made at clock {clock}, and {where} has served reads that were to"
                f" contain all pushes up to clock {self.promised}",
            )


class Reads:
    """The reads that one shard serves."""

    def __init__(self, world: "World", host: "Host") -> None:
        self._world, self._host = world, host

    def served(self, shard: Shard, least: int, weights: Array | None) -> None:
        """A read was served that is to contain all pushes up to clock `least`.

        Its `weights` show how many it has of each worker; None if they cannot be counted.
        """
        for name, entry in shard.ledger.entries.items():
            if entry.standing is not Standing.ACTIVE:
                continue
            life = self._world.life_at(f"{name}/{entry.incarnation}".encode())
            due = life.due.get(self._host)
            if due is None:  # it knows nothing of this shard yet, to which its job is moving
                continue
            due.promised = max(due.promised, least)
            seq = entry.seq if weights is None else int(applied(weights, life.number)[0])
            # What it lacks of those that it has acknowledged, it lost when it was rolled back.
            acked = life.session._registration.acknowledged.get(self._host.number)
            seq = 1 + max(seq, acked.seq if acked is not None else 0)
            # One that is not joined is about to hear that it is registered again.
            if seq > due.late and self._host.number in life.session._registration.joined:
                self._check_next(life, seq, least)

    def _check_next(self, life: "Life", seq: int, least: int) -> None:
        """The read lacks what `life` pushes from number `seq` on."""
        if seq in self._host._forgotten.get(life.name, ()):
            return  # it was applied once, and lost when the shard was rolled back
        number = self._host.number
        pushes = [pending.message for pending in life.session._outstanding.to(number)]
        clocks = [push.clock for push in pushes if isinstance(push, Push) and push.seq == seq]
        # If it has been acknowledged, its clock is the one that it was made at.
        clock = min(clocks, default=life.clocks.get(seq, least + 1))
        if clock <= least:
            raise Violation(
                Promise.BOUND,
                f"shard {number} serves a read without push {seq} of {life.name}, made at clock"
                f" {clock}; it is to contain all pushes up to clock {least}",
            )
