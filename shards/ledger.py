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
While the shard itself does not listen, nobody is silent.
After a roll back the clocks of the save count until their workers have joined again (`roll_back`).
The slowest clock never goes back, even when nobody is left to count: `floor` remembers it, or two
workers that return one after the other could find themselves further apart than the bound allows.

The ledger is one value that travels with snapshots. It leaves the answers to the shard, and asks
nobody what time it is: `now` is passed in, in seconds of any monotonic clock.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from math import isfinite

import msgspec

from shards.arguments import MOST
from shards.errors import BadMessage, Fenced, Gap, Resynchronise
from shards.messages import Count, FromWorker, Leave, Pull, Push, Standing, WorkerStatus

_LEAP = 1 << 24  # steps: more than any pushes on their way to a shard can stand for
_LEASED = (Standing.GREETED, Standing.ACTIVE)


class Verdict(Enum):
    """What to do with a push."""

    APPLY = auto()
    DUPLICATE = auto()


class LedgerEntry(msgspec.Struct):
    """One worker. `clock` counts at the gate; `step` counts the steps of the worker's own plan.

    `takeovers` counts lives that began before the one before had left; `admitted` says whether this
    life has ever counted at the gate; `loss` is the last finite one that it told; `refused` counts
    the gradients of all its lives that the guard has refused (gradient_guard.py). `acknowledged` is
    the last push that every shard had acknowledged to it when it sent push `seq`. `unheard` says
    that it counts as it did when the state was saved that its shard was rolled back to: it has not
    joined since.
    """

    incarnation: Count
    seq: Count = 0
    clock: Count = 0
    step: Count = 0
    standing: Standing = Standing.GREETED
    takeovers: Count = 0
    lease_until: float = 0.0
    loss: float = 0.0
    admitted: bool = False
    refused: Count = 0
    acknowledged: Count = 0
    unheard: bool = False


class Ledger(msgspec.Struct):
    """All workers a shard has heard of."""

    entries: dict[str, LedgerEntry] = {}
    floor: Count = 0

    # --- coming and going -----------------------------------------------------------------------

    def greet(self, worker: str, incarnation: int, lease_until: float) -> LedgerEntry:
        """Let a life of `worker` speak for its name; raises Fenced if a newer one already does."""
        entry = self.entries.get(worker)
        if entry is None:
            entry = self.entries[worker] = LedgerEntry(incarnation)
        elif incarnation < entry.incarnation:
            raise _fenced(worker, incarnation, entry)
        elif incarnation > entry.incarnation:
            # One that had left handed over in peace, as every worker of a resumed job did.
            entry.takeovers += entry.standing is not Standing.LEFT
            entry.incarnation = incarnation
            entry.admitted = False
            self._stand(entry, Standing.GREETED)
        elif entry.standing is not Standing.ACTIVE:
            self._stand(entry, Standing.GREETED)
        entry.lease_until = lease_until
        return entry

    def join(self, worker: str, clock: int) -> int:
        """Count `worker` at the gate from now on; returns the clock it counts with.

        It never lowers the slowest clock, so that nobody who runs is held back by a newcomer.
        """
        entry = self.entries[worker]
        entry.clock = max(entry.clock, clock, self.floor)
        entry.admitted, entry.unheard = True, False
        self._stand(entry, Standing.ACTIVE)
        return entry.clock

    def restore_seq(self, worker: str, seq: int, step: int) -> None:
        """It says how far it had come: a former life had its pushes up to `seq`, lost or not."""
        entry = self.entries[worker]
        if seq > entry.seq:
            entry.seq, entry.step = seq, step

    def roll_back(self) -> None:
        """The shard goes on from a state that may be older than what its workers have been told.

        Those that count may have come further, and say so when they join. Nothing else says how
        far: not the pushes of others, of which any number may follow one pull, nor the pulls that
        others were given, since what a worker has yet to repeat is to be waited for.
        """
        for worker in self.active:
            self.entries[worker].unheard = True

    def leave(self, worker: str) -> None:
        self._stand(self.entries[worker], Standing.LEFT)

    def detach_workers(self) -> None:
        """Nobody counts until they join again, and who was in quarantine is heard again: the
        ledger comes from an earlier job.
        """
        for entry in self.entries.values():
            entry.standing = Standing.LEFT
            entry.refused = entry.acknowledged = 0

    def silent(self, now: float) -> list[str]:
        """Workers whose lease has run out, and who have not been told off for it yet."""
        return [
            worker
            for worker, entry in self.entries.items()
            if entry.standing in _LEASED and entry.lease_until <= now
        ]

    def expire(self, workers: Sequence[str]) -> None:
        """They no longer count, from the same moment on.

        So the slowest clock is looked for once, however many they are.
        """
        for worker in workers:
            self.entries[worker].standing = Standing.EXPIRED
        self._raise_floor()

    def renew(self, lease_until: float) -> None:
        """Nobody has been silent: it was this shard that could not be heard."""
        for entry in self.entries.values():
            if entry.standing in _LEASED:
                entry.lease_until = lease_until

    def forgive_silence(self, unheard_s: float) -> None:
        """For so long this shard heard nobody: that was nobody's silence."""
        for entry in self.entries.values():
            if entry.standing in _LEASED:
                entry.lease_until += unheard_s

    def _stand(self, entry: LedgerEntry, standing: Standing) -> None:
        entry.standing = standing
        self._raise_floor()

    def _raise_floor(self) -> None:
        # A loop without a call of another function: it runs at every push, as the next two do.
        slowest = None
        for entry in self.entries.values():
            if entry.standing is Standing.ACTIVE and (slowest is None or entry.clock < slowest):
                slowest = entry.clock
        if slowest is not None and slowest > self.floor:
            self.floor = slowest

    @property
    def cut(self) -> dict[str, int]:
        """The last applied push of each worker."""
        return {worker: entry.seq for worker, entry in self.entries.items()}

    @property
    def lives(self) -> dict[str, tuple[int, int]]:
        """The incarnation of each worker, and its last applied push."""
        return {worker: (entry.incarnation, entry.seq) for worker, entry in self.entries.items()}

    def short_of(self, cut: Mapping[str, int]) -> bool:
        """Whether a push up to `cut` is still to come from a worker that may yet send it."""
        return any(
            entry.seq < cut.get(worker, 0)
            for worker, entry in self.entries.items()
            if entry.standing in _LEASED
        )

    # --- judging --------------------------------------------------------------------------------

    def identify(self, message: FromWorker, lease_until: float) -> LedgerEntry:
        """The sender's entry, its lease renewed; raises Fenced or Resynchronise.

        Only who counts at the gate may pull and push: a late copy from before a departure changes
        nothing, and a shard that forgot a worker is told of it before it lends it weights.
        """
        entry = self.entries.get(message.worker)
        if entry is None or message.incarnation > entry.incarnation:
            raise Resynchronise(f"worker {message.worker} has not said hello to this shard")
        if message.incarnation < entry.incarnation:
            raise _fenced(message.worker, message.incarnation, entry)
        if entry.standing is Standing.EXPIRED:
            raise Resynchronise(f"worker {message.worker}: the lease ran out at step {entry.step}")
        if entry.standing is Standing.LEFT and not isinstance(message, Leave):
            raise Resynchronise(f"worker {message.worker} has left this shard")
        if entry.standing is Standing.GREETED and isinstance(message, Push | Pull):
            raise Resynchronise(f"worker {message.worker} has not joined this shard")
        entry.lease_until = lease_until
        return entry

    def check_clock(self, worker: str, clock: int) -> None:
        """Raise BadMessage for a clock that no worker can have reached.

        Every later worker would inherit it. A shard may know of less than the others, but not of
        less by more than what is on its way.
        """
        if clock <= self.entries[worker].clock + _LEAP:
            return
        fastest = max(self.floor, *[entry.clock for entry in self.entries.values()])
        if clock > fastest + _LEAP:
            raise BadMessage(
                f"worker {worker}: expected a clock of at most {_LEAP} more than the fastest"
                f" worker's, {fastest}, got {clock}"
            )

    def judge(self, worker: str, seq: int) -> Verdict:
        """Whether push `seq` is the next one; raises Gap if one before it is missing."""
        expected = self.entries[worker].seq + 1
        if seq > expected:
            raise Gap(f"worker {worker}: expected push {expected}, got {seq}", expected)
        return Verdict.APPLY if seq == expected else Verdict.DUPLICATE

    def record(
        self, worker: str, seq: int, clock: int, step: int, loss: float, acknowledged: int = 0
    ) -> None:
        """Push `seq` has been applied."""
        entry = self.entries[worker]
        assert seq == entry.seq + 1, "judged before it is recorded"
        entry.seq, entry.step, entry.acknowledged = seq, step, acknowledged
        if isfinite(loss):  # a snapshot is JSON, which has no infinity
            entry.loss = loss
        if clock > entry.clock:
            entry.clock = clock
            self._raise_floor()

    def advance(self, worker: str, clock: int) -> None:
        """Clocks only rise: a shard may have put a worker's clock ahead of what it says."""
        entry = self.entries[worker]
        if clock > entry.clock:
            entry.clock = clock
            self._raise_floor()

    # --- clocks ---------------------------------------------------------------------------------

    @property
    def active(self) -> list[str]:
        return [w for w, entry in self.entries.items() if entry.standing is Standing.ACTIVE]

    @property
    def min_clock(self) -> int | None:
        """The slowest registered worker's clock; None when nobody is registered."""
        slowest = None
        for entry in self.entries.values():
            if entry.standing is Standing.ACTIVE and (slowest is None or entry.clock < slowest):
                slowest = entry.clock
        return slowest

    @property
    def clock_gap(self) -> int:
        """Fastest minus slowest registered clock, without those that a roll back left unknown."""
        slowest, fastest = MOST, 0
        for entry in self.entries.values():
            if entry.standing is Standing.ACTIVE and not entry.unheard:
                slowest, fastest = min(slowest, entry.clock), max(fastest, entry.clock)
        return max(0, fastest - slowest)

    @property
    def complete(self) -> bool:
        """Whether all that count have joined since the shard was rolled back, if it ever was."""
        return not any(self.entries[worker].unheard for worker in self.active)

    def standings(self, waits: Callable[[str], bool]) -> tuple[WorkerStatus, ...]:
        """How each worker stands, as an operator is told; `waits` says whether one is parked."""
        return tuple(
            WorkerStatus(
                name,
                entry.standing,
                entry.incarnation,
                entry.takeovers,
                entry.clock,
                entry.step,
                entry.seq,
                waits(name),
                entry.loss,
            )
            for name, entry in self.entries.items()
        )


def _fenced(worker: str, incarnation: int, entry: LedgerEntry) -> Fenced:
    return Fenced(
        f"worker {worker}: incarnation {entry.incarnation} has taken over from {incarnation}"
    )
