"""Requests of workers, and the shard's two promises to them.

- *Exactly once.* The ledger checks each push by incarnation and seq before anything changes, and it
  is updated in the same transition as the weights.
- *Bounded staleness.* A pull beyond the bound is parked in the gate. After every transition that
  may have raised the slowest clock or the bound, `open` answers the requests that may now pass.

A push of a synchronous round is acknowledged only when its round is applied. Until then it is not
in the ledger, and the shard may forget it; its worker then repeats it. The shard forgets it when
the worker says hello again, because the progress that a Welcome reports must not change afterwards.
"""

from collections.abc import Sequence

import msgspec

from shards import push_checks
from shards.errors import BadInput, Full, Mismatch, Resynchronise
from shards.ledger import Verdict
from shards.messages import (
    Ack,
    FromWorker,
    Hello,
    Join,
    Joined,
    Leave,
    Left,
    Parked,
    Pull,
    Push,
    Renew,
    Renewed,
    Request,
    Welcome,
)
from shards.push_checks import Arrived
from shards.reshard_state import ReshardState
from shards.schema_digest import differs
from shards.shard_part import ShardPart
from shards.shard_status import Standing
from shards.transition_io import Outgoing, refuse_request
from shards.updates import Applied
from shards.wire_format import Buffer


class WorkerRequests:
    """The workers of one incarnation of a shard: its replies to them, and their requests that wait.

    `welcomed` says whether a Welcome has reported this incarnation's state to any worker: from then
    on no Install may replace that state. `links` has, by worker, its host and the round trip to it
    in seconds, as its renewals report them.
    """

    def __init__(self, part: ShardPart, reshard: ReshardState) -> None:
        self.gate = part.gate
        self.welcomed = False
        self.links: dict[str, tuple[str, float]] = {}
        self._part = part
        self._reshard = reshard
        self._spec, self._boot = part.spec, part.boot
        self._parameters, self._ledger = part.parameters, part.ledger
        self._updates, self._serving = part.updates, part.serving
        self._guard = min(
            (table.guard for table in part.spec.tables), key=lambda guard: guard.quarantine_after
        )

    # --- coming and going -----------------------------------------------------------------------

    def hello(self, sender: bytes, message: Hello, now: float) -> list[Outgoing]:
        """Greet an incarnation of a worker, and report what the shard has of its pushes.

        Raises Mismatch, Retry if there are no weights yet, and Fenced.
        """
        if difference := differs(message.protocol, message.schema):
            raise Mismatch(f"shard {self._spec.shard}: {difference} of worker {message.worker}")
        self._parameters.weights()  # raises Retry: one greeted before the Install would block it
        entry = self._ledger.greet(message.worker, message.incarnation, now + self._spec.lease_s)
        # From now on a late Install would undo what this Welcome reports.
        self.welcomed = True
        self._serving.forget(message.worker)
        if entry.standing is Standing.KNOWN:
            # An open push of the earlier incarnation would move the progress that the Welcome
            # reports.
            self.gate.forget(message.worker)
            self._updates.round.pop(message.worker, None)
        welcome = Outgoing(
            sender,
            Welcome(
                message.request,
                self._spec.shard,
                self._boot,
                self._spec.map.epoch,
                self._parameters.version,
                entry.seq,
                entry.step,
                self._spec.lease_s,
                self._part.rolled_back,
                entry.acknowledged,
            ),
        )
        # A new incarnation does not count before it joins, so the slowest clock may have risen.
        return [welcome, *self.open(now)]

    def join(self, sender: bytes, message: Join, now: float) -> list[Outgoing]:
        """Count a worker at the gate, or park the request while another replica warms up."""
        self._identify(message, now)
        self._ledger.check_clock(message.worker, message.clock)
        if self._skips(message):
            rolled_back = self._part.rolled_back
            self._ledger.check_skip(
                message.worker, message.seq, message.step, rolled_back=rolled_back
            )
        if not self.may_answer(message, self._ledger.min_clock):
            return self._park(sender, message, now)
        return [self._admit(sender, message), *self.open(now)]

    def renew(self, sender: bytes, message: Renew, now: float) -> list[Outgoing]:
        self._identify(message, now)
        if message.host:
            self.links[message.worker] = message.host, message.rtt_s
        return [Outgoing(sender, Renewed(message.request, self._spec.shard, self._boot))]

    def leave(self, sender: bytes, message: Leave, now: float) -> list[Outgoing]:
        """Stop counting a worker, and answer the requests that may pass without it."""
        self._identify(message, now)
        # Before anything changes: a refused leave is repeated, and must find the worker still
        # active.
        self._reshard.quiesce.check_leave(message.worker, now)
        self._ledger.leave(message.worker)
        self.gate.forget(message.worker)
        self._part.metrics.forget(message.worker)
        self._serving.forget(message.worker)
        self.flush(now)
        self.merge_complete(now)
        reply = Outgoing(sender, Left(message.request, self._spec.shard, self._boot))
        return [reply, *self.open(now)]

    def expire(
        self, workers: Sequence[str], now: float, merges: Sequence[str] = ()
    ) -> list[Outgoing]:
        """Stop counting these workers at the gate: their leases ran out.

        The reports on the tables `merges`, if they are still open, are merged without those that
        are missing.
        """
        self._ledger.expire(workers)
        self.gate.forget(*workers)
        for worker in workers:
            self._serving.forget(worker)
        self.flush(now)
        if not self._reshard.has_begun(now):
            # Those named have ended: a replay has no clock to know which.
            reports = self._updates.reports
            named = (table for table in reports.quorate() if table in merges)
            self._updates.merge_reports(
                list(dict.fromkeys((*reports.complete(self._ledger.active), *named)))
            )
        return self.open(now)

    def merge_complete(self, now: float) -> None:
        """Merge the reports on each table for which no active worker is missing.

        A shard that is quiesced or has handed over its part leaves that to later or to its
        successors.
        """
        if self._updates.reports.tables and not self._reshard.has_begun(now):
            self._updates.merge_reports(self._updates.reports.complete(self._ledger.active))

    def next_merge(self, now: float) -> float | None:
        """When the grace of reports ends, by the shard's clock; None if nothing will be due."""
        if not self._updates.reports.tables or self._reshard.has_begun(now):
            return None
        return self._updates.reports.next_end(self._ledger.active)

    def due_merges(self, now: float) -> list[str]:
        """The tables with reports that wait for nobody any more."""
        if not self._updates.reports.tables or self._reshard.has_begun(now):
            return []
        return self._updates.reports.find_ended(self._ledger.active, now)

    def flush(self, now: float) -> None:
        """Apply what a buffer holds if no worker is left to fill it.

        A shard that is quiesced or has handed over its part leaves that to its successors.
        """
        if self.owes_flush(now):
            self._updates.flush()

    def owes_flush(self, now: float) -> bool:
        """Return whether `flush` would apply anything."""
        return self._updates.has_orphaned_buffer and not self._reshard.has_begun(now)

    def redirect_waiting(self) -> None:
        """Forget all waiting requests after a handover; their senders repeat and are redirected."""
        self.gate.clear()
        # Otherwise the round would close here once the leases of the redirected workers run out.
        self._updates.round.clear()

    def take_over(self, now: float) -> None:
        """Take over workers of another copy or incarnation of this shard; they must say hello
        again.
        """
        # A late duplicate of the Install that preceded the workers must not undo their pushes.
        self.welcomed = any(e.standing is not Standing.LEFT for e in self._ledger.entries.values())
        # The leases are times of another clock, and nobody could renew one while no copy served.
        self._ledger.renew(now + self._spec.lease_s)
        self._updates.reports.forget_times()
        self.gate.clear()

    # --- waiting --------------------------------------------------------------------------------

    def waits(self, worker: str) -> bool:
        """Return whether a request of this worker is parked, or its push waits for its round."""
        return self.gate.waits(worker) or worker in self._updates.round

    def waiting(self) -> list[tuple[Push | Join, tuple[Buffer, ...]]]:
        """Waiting requests that will change the state: pushes of open rounds, parked joins."""
        pushes = [(arrived.message, arrived.frames) for arrived in self._updates.round.values()]
        joins = [
            waiting.message for waiting in self.gate.waiting if isinstance(waiting.message, Join)
        ]
        return [*pushes, *((join, ()) for join in joins)]

    def park_request(self, message: Request, frames: Sequence[Buffer], now: float) -> None:
        """Make a request wait that also waits at another copy; the ledger has checked it there."""
        if isinstance(message, Push):
            parameters, shard = self._parameters, self._spec.shard
            self._updates.add_to_round(push_checks.examine(b"", message, frames, parameters, shard))
        elif isinstance(message, Join):
            self.gate.park(b"", message, now)

    def may_answer(self, message: Pull | Join, slowest: int | None) -> bool:
        """Return whether the request may be answered now; `slowest` is the slowest clock."""
        if isinstance(message, Pull):
            if message.worker in self._updates.round:
                return False
            if self._updates.reports.awaits(message.worker, message.parts):
                return False
            return self.gate.passes(message.clock, slowest)
        entry = self._ledger.entries[message.worker]
        if self._part.rolled_back:
            if message.again:
                return True  # other shards count it already
            # A newcomer would start at the autosave's clock, far behind the workers that have yet
            # to return.
            if entry.standing is not Standing.ACTIVE and not self._ledger.complete:
                return False
        # Shard 0 alone decides which replica warms up, or two shards might choose different ones. A
        # worker that was admitted before and returns still counts elsewhere, so it must not wait.
        return (
            self._spec.shard > 0
            or entry.admitted
            or self._updates.steps >= self._spec.warm_steps
            or not [worker for worker in self._ledger.active if worker != message.worker]
        )

    def _park(
        self,
        sender: bytes,
        message: Pull | Join,
        now: float,
        frames: Sequence[Buffer] = (),
    ) -> list[Outgoing]:
        """Park a request; answer a repetition with Parked, which shows that this shard is alive."""
        is_new = self.gate.park(sender, message, now, frames)
        return [] if is_new else [self._answer_parked(sender, message)]

    def _answer_parked(self, sender: bytes, message: Request) -> Outgoing:
        slowest = self._ledger.min_clock or 0
        return Outgoing(sender, Parked(message.request, self._spec.shard, self._boot, slowest))

    def _admit(self, sender: bytes, message: Join) -> Outgoing:
        clock = self._ledger.join(message.worker, message.clock)
        if self._skips(message):
            # Skipped steps count, or the schedule would fall behind that of the other shards.
            self._updates.steps += self._ledger.skip_to(message.worker, message.seq, message.step)
        return Outgoing(sender, Joined(message.request, self._spec.shard, self._boot, clock))

    def _skips(self, message: Join) -> bool:
        """Return whether the pushes that this shard lacks, up to `message`, will never come."""
        return self._part.rolled_back or not message.again

    def open(self, now: float) -> list[Outgoing]:
        """Apply complete rounds, then answer every parked request that may pass.

        To be called after a transition that may have raised the slowest clock or the bound.
        """
        out: list[Outgoing] = []
        if self._updates.round:
            closed = self._updates.close_rounds(now, self._reshard.quiesce)
            out = self._acknowledge_all(closed)
        if not self.gate.parked:
            return out
        # Computed once for all parked requests: answering a pull or admitting a worker never
        # lowers it.
        slowest = self._ledger.min_clock
        for waiting in self.gate.release(lambda message: self.may_answer(message, slowest)):
            if isinstance(waiting.message, Join):
                out.append(self._admit(waiting.sender, waiting.message))
            else:
                waited = now - waiting.since
                answer = self._serving.pull(waiting.message, waiting.frames, waited, now)
                out.append(Outgoing(waiting.sender, *answer))
        return out

    # --- pulls and pushes -----------------------------------------------------------------------

    def pull(
        self, sender: bytes, message: Pull, frames: Sequence[Buffer], now: float
    ) -> list[Outgoing]:
        """Answer a pull with weights, or park it until the staleness bound allows the answer."""
        self._ledger.identify(message, now + self._spec.lease_s)
        if message.epoch != self._spec.map.epoch:
            raise self._wrong_epoch(message.epoch)
        # The usual pull asks for all dense tables as plain floats, and needs no check.
        if frames or message.parts != self._serving.plain:
            self._serving.check(message.parts, frames)
        # Without a bound and a round no pull waits, and the slowest clock, a loop over all workers,
        # need not be known.
        updates = self._updates
        may_wait = self.gate.bound is not None or updates.round or updates.merges_reports
        if may_wait and not self.may_answer(message, self._ledger.min_clock):
            return self._park(sender, message, now, frames)
        return [Outgoing(sender, *self._serving.pull(message, frames, 0.0, now))]

    def examine(
        self,
        sender: bytes,
        message: Push,
        frames: Sequence[Buffer],
        run: list[Arrived],
        now: float,
    ) -> list[Outgoing]:
        """Check a push and append it to `run`, for `apply`; or answer it, if it is not applied.

        Raises any error of the checks.
        """
        message = self._check_push(message, now)
        if self._updates.round:
            # The ledger lacks a push of an open round, so the next one would look like a gap.
            ahead_of = self._updates.round.get(message.worker)
            if ahead_of is not None and message.seq > ahead_of.message.seq:
                return [self._answer_parked(sender, message)]
        # Before the frames are read: those of a repeated push may be overwritten in shared memory.
        if self._ledger.judge(message.worker, message.seq) is Verdict.DUPLICATE:
            self._part.metrics.count_duplicate(message.worker)
            # The push was applied, so its steps are done: a retried worker's clock catches up.
            self._ledger.advance(message.worker, message.clock)
            dropped = message.seq in self._ledger.entries[message.worker].dropped
            ack = Ack(
                message.request,
                self._spec.shard,
                self._boot,
                message.seq,
                self._parameters.version,
                staleness=0,
                duplicate=True,
                dropped=dropped,
            )
            return [Outgoing(sender, ack), *self.open(now)]
        if self._updates.merges_reports:
            self._updates.reports.check(message)
        # After the duplicates: what was applied before the quarantine is still acknowledged.
        if refused := self._ledger.entries[message.worker].refused:
            self._guard.check(message.worker, refused)
        run.append(push_checks.examine(sender, message, frames, self._parameters, self._spec.shard))
        return []

    def apply(self, run: Sequence[Arrived], now: float) -> list[Outgoing]:
        """Apply a run of pushes, and answer the requests that may pass after it."""
        try:
            applied = self._updates.apply(run, now)
        except (BadInput, Full) as error:
            return [refuse_request(self._part, run[0].sender, run[0].message.request, error)]
        if applied is None:
            return [answer for arrived in run for answer in self.apply([arrived], now)]
        acknowledged = self._acknowledge_all(applied)
        if self._updates.merges_reports:
            self.merge_complete(now)
        if self._updates.round or self.gate.parked:
            acknowledged += self.open(now)
        return acknowledged

    def _acknowledge_all(self, applied: Sequence[Applied]) -> list[Outgoing]:
        out, shard, boot = [], self._spec.shard, self._boot
        for outcome in applied:
            push = outcome.push.message
            details = outcome.version, outcome.staleness, False, outcome.scale, outcome.dropped
            ack = Ack(push.request, shard, boot, push.seq, *details, outcome.late_s)
            out.append(Outgoing(outcome.push.sender, ack))
        return out

    # --- checks ---------------------------------------------------------------------------------

    def _check_push(self, message: Push, now: float) -> Push:
        """Check the push's sender, map epoch, clock and cut; return it for the ledger to judge.

        After a rollback its `read_version` may be lost; the present version then replaces it.
        """
        self._ledger.identify(message, now + self._spec.lease_s)
        if message.epoch != self._spec.map.epoch:
            raise self._wrong_epoch(message.epoch)
        self._ledger.check_clock(message.worker, message.clock)
        if self._reshard.quiesce.ends_at is not None:  # seldom, and a call costs time at each push
            self._reshard.quiesce.check(message.worker, message.seq, now)
        if self._part.rolled_back:
            read = min(message.read_version, self._parameters.version)
            return msgspec.structs.replace(message, read_version=read)
        return message

    def _wrong_epoch(self, epoch: int) -> Resynchronise:
        return Resynchronise(
            f"shard {self._spec.shard} is at map epoch {self._spec.map.epoch},"
            f" the message at {epoch}"
        )

    def _identify(self, message: FromWorker, now: float) -> None:
        self._ledger.identify(message, now + self._spec.lease_s)
