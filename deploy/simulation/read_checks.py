"""Checks the staleness bound by the pushes that each read contains, independently of the ledger.

A read at clock c under bound s contains every push that a registered worker makes at a clock of at
most c - s, at each shard separately. A breach is detected at one of two moments:

- when the read is served: a push of such a clock has been made and is not in the weights served;
- later: a worker makes a push of such a clock, so it was registered there at too high a clock.

The clocks are those that the workers send, not those in the shard's ledger, because the ledger is
what is being checked. There are two exceptions:

- Pushes that a shard has acknowledged, and lost when it was rolled back, are in no read any more.
- A worker that a shard has lost and registers again may have pushes in flight at that moment, sent
  or not. Those are late, and no read waits for them.
"""

from typing import TYPE_CHECKING

from deploy.simulation.invariants import Array, Promise, Violation, last_applied
from shards.messages import Push
from shards.shard import Shard
from shards.shard_status import Standing

if TYPE_CHECKING:
    from deploy.simulation.shard_hosts import ShardHost
    from deploy.simulation.simulation import Simulation
    from deploy.simulation.workers import SimulatedWorker


class Due:
    """The pushes of one incarnation of a worker that the reads of one shard have to contain.

    Reads contain its pushes up to clock `promised`, except those numbered up to `late`.
    """

    def __init__(self) -> None:
        self.promised = -1
        self.late = 0

    def check(self, seq: int, clock: int, where: str) -> None:
        """Check push `seq`, which the worker makes now and which brings it to `clock`."""
        if self.late < seq and clock <= self.promised:
            raise Violation(
                Promise.BOUND,
                f"push {seq} is made at clock {clock}, and {where} has served reads that had to"
                f" contain all pushes up to clock {self.promised}",
            )


class Reads:
    """The reads that one shard serves."""

    def __init__(self, world: "Simulation", host: "ShardHost") -> None:
        self._world, self._host = world, host

    def check_read(self, shard: Shard, least: int, weights: Array | None) -> None:
        """Check a read that was served and has to contain all pushes up to clock `least`.

        Its `weights` show how many pushes of each worker it contains; None if that cannot be seen.
        """
        for name, entry in shard.ledger.entries.items():
            if entry.standing is not Standing.ACTIVE:
                continue
            worker = self._world.worker_at(f"{name}/{entry.incarnation}".encode())
            due = worker.due.get(self._host)
            if due is None:  # the job is being resharded, and the worker does not know this shard
                continue
            due.promised = max(due.promised, least)
            absent = self._host.absent.get(name, set())
            last_seq = (
                entry.seq if weights is None else last_applied(weights, worker.number, absent)
            )
            # Acknowledged pushes that are missing here were lost when the shard was rolled back.
            acked = worker.session._registration.acknowledged.get(self._host.number)
            seq = 1 + max(last_seq, acked.seq if acked is not None else 0)
            while seq in absent:
                seq += 1
            # A worker that has not joined will soon receive its new registration.
            if seq > due.late and self._host.number in worker.session._registration.joined:
                self._check_next(worker, seq, least)

    def _check_next(self, worker: "SimulatedWorker", seq: int, least: int) -> None:
        """Check that the read may lack the pushes of `worker` from number `seq` on."""
        if seq in self._host._forgotten.get(worker.name, ()):
            return  # it was applied once, and lost when the shard was rolled back
        number = self._host.number
        pushes = [pending.message for pending in worker.session._outstanding.to(number)]
        clocks = [push.clock for push in pushes if isinstance(push, Push) and push.seq == seq]
        # If the push has been acknowledged, use the clock at which it was made.
        clock = min(clocks, default=worker.clocks.get(seq, least + 1))
        if clock <= least:
            raise Violation(
                Promise.BOUND,
                f"shard {number} serves a read without push {seq} of {worker.name}, made at clock"
                f" {clock}; it has to contain all pushes up to clock {least}",
            )
