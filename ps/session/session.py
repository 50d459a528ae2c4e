"""The session: a worker's side of the protocol with all shards, as a pure state machine.

Theory. One logical request (a pull, a push) is one message to each shard and is complete when every
shard has answered. Nothing is lost as long as each unanswered message is kept and sent again: the
shard recognises a repetition (by seq for a push, by request number for the rest), so repeating is
always safe. Reliability is therefore a table of outstanding messages with a deadline each
(retransmit.py), and these reactions:

- silence: send the message again, with a growing delay;
- a gap (the shard lacks an earlier push): send all unacknowledged pushes again, in order;
- a resynchronise (the shard restarted, the lease ran out, the shard map changed), also as the
  answer to a lease renewal: say hello again, join, then resend everything outstanding to that
  shard;
- a gradient that a shard refuses to apply: send that shard the same push without values, so that
  the push counts everywhere and later pushes can follow, and report the refusal to the driver once
  per push. With several shards a gradient that one of them would refuse is not sent to any
  (payload_encoder.py);
- a shard that owes an answer and is silent for `patience_s`, while the driver listens: give up,
  naming the shard.

Any number of requests may be in flight (inflight.py). Registration, and the clock that is sent to
the shards, are in membership.py. When that clock is advanced because the others continued without
this worker, the session repeats its outstanding pulls at the new clock.

A driver calls a method, sends what it returns, feeds `receive` with what arrives and calls `tick`
by `next_deadline`. The session holds the arrays of an unacknowledged push: until `Pushed` reports
it, their memory must not change. A compressed push is encoded once, into arrays of its own, and
repeated unchanged: encoding it again would add the residual a second time (error_feedback.py).
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ps.session.compression import Compression, by_table
from ps.session.events import ClockTimeout, Event, Frames, Ready, Relocated, Send, Usurped
from ps.session.flow_control import PushTimes
from ps.session.inflight import InflightRequests
from ps.session.membership import Membership
from ps.session.payload_encoder import Gradients, PayloadEncoder
from ps.session.retransmit import RetransmitTable, UnansweredMessage
from ps.session.row_requests import Gather, SplitIds
from shards.errors import BadInput, BadMessage, Full, Mismatch
from shards.messages import (
    PROTOCOL,
    Ack,
    FromWorker,
    Hello,
    Join,
    Joined,
    Leave,
    Parked,
    Pull,
    Push,
    Refusal,
    Registered,
    Remedy,
    Renewed,
    Reply,
    Weights,
    Welcome,
)
from shards.refusals import error_of
from shards.tables import Layout, ShardMap
from shards.wire_format import Buffer

_NO_TIMES = PushTimes()


class Session:
    """One incarnation of one worker, talking to every shard of one job."""

    def __init__(
        self,
        *,
        job: str,
        worker: str,
        incarnation: int,
        layout: Layout,
        shard_map: ShardMap,
        retry_s: float = 1.0,
        patience_s: float = 30.0,
        compression: Compression | Mapping[str, Compression] | None = None,
        max_norms: Mapping[str, float] | None = None,
    ) -> None:
        """`compression` is that of all tables, or of each by name; those not named have none.

        `max_norms` are the limits of the tables' guards (shards/gradient_guard.py), where they are
        known.
        """
        self.job = job
        self.worker = worker
        self.incarnation = incarnation
        self.layout = layout
        self.map = shard_map
        self.seq = 0
        self.slowest_clock: int | None = None  # as reported with the last pull that had to wait
        self.encoder = PayloadEncoder(
            layout, shard_map, by_table(compression, layout), max_norms or {}
        )
        self._shards = range(shard_map.shards)
        self._tables = layout.names
        self._outstanding = RetransmitTable(worker, retry_s, patience_s)
        self._registration = Membership(
            self._outstanding,
            shard_map.shards,
            job=job,
            worker=worker,
            incarnation=incarnation,
        )
        self._acknowledged = self._registration.acknowledged
        self._boots = self._registration.boots
        self._requests = InflightRequests(
            self._outstanding, self._registration, self.encoder, shard_map.shards
        )
        self._resent: dict[int, tuple[int, float]] = {}
        self._leaving = False

    # --- what a driver asks for -------------------------------------------------------------------

    def hello(self, now: float) -> list[Send]:
        """Say hello to every shard; `Ready` follows.

        Once the session is ready, this greets all shards again; each is then sent everything
        outstanding.
        """
        return [self._greet(shard, now) for shard in self._shards]

    def pull(
        self,
        clock: int,
        now: float,
        tables: tuple[str, ...] | None = None,
        gather: Gather | None = None,
    ) -> tuple[int, list[Send]]:
        """Request the weights of a step at `clock`, of all or some dense tables, and the rows of
        `gather`; `Pulled` follows once the staleness bound allows it.

        Several pulls may be in flight; each is answered under its own request number. Raises
        BadInput for more rows than a message holds.
        """
        rows = () if gather is None else self.encoder.split_gather(gather)
        if self._registration.follows:
            self._registration.reads_at(clock)
        names = self._tables if tables is None else tables
        request = self._requests.begin(Pull, now, clock, names, rows)
        return request, self._ask_weights(request, clock, names, rows, now)

    def push(
        self,
        gradient: NDArray[np.float32] | Gradients,
        read_versions: Sequence[int],
        *,
        clock: int,
        step: int,
        steps: int,
        samples: int,
        loss: float,
        times: PushTimes = _NO_TIMES,
        now: float,
        plain: bool = False,
        tokens: int = 0,
        window: int = 0,
    ) -> tuple[int, list[Send]]:
        """Send a gradient; `Pushed` follows.

        It is one float32 array of all tables, of shape (layout.size,), or one of shape
        (table.size,) for each of some tables; the others then do not change. Rows of a sparse table
        are a RowGradient.

        `read_versions` are the versions, one per shard, of the weights that it was computed from.
        `clock` and `step` are the worker's once it is applied. The arrays must not change until
        `Pushed`, unless the push is compressed; `plain` sends it uncompressed. `tokens` and
        `window` are those of a report (messages.py). Raises BadInput when the gradient does not
        fit the tables, or a shard would refuse it.
        """
        gradients = self.encoder.tables(gradient)
        if len(read_versions) != len(self._shards):
            raise BadInput(
                "push",
                expected=f"{len(self._shards)} read versions, one per shard",
                got=len(read_versions),
            )
        seq, acknowledged = self.seq + 1, self.seq - len(self._requests.pushes)
        try:
            written = self.encoder.write(gradients, seq, plain=plain)
        except BadInput as error:
            error.worker = self.worker
            raise
        # Only now: a gradient that was refused above has used no number, or the shards would see a
        # gap.
        self.seq = seq
        membership = self._registration
        wire_clock = clock + membership.ahead
        membership.reached = max(membership.reached, wire_clock)
        request = self._requests.begin(Push, now, clock)
        sends: list[Send] = []
        for shard, (parts, frames) in enumerate(written):
            message = Push(
                request,
                self.job,
                self.worker,
                self.incarnation,
                membership.boots[shard],
                self.map.epoch,
                seq,
                wire_clock,
                step,
                steps,
                samples,
                read_versions[shard],
                parts,
                loss,
                times.rtt_s,
                times.wait_s,
                max(0, acknowledged),
                times.compute_s,
                times.data_s,
                times.network_s,
                tokens,
                window,
            )
            # Recorded for every shard, but sent only where this worker has joined; the others get
            # it after their Join.
            send = self._outstanding.add(shard, request, message, frames, now)
            if shard in membership.joined:
                sends.append(send)
        return request, sends

    def outstanding(self) -> Iterator[tuple[int, FromWorker, Frames]]:
        """The unanswered messages: shard, message, frames."""
        for shard, pending in self._outstanding:
            yield shard, pending.message, pending.frames

    def follow(self, former: "Session", now: float) -> list[Send]:
        """Continue from `former`, the session with the previous shards; call it once ready, before
        any request.

        If the others have advanced beyond what this worker has pushed and received, it catches up
        with them, as after any registration.
        """
        sends = self._registration.follow(former._registration, now)
        # The residual is the worker's and not the shards': a fresh one would lose a part of its
        # gradients.
        self.encoder.feedback = former.encoder.feedback
        self._outstanding.expect(former.rtt_s)
        return sends

    @property
    def ready(self) -> Ready | None:
        """Where this worker continues, once every shard has registered it."""
        return self._registration.ready

    @property
    def ahead(self) -> int:
        """The lead of the clock sent to the shards over the driver's count."""
        return self._registration.ahead

    @property
    def rtt_s(self) -> float:
        """The duration of the last push in seconds; it at most doubles from push to push."""
        return self._outstanding.rtt_s

    @property
    def retry_s(self) -> float:
        """The least wait for a first answer, in seconds."""
        return self._outstanding.retry_s

    def leave(self, now: float) -> list[Send]:
        """Ask every shard to stop waiting for this worker; `Departed` follows."""
        # Before the messages: from now on a lost lease is no reason to say hello again.
        self._leaving = True
        request, membership, sends = self._requests.begin(Leave, now, 0), self._registration, []
        for shard in self._shards:
            message = Leave(
                request, self.job, self.worker, self.incarnation, membership.boots[shard]
            )
            send = self._outstanding.add(shard, request, message, (), now)
            if shard in membership.joined:
                sends.append(send)
        return sends

    # --- what happens -----------------------------------------------------------------------------

    def receive(
        self, shard: int, reply: Reply, frames: Sequence[Buffer], now: float
    ) -> tuple[list[Send], list[Event]]:
        """Take one answer; returns what to send, and the events.

        Raises the error that a final refusal stands for. An answer that matches no request, because
        it is late or repeated, changes nothing. The answered message is removed last, after all
        else is recorded. If Ctrl-C interrupts this, the message is sent again; recording its answer
        a second time has no effect.
        """
        pending = self._outstanding.record_answer(shard, reply.request, now)
        if pending is None:
            if reply.request == 0 and isinstance(reply, Refusal):
                return self._on_unasked_refusal(shard, reply, now), []
            return [], []
        match reply:  # the usual replies come first: each case that is tried costs time
            case Ack():
                if reply.boot != self._boots[shard]:
                    return [], []  # from an earlier incarnation; the present one is asked again
                # Acknowledgements may overtake each other, so only a later push replaces the known
                # one.
                known, push = self._acknowledged.get(shard), pending.message
                if isinstance(push, Push) and (known is None or known.seq < push.seq):
                    self._acknowledged[shard] = push
                answered = self._requests.record_answer(shard, pending.asked, reply, frames, now)
                # A push that was sent once and is a duplicate all the same was another client's.
                if reply.duplicate and not pending.repeated:
                    answered = [self._make_usurped(shard, reply.seq), *answered]
                self._outstanding.remove(shard, reply.request)
                return [], answered
            case Weights():
                if reply.boot != self._boots[shard]:
                    return [], []
                asks = pending.message.parts if isinstance(pending.message, Pull) else ()
                read = self.encoder.read(reply, asks, pending.frames, frames)
                sends: list[Send] = []
                events: list[Event] = []
                if read is None:
                    sends = self._ask_whole(shard, pending, now)
                else:
                    events = self._requests.record_answer(shard, pending.asked, *read, now)
                self._outstanding.remove(shard, reply.request)
                return sends, events
            case Refusal(remedy=Remedy.MOVED):
                return [], [self._make_relocated(frames)]
            case Refusal():
                return self._on_refusal(shard, reply, pending, now), []
            case Parked():
                self.slowest_clock = reply.min_clock
                return [], []
            case Renewed():
                return [], []
        self._outstanding.remove(shard, reply.request)
        match reply:
            case Welcome():
                if reply.shard != shard:
                    raise BadInput(
                        f"endpoint of shard {shard}",
                        expected="that shard there",
                        got=f"shard {reply.shard} of the job: check the order of the endpoints",
                    )
                self._resent.pop(shard, None)
                self._outstanding.end_deferral(shard)
                rolled_back = self._registration.find_rollback(shard, reply)
                sends = self._registration.on_welcome(shard, reply, now)
                return sends, [rolled_back] if rolled_back is not None else []
            case Joined():
                return self._on_joined(shard, reply, now)
            case _:
                return [], self._requests.record_answer(shard, pending.asked, reply, frames, now)

    def greet_new_primary(self, shard: int, now: float) -> list[Send]:
        """Another copy of `shard` is the primary now, and the driver's link leads to it."""
        self._outstanding.hurry(shard, now)
        hello = self._greet(shard, now)
        self._outstanding.end_deferral(shard)
        # The silence so far was the former copy's.
        self._outstanding.record_answer(shard, hello.message.request, now)
        return [hello]

    def resume_link(self, shard: int, now: float) -> list[Send]:
        """The driver's link to `shard` was cut and works again: everything in transit was lost."""
        sends = self._outstanding.again(shard, now)
        return [send for send in sends if self._registration.may_send(shard, send.message)]

    def tick(self, now: float) -> list[Send]:
        """Resend the messages that are due.

        Raises Unreachable when a shard stays silent, NotReady when it defers the worker for too
        long.
        """
        return self._outstanding.due(now, self._registration.may_send)

    @property
    def next_deadline(self) -> float | None:
        """When to call `tick` next; None while nothing is outstanding."""
        return self._outstanding.next_deadline

    @property
    def pending_pushes(self) -> int:
        """The number of pushes that not every shard has acknowledged."""
        return len(self._requests.pushes)

    def make_clock_timeout(self, clock: int, timeout_s: float) -> ClockTimeout:
        """The error of a pull for `clock` that has waited `timeout_s` seconds in vain."""
        slowest = self.slowest_clock
        known = "" if slowest is None else f": the slowest worker is at clock {slowest}"
        error = ClockTimeout(
            f"worker {self.worker}: the pull for clock {clock} has waited {timeout_s:g} s at the"
            f" staleness bound{known}",
            slowest,
        )
        error.worker = self.worker
        return error

    @property
    def boots(self) -> tuple[int, ...]:
        """The incarnation of each shard that this session talks to, once the session is ready."""
        return tuple(self._registration.boots[shard] for shard in self._shards)

    @property
    def versions(self) -> tuple[int, ...]:
        """The version that each shard had at its last greeting, once the session is ready."""
        return self._registration.versions

    # --- greeting ---------------------------------------------------------------------------------

    def _greet(self, shard: int, now: float) -> Send:
        return self._registration.greet(shard, now)

    def _on_joined(self, shard: int, reply: Joined, now: float) -> tuple[list[Send], list[Event]]:
        membership = self._registration
        if membership.ready is None:
            sends, ready = membership.on_joined(shard, reply, now)
            if ready is None:
                return sends, []
            self.seq = ready.seq
            return sends, [ready]
        returning = shard not in membership.joined
        behind, sends = membership.on_rejoined(shard, reply, now)
        if behind > 0:
            # A returning shard is sent everything outstanding below: do not send its pulls twice.
            pulls = self._catch_up(behind, now)
            sends += [send for send in pulls if not (returning and send.shard == shard)]
        return sends + (self._readdress(shard, now) if returning else []), []

    def _catch_up(self, behind: int, now: float) -> list[Send]:
        """A shard's clock for this worker is higher by `behind`: adjust the messages in flight."""
        for shard, pending in self._outstanding:
            message = pending.message
            if isinstance(message, Push):
                pending.message = msgspec.structs.replace(message, clock=message.clock + behind)
            elif isinstance(message, Pull):
                # An answer at the old clock may have passed the gate where the new one must wait.
                self._outstanding.remove(shard, message.request)
        return [
            send
            for request, clock, tables, rows in self._requests.repeat_pulls()
            for send in self._ask_weights(request, clock, tables, rows, now)
        ]

    def _make_relocated(self, frames: Sequence[Buffer]) -> Event:
        if len(frames) != 1:
            raise BadMessage(f"a shard that has handed over: expected 1 frame, got {len(frames)}")
        return Relocated(bytes(frames[0]))

    def _make_usurped(self, shard: int, seq: int) -> Usurped:
        return Usurped(
            f"worker {self.worker}: another client uses incarnation {self.incarnation} of this"
            f" worker: shard {shard} has push {seq} of that client instead of ours; give each"
            " client its own worker name"
        )

    # --- refusals ---------------------------------------------------------------------------------

    def _on_refusal(
        self, shard: int, reply: Refusal, pending: UnansweredMessage, now: float
    ) -> list[Send]:
        match reply.remedy:
            case Remedy.RETRY:
                if isinstance(pending.message, Hello):
                    self._outstanding.put_off(shard, reply.text, now)
                return []
            case Remedy.GAP:
                return self._resend_pushes(shard, reply.expected, now)
            case Remedy.RESYNCHRONISE:
                # Several requests in flight are refused for one reason: greet once.
                if shard not in self._registration.joined and not isinstance(pending.message, Join):
                    return []
                if isinstance(pending.message, Registered) and (
                    pending.message.boot != self._registration.boots.get(shard)
                ):
                    return []
                return [self._greet(shard, now)]
            case Remedy.BAD_INPUT | Remedy.FULL if isinstance(pending.message, Push):
                return self._on_damaged(shard, reply, pending, now)
            case _:
                raise error_of(reply)

    def _on_unasked_refusal(self, shard: int, reply: Refusal, now: float) -> list[Send]:
        """Handle a refusal of a renewal, or of a message that the shard could not read."""
        if reply.remedy is Remedy.BAD_MESSAGE:
            if shard not in self._boots:
                raise Mismatch(
                    f"shard {shard}: expected one that speaks protocol {PROTOCOL}, got one that"
                    f" cannot read our greeting: {reply.text}"
                )
            raise error_of(reply)
        if reply.remedy is not Remedy.RESYNCHRONISE or self._leaving:
            return []
        # With nothing outstanding, no other message would make this worker greet the shard. A reply
        # from an earlier incarnation of the shard, or during a greeting, is out of date.
        if shard not in self._registration.joined or reply.boot < self._boots[shard]:
            return []
        return [self._greet(shard, now)]

    def _on_damaged(
        self, shard: int, reply: Refusal, pending: UnansweredMessage, now: float
    ) -> list[Send]:
        # Other shards may have applied their parts of this push. So it is sent to this shard again
        # without values, which completes it.
        first = self._requests.mark_damaged(pending.asked, pending.frames)
        self._outstanding.empty(pending, now)
        if first:
            kind = Full if reply.remedy is Remedy.FULL else BadInput
            error = kind(f"shard {shard}: {reply.text}")
            error.shard = shard
            raise error
        return []

    def _resend_pushes(self, shard: int, expected: int, now: float) -> list[Send]:
        # Every push behind the lost one is refused for the same reason: resend them once.
        resent, until = self._resent.get(shard, (0, 0.0))
        if resent == expected and now < until:
            return []
        self._resent[shard] = (expected, now + self._outstanding.first_s)
        return self._outstanding.repeat_pushes(shard, expected, now)

    def _readdress(self, shard: int, now: float) -> list[Send]:
        """Resend everything outstanding, addressed to the shard's present incarnation."""
        return self._outstanding.readdress(shard, self._registration.boots[shard], now)

    # --- requests and answers ---------------------------------------------------------------------

    def _ask_weights(
        self,
        asked: int,
        clock: int,
        tables: tuple[str, ...],
        rows: tuple[SplitIds, ...],
        now: float,
    ) -> list[Send]:
        """Request the weights of pull `asked` from every shard, under a fresh request number."""
        request, membership, sends = self._outstanding.count(), self._registration, []
        for shard in self._shards:
            asks = self.encoder.asks(shard, tables)
            frames: Frames = ()
            if rows:
                row_asks, frames = self.encoder.row_asks(shard, rows)
                asks = [*asks, *row_asks]
            message = Pull(
                request,
                self.job,
                self.worker,
                self.incarnation,
                membership.boots[shard],
                self.map.epoch,
                clock + membership.ahead,
                asks,
            )
            send = self._outstanding.add(shard, asked, message, frames, now)
            if shard in membership.joined:
                sends.append(send)
        return sends

    def _ask_whole(self, shard: int, pending: UnansweredMessage, now: float) -> list[Send]:
        """Request the same weights again, in full instead of as changes."""
        assert isinstance(pending.message, Pull)
        # A base of 0 asks for whole weights. The number is new, so that a late answer to the former
        # request cannot count for this one.
        parts = [msgspec.structs.replace(ask, base=0) for ask in pending.message.parts]
        replaced = {"request": self._outstanding.count(), "parts": parts}
        pull = msgspec.structs.replace(pending.message, **replaced)
        send = self._outstanding.add(shard, pending.asked, pull, pending.frames, now)
        return [send] if shard in self._registration.joined else []
