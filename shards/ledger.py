"""The ledger: what a shard knows of each worker. It decides what is applied, and who is waited for.

Theory. Messages are lost, repeated and delayed, and a worker may die and be replaced by another
life under the same name. Two numbers make every push count exactly once:

- the *incarnation* orders a worker's lives. A Hello with a higher one takes over the name; every
  message of a lower one is refused, so a zombie cannot write.
- the *seq* orders a worker's pushes. The only push applied is `last + 1`. A smaller number was
  applied before: it is acknowledged again and changes nothing. A larger one means that a message
  was lost: the sender is told which number is expected.

Only registered workers count at the gate, because Spark starts tasks in waves and a task that has
not started must not hold back those that have. A worker that joins late starts at the clock of the
slowest registered one, and its silence is tolerated for one lease: after that it no longer counts.

The ledger is one value that travels with snapshots. It leaves the answers to the shard, and asks
nobody what time it is: `now` is passed in, in seconds of any monotonic clock.
"""

from enum import Enum, auto

import msgspec

from shards.errors import Fenced, Gap, Resynchronise
from shards.messages import FromWorker, Standing


class Verdict(Enum):
    """What to do with a push."""

    APPLY = auto()
    DUPLICATE = auto()


class Entry(msgspec.Struct):
    """One worker. `clock` counts at the gate; `step` counts the steps of the worker's own plan."""

    incarnation: int
    seq: int = 0
    clock: int = 0
    step: int = 0
    standing: Standing = Standing.GREETED
    takeovers: int = 0
    lease_until: float = 0.0
    loss: float = 0.0


class Ledger(msgspec.Struct):
    """All workers a shard has heard of."""

    entries: dict[str, Entry] = {}

    # --- coming and going -----------------------------------------------------------------------

    def greet(self, worker: str, incarnation: int, lease_until: float) -> Entry:
        """Let a life of `worker` speak for its name; raises Fenced if a newer one already does."""
        entry = self.entries.get(worker)
        if entry is None:
            entry = self.entries[worker] = Entry(incarnation)
        elif incarnation < entry.incarnation:
            raise _fenced(worker, incarnation, entry)
        elif incarnation > entry.incarnation:
            entry.incarnation = incarnation
            entry.takeovers += 1
            entry.standing = Standing.GREETED
        elif entry.standing is Standing.EXPIRED:
            entry.standing = Standing.GREETED
        entry.lease_until = lease_until
        return entry

    def join(self, worker: str, clock: int) -> int:
        """Count `worker` at the gate from now on; returns the clock it counts with.

        It never lowers the slowest clock, so that nobody who runs is held back by a newcomer.
        """
        entry = self.entries[worker]
        slowest = self.min_clock
        entry.clock = max(entry.clock, clock, slowest if slowest is not None else 0)
        entry.standing = Standing.ACTIVE
        return entry.clock

    def leave(self, worker: str) -> None:
        self.entries[worker].standing = Standing.LEFT

    def dismiss(self) -> None:
        """Nobody counts until they join again: the ledger comes from an earlier life."""
        for entry in self.entries.values():
            entry.standing = Standing.LEFT

    def expire(self, now: float) -> list[str]:
        """Workers whose lease has run out since the last call; they no longer count."""
        silent = [
            worker
            for worker, entry in self.entries.items()
            if entry.standing in (Standing.ACTIVE, Standing.GREETED) and entry.lease_until <= now
        ]
        for worker in silent:
            self.entries[worker].standing = Standing.EXPIRED
        return silent

    # --- judging --------------------------------------------------------------------------------

    def identify(self, message: FromWorker, lease_until: float) -> Entry:
        """The sender's entry, its lease renewed; raises Fenced or Resynchronise."""
        entry = self.entries.get(message.worker)
        if entry is None or message.incarnation > entry.incarnation:
            raise Resynchronise(f"worker {message.worker} has not said hello to this shard")
        if message.incarnation < entry.incarnation:
            raise _fenced(message.worker, message.incarnation, entry)
        if entry.standing is Standing.EXPIRED:
            raise Resynchronise(f"worker {message.worker}: the lease ran out at step {entry.step}")
        entry.lease_until = lease_until
        return entry

    def judge(self, worker: str, seq: int) -> Verdict:
        """Whether push `seq` is the next one; raises Gap if one before it is missing."""
        expected = self.entries[worker].seq + 1
        if seq > expected:
            raise Gap(f"worker {worker}: expected push {expected}, got {seq}", expected)
        return Verdict.APPLY if seq == expected else Verdict.DUPLICATE

    def record(self, worker: str, seq: int, clock: int, step: int, loss: float) -> None:
        """Push `seq` has been applied."""
        entry = self.entries[worker]
        assert seq == entry.seq + 1, "judged before it is recorded"
        entry.seq, entry.step, entry.loss = seq, step, loss
        self.advance(worker, clock)

    def advance(self, worker: str, clock: int) -> None:
        """Clocks only rise: a shard may have put a worker's clock ahead of what it says."""
        entry = self.entries[worker]
        entry.clock = max(entry.clock, clock)

    # --- clocks ---------------------------------------------------------------------------------

    @property
    def active(self) -> list[str]:
        return [w for w, entry in self.entries.items() if entry.standing is Standing.ACTIVE]

    @property
    def min_clock(self) -> int | None:
        """The slowest registered worker's clock; None when nobody is registered."""
        return min((self.entries[worker].clock for worker in self.active), default=None)

    @property
    def clock_gap(self) -> int:
        """Fastest minus slowest registered clock."""
        clocks = [self.entries[worker].clock for worker in self.active]
        return max(clocks, default=0) - min(clocks, default=0)


def _fenced(worker: str, incarnation: int, entry: Entry) -> Fenced:
    return Fenced(
        f"worker {worker}: incarnation {entry.incarnation} has taken over from {incarnation}"
    )
