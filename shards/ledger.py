"""The ledger: a shard's record of each worker. It decides which pushes and workers count.

Theory. Messages are lost, repeated and delayed, and a worker may die and be replaced by another
incarnation under the same name. Two numbers make every push count exactly once:

- the *incarnation* orders a worker's processes. A Hello with a higher one takes over the name;
  every message of a lower one is refused, so a zombie cannot write.
- the *seq* orders a worker's pushes. The only push applied is `last + 1`. A smaller number was
  applied before: it is acknowledged again and changes nothing. A larger one means that a message
  was lost: the refusal names the number that is expected. An incarnation that joins says after
  which push it begins: it skips those that its predecessor left at some shards only.

Only active workers, those that have joined, count at the gate, because Spark starts tasks in waves
and a task that has not started must not hold back those that have. A worker that joins late starts
at the slowest active clock. A worker that is silent for longer than one lease no longer counts.
Time in which the shard itself does not listen is not silence.
After a rollback the saved clocks count until their workers have joined again (`roll_back`).
The slowest clock never decreases, even when no worker is active any more: `floor` remembers it.
Otherwise two workers that return one after the other could be further apart than the bound allows.

The ledger is one value that travels with snapshots. It leaves the answers to the shard, and never
reads a clock: `now` is passed in, in seconds of any monotonic clock.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from math import isfinite

import msgspec

from shards.argument_checks import MAX_INT
from shards.errors import BadMessage, Fenced, Gap, Resynchronise
from shards.messages import MAX_IN_FLIGHT, MAX_STEPS, Count, FromWorker, Leave, Pull, Push
from shards.shard_status import Standing, WorkerStatus

# What a shard knows may be behind what another one knows by the pushes that are on their way, each
# with the most steps. One shard cannot know more: a worker that is ahead elsewhere looks to it like
# one with a false clock. A false clock within this limit holds back nobody, since the others
# wait for the slowest worker; workers that join after it may begin at it, and count on from there.
_LEAP = MAX_IN_FLIGHT * MAX_STEPS
_LEASED = (Standing.KNOWN, Standing.ACTIVE)


class Verdict(Enum):
    """What to do with a push."""

    APPLY = auto()
    DUPLICATE = auto()


class LedgerEntry(msgspec.Struct):
    """One worker. `clock` counts at the gate; `step` counts the steps of the worker's own plan.

    `takeovers` counts incarnations that began before their predecessor had left; `admitted` says
    whether this incarnation has ever counted at the gate; `loss` is the last finite loss it
    reported; `refused` counts the gradients of all its incarnations that the guard has refused
    (gradient_guard.py). `acknowledged` is the last push that every shard had acknowledged to it
    when it sent push `seq`; `dropped` are later ones that this shard has dropped, as each further
    acknowledgement of them says. `unheard`: the shard was rolled back to a saved state in which the
    worker is active, and the worker has not joined since.
    """

    incarnation: Count
    seq: Count = 0
    clock: Count = 0
    step: Count = 0
    standing: Standing = Standing.KNOWN
    takeovers: Count = 0
    lease_until: float = 0.0
    loss: float = 0.0
    admitted: bool = False
    refused: Count = 0
    acknowledged: Count = 0
    unheard: bool = False
    dropped: tuple[Count, ...] = ()


class Ledger(msgspec.Struct):
    """All workers a shard has heard of, by name.

    `floor` is the highest value that the slowest active clock has had.
    """

    entries: dict[str, LedgerEntry] = {}
    floor: Count = 0

    # --- coming and going -----------------------------------------------------------------------

    def greet(self, worker: str, incarnation: int, lease_until: float) -> LedgerEntry:
        """Record an incarnation as the present one of `worker`; raises Fenced if a newer one is
        recorded.
        """
        entry = self.entries.get(worker)
        if entry is None:
            entry = self.entries[worker] = LedgerEntry(incarnation)
        elif incarnation < entry.incarnation:
            raise _fenced(worker, incarnation, entry)
        elif incarnation > entry.incarnation:
            # It is no takeover if the incarnation before has left, as all have in a resumed job.
            entry.takeovers += entry.standing is not Standing.LEFT
            entry.incarnation = incarnation
            # A new incarnation waits for the warm start as any newcomer does.
            entry.admitted = False
            self._stand(entry, Standing.KNOWN)
        # An active worker that repeats its Hello, because the answer was lost, stays active.
        elif entry.standing is not Standing.ACTIVE:
            self._stand(entry, Standing.KNOWN)
        entry.lease_until = lease_until
        return entry

    def join(self, worker: str, clock: int) -> int:
        """Count `worker` at the gate from now on; returns the clock it counts with.

        Joining never lowers the slowest clock, so a newcomer holds back no running worker.
        """
        entry = self.entries[worker]
        # Not below the floor: workers that have passed the gate there would be too far ahead of it.
        entry.clock = max(entry.clock, clock, self.floor)
        entry.admitted, entry.unheard = True, False
        self._stand(entry, Standing.ACTIVE)
        return entry.clock

    def skip_to(self, worker: str, seq: int, step: int) -> int:
        """Expect the push after `seq` next; returns the steps of the pushes that are skipped.

        The worker never sends those that are missing up to `seq`: it died while other shards had
        applied them, or this shard acknowledged them before a rollback.
        """
        entry = self.entries[worker]
        # Nothing is missing; it may know of fewer than were applied, because an answer was lost.
        if seq <= entry.seq:
            return 0
        skipped, entry.seq, entry.step = max(0, step - entry.step), seq, step
        return skipped

    def roll_back(self) -> None:
        """Mark the active workers as unheard: the state may be older than the weights they have.

        Each reports how far it is when it joins. Nothing else shows that. The pushes of the other
        workers do not, because a worker may push any number of times after one pull. The pulls that
        they were given do not, because the gate must wait for the pushes that the worker is yet to
        repeat.
        """
        for worker in self.active:
            self.entries[worker].unheard = True

    def leave(self, worker: str) -> None:
        self._stand(self.entries[worker], Standing.LEFT)

    def detach_workers(self) -> None:
        """Mark all workers as left and lift their quarantine, for a ledger of an earlier job.

        Each counts again when it joins again.
        """
        for entry in self.entries.values():
            entry.standing = Standing.LEFT
            entry.refused = entry.acknowledged = 0
            entry.dropped = ()

    def silent(self, now: float) -> list[str]:
        """Workers with a lease that has run out, which `expire` has yet to mark."""
        return [
            worker
            for worker, entry in self.entries.items()
            if entry.standing in _LEASED and entry.lease_until <= now
        ]

    def expire(self, workers: Sequence[str]) -> None:
        """Stop counting these workers.

        They expire together, so the slowest clock is computed once for all of them.
        """
        for worker in workers:
            self.entries[worker].standing = Standing.EXPIRED
        self._raise_floor()

    def renew(self, lease_until: float) -> None:
        """Restart all leases: the shard was unreachable, so no worker could renew."""
        for entry in self.entries.values():
            if entry.standing in _LEASED:
                entry.lease_until = lease_until

    def forgive_silence(self, unheard_s: float) -> None:
        """Extend all leases by the time in which this shard did not listen."""
        for entry in self.entries.values():
            if entry.standing in _LEASED:
                entry.lease_until += unheard_s

    def _stand(self, entry: LedgerEntry, standing: Standing) -> None:
        entry.standing = standing
        self._raise_floor()

    def _raise_floor(self) -> None:
        """Raise the floor to the slowest active clock."""
        slowest, _ = self._clocks()
        if slowest is not None and slowest > self.floor:
            self.floor = slowest

    @property
    def cut(self) -> dict[str, int]:
        """The last applied push of each worker."""
        return {worker: entry.seq for worker, entry in self.entries.items()}

    @property
    def incarnations(self) -> dict[str, tuple[int, int]]:
        """The incarnation of each worker, and its last applied push."""
        return {worker: (entry.incarnation, entry.seq) for worker, entry in self.entries.items()}

    def short_of(self, cut: Mapping[str, int]) -> bool:
        """Return whether a push up to `cut` is still to come from a worker that may yet send it."""
        return any(
            entry.seq < cut.get(worker, 0)
            for worker, entry in self.entries.items()
            if entry.standing in _LEASED
        )

    # --- judging --------------------------------------------------------------------------------

    def identify(self, message: FromWorker, lease_until: float) -> LedgerEntry:
        """The sender's entry, its lease renewed; raises Fenced or Resynchronise.

        Only an active worker may pull and push. So a late message from before its departure changes
        nothing, and a shard that has forgotten a worker sends it no weights before it has joined
        again.
        """
        entry = self.entries.get(message.worker)
        # The entry may be older than the sender's: this shard may have returned to an earlier
        # state.
        if entry is None or message.incarnation > entry.incarnation:
            raise Resynchronise(f"worker {message.worker} has not said hello to this shard")
        if message.incarnation < entry.incarnation:
            raise _fenced(message.worker, message.incarnation, entry)
        if entry.standing is Standing.EXPIRED:
            raise Resynchronise(f"worker {message.worker}: the lease ran out at step {entry.step}")
        # A repeated Leave is answered again: the answer to the first one may have been lost.
        if entry.standing is Standing.LEFT and not isinstance(message, Leave):
            raise Resynchronise(f"worker {message.worker} has left this shard")
        # Not yet counted at the gate, it could read and push at a clock that no bound holds.
        if entry.standing is Standing.KNOWN and isinstance(message, Push | Pull):
            raise Resynchronise(f"worker {message.worker} has not joined this shard")
        entry.lease_until = lease_until
        return entry

    def check_clock(self, worker: str, clock: int) -> None:
        """Raise BadMessage for a clock that no worker can have reached.

        Every worker that joins later would start at such a clock. A shard may lag behind the
        others, but by no more than the pushes that are on their way to it.
        """
        if clock <= self.entries[worker].clock + _LEAP:
            return
        fastest = max(self.floor, *[entry.clock for entry in self.entries.values()])
        if clock > fastest + _LEAP:
            raise BadMessage(
                f"worker {worker}: expected a clock of at most {_LEAP} more than the fastest"
                f" worker's, {fastest}, got {clock}"
            )

    def check_skip(self, worker: str, seq: int, step: int, *, rolled_back: bool) -> None:
        """Raise BadMessage if a worker that joins cannot have made the pushes up to `seq` and the
        steps up to `step`.

        The shard would count those that it lacks as made (`skip_to`), which moves its schedule. It
        lacks at most those that were on their way to it or, if it was `rolled_back`, those since
        the saved state.
        """
        entry = self.entries[worker]
        missing, most = seq - entry.seq, _LEAP if rolled_back else MAX_IN_FLIGHT
        if missing > most:
            raise BadMessage(
                f"worker {worker}: expected to continue after push {entry.seq + most} at most,"
                f" got {seq}"
            )
        if missing > 0 and step - entry.step > missing * MAX_STEPS:
            raise BadMessage(
                f"worker {worker}: expected at most {missing * MAX_STEPS} steps in {missing} pushes"
                f" after step {entry.step}, got step {step}"
            )

    def judge(self, worker: str, seq: int) -> Verdict:
        """Return whether push `seq` is the next one; raises Gap if one before it is missing."""
        expected = self.entries[worker].seq + 1
        if seq > expected:
            raise Gap(f"worker {worker}: expected push {expected}, got {seq}", expected)
        return Verdict.APPLY if seq == expected else Verdict.DUPLICATE

    def record(
        self,
        worker: str,
        seq: int,
        clock: int,
        step: int,
        loss: float,
        acknowledged: int = 0,
        *,
        dropped: bool = False,
    ) -> int:
        """Record that push `seq` has been applied or `dropped`; returns the clock gap."""
        entry = self.entries[worker]
        assert seq == entry.seq + 1, "judged before it is recorded"
        entry.seq, entry.step, entry.acknowledged = seq, step, acknowledged
        if dropped or entry.dropped:
            # Those that every shard has acknowledged are not repeated any more. The second limit is
            # for a worker that reports no acknowledgements: it must not fill the memory.
            least = max(acknowledged, seq - MAX_IN_FLIGHT)
            later = (number for number in entry.dropped if number > least)
            entry.dropped = (*later, seq) if dropped else (*later,)
        if isfinite(loss):  # a snapshot is JSON, which has no infinity
            entry.loss = loss
        # Never lower: `join` may have set it above the worker's own.
        entry.clock = max(entry.clock, clock)
        slowest, gap = self._clocks()
        if slowest is not None and slowest > self.floor:  # as `_raise_floor`, a call at each push
            self.floor = slowest
        return gap

    def advance(self, worker: str, clock: int) -> None:
        """Raise a worker's clock, never lower it: `join` may have set it above the worker's own."""
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
        """The slowest active worker's clock; None when no worker is active."""
        return self._clocks()[0]

    @property
    def clock_gap(self) -> int:
        """The fastest active clock minus the slowest, or 0; unheard workers are left out."""
        return self._clocks()[1]

    def _clocks(self) -> tuple[int | None, int]:
        """The slowest active clock, and the gap between the clocks of workers that were heard."""
        # One loop for both, without calls for each worker: it runs at every push.
        slowest = None
        low, high = MAX_INT, 0
        for entry in self.entries.values():
            if entry.standing is Standing.ACTIVE:
                clock = entry.clock
                if slowest is None or clock < slowest:
                    slowest = clock
                if entry.unheard:
                    continue
                if clock < low:  # noqa: PLR1730  # `min` is a call
                    low = clock
                if clock > high:  # noqa: PLR1730
                    high = clock
        return slowest, max(0, high - low)

    @property
    def complete(self) -> bool:
        """True if every active worker has joined since the last rollback, if there was one."""
        return not any(self.entries[worker].unheard for worker in self.active)

    def standings(
        self, waits: Callable[[str], bool], links: Mapping[str, tuple[str, float]]
    ) -> tuple[WorkerStatus, ...]:
        """The status of each worker, for operators; `waits` says whether its request is parked.

        `links` has the host of each worker and the round trip to it, as far as these are known.
        """
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
                *links.get(name, ("", 0.0)),
            )
            for name, entry in self.entries.items()
        )


def _fenced(worker: str, incarnation: int, entry: LedgerEntry) -> Fenced:
    return Fenced(
        f"worker {worker}: incarnation {entry.incarnation} has taken over from {incarnation}"
    )
