"""What each read lacks: the staleness bound, judged from what was applied and not from the ledger.

A read at clock c under bound s contains every push that a registered worker makes at a clock of at
most c - s, at each shard by itself. A breach shows at one of two moments:

- when the read is served: a push of such a clock is made already and is not in what is served;
- later: a worker makes a push of such a clock, so it was registered there at too high a clock.

Clocks are the worker's own account, as it sends them; what a shard's ledger says of them is what is
checked. One thing is not asked for: a worker that a shard has lost and registers again may have
pushes under way at that moment, sent or not. Those are late, and nobody waits for them.
"""

from typing import TYPE_CHECKING

from ps.simulation.invariants import Promise, Violation
from shards.ledger import Entry
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

    def served(self, shard: Shard, least: int) -> None:
        """A read has been served that is to contain all pushes up to clock `least`."""
        for name, entry in shard.ledger.entries.items():
            if entry.standing is Standing.ACTIVE:
                life = self._world.life_at(f"{name}/{entry.incarnation}".encode())
                self._note(life, entry, least)

    def _note(self, life: "Life", entry: Entry, least: int) -> None:
        due = life.due.get(self._host)
        if due is None:  # it knows nothing of this shard yet, to which its job is moving
            return
        due.promised = max(due.promised, least)
        number = self._host.number
        if number not in life.session._registration.joined:
            return  # it is about to hear that it is registered again
        for pending in life.session._outstanding.to(number):
            push = pending.message
            if isinstance(push, Push) and push.seq > max(entry.seq, due.late):
                if push.clock <= least:
                    raise Violation(
                        Promise.BOUND,
                        f"shard {number} serves a read without push {push.seq} of {life.name},"
                        f" made at clock {push.clock}; it is to contain all up to {least}",
                    )
                return
