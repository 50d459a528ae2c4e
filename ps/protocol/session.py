"""The session: a worker's side of the protocol with all shards, as a pure state machine.

Theory. One logical request (a pull, a push) is one message to each shard and is complete when each
has answered. Nothing is lost as long as every message that has not been answered is kept and sent
again: the shard recognises a repetition (by seq for a push, by request number for the rest), so
repeating is always safe. Hence the whole of reliability here is a table of outstanding messages
with a deadline each (outstanding.py), and these reactions:

- silence: send it again, ever later;
- a gap: the shard lacks an earlier push; send all unacknowledged pushes again, in order;
- a resynchronise (the shard restarted, the lease ran out, the map moved), be it the answer to a
  renewal of the lease: say hello again, join, then send everything outstanding to that shard again;
- a gradient that a shard will not apply (it holds NaN, or its norm is above the cap): nothing takes
  the place of that shard's part, so that the push counts everywhere and those behind it can follow,
  and the driver is told, once for each push (nobody looks at every float before it leaves: that
  would cost half as much again as a whole push in shared memory does);
- silence of one shard that owes an answer for `patience_s`, while the driver listens: give up,
  naming it.

Any number of requests may be in flight (requests.py). How a worker comes to be registered, and the
clock it tells shards, is registration.py's; when that clock is put ahead, because the others have
gone on without this worker, the session asks anew for what it was pulling.

A driver calls a method, sends what it returns, feeds `receive` with what arrives and calls `tick`
by `next_deadline`. The session holds the arrays of an unacknowledged push: until `Pushed` reports
it, their memory must not change. A compressed push is written once, into arrays of its own, and
repeated as it was: written again it would take the residual a second time (feedback.py).
"""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ps.protocol.cargo import Cargo
from ps.protocol.compression import Compression
from ps.protocol.events import Event, Frames, Ready, Relocated, Send, Usurped
from ps.protocol.outstanding import Outstanding, Pending
from ps.protocol.registration import Registration
from ps.protocol.requests import Requests
from ps.protocol.unsaved import Unsaved
from shards import codec
from shards.codec import Buffer
from shards.errors import BadInput, BadMessage
from shards.messages import (
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
from shards.tables import DenseTable, ShardMap

_NEWCOMER_S = 0.1  # that the first answer of a copy that has just taken over is waited for


class Session:
    """One life of one worker, talking to every shard of one job."""

    def __init__(
        self,
        *,
        job: str,
        worker: str,
        incarnation: int,
        build: str,
        table: DenseTable,
        shard_map: ShardMap,
        retry_s: float = 1.0,
        patience_s: float = 30.0,
        compression: Compression | None = None,
    ) -> None:
        self.job = job
        self.worker = worker
        self.incarnation = incarnation
        self.table = table
        self.map = shard_map
        self.seq = 0
        self.cargo = Cargo(table, shard_map, compression or Compression())
        self._shards = range(shard_map.shards)
        self._keys = [codec.flatten(ranges) for ranges in shard_map.ranges]
        self._outstanding = Outstanding(worker, retry_s, patience_s)
        self._registration = Registration(
            self._outstanding,
            shard_map.shards,
            job=job,
            worker=worker,
            incarnation=incarnation,
            build=build,
        )
        self._acknowledged = self._registration.acknowledged
        self._boots = self._registration.boots
        self._requests = Requests(
            self._outstanding, self._registration, self.cargo, shard_map.shards
        )
        self._unsaved = Unsaved(shard_map.shards) if self.cargo.feedback is not None else None
        self._mended: dict[int, tuple[int, float]] = {}
        self._leaving = False

    # --- what a driver asks for -------------------------------------------------------------------

    def hello(self, now: float) -> list[Send]:
        """Introduce this worker to every shard; `Ready` follows.

        Once it is ready: greet them all anew, each of which is then sent all that it is owed.
        """
        return [self._greet(shard, now) for shard in self._shards]

    def pull(self, clock: int, now: float) -> tuple[int, list[Send]]:
        """Ask for the weights of a step at `clock`; `Pulled` follows when the gate lets it through.

        Several pulls may be in flight; each is answered under its own request number.
        """
        request = self._requests.begin(Pull, now, clock)
        return request, self._ask_weights(request, clock, now)

    def push(
        self,
        gradient: NDArray[np.float32],
        read_versions: Sequence[int],
        *,
        clock: int,
        step: int,
        steps: int,
        samples: int,
        loss: float,
        rtt_s: float,
        wait_s: float,
        now: float,
        plain: bool = False,
    ) -> tuple[int, list[Send]]:
        """Send a gradient of shape (table.size,) float32; `Pushed` follows.

        `read_versions` are the versions, one a shard, that it was computed from; `clock` and `step`
        hold once it is applied. The array must not change until `Pushed`, unless it is compressed,
        which it is not if `plain`. Raises BadInput when it does not fit the table, or cannot be
        compressed.
        """
        self.cargo.check(gradient)
        self._check_versions(read_versions)
        seq, acknowledged = self.seq + 1, self.seq - self.unacknowledged
        kind, zstd, written = self.cargo.write(gradient, seq, plain=plain)
        self.seq = seq
        own = self._registration
        told_clock = clock + own.ahead
        own.reached, own.pushed = max(own.reached, told_clock), told_clock
        request = self._requests.begin(Push, now, clock)
        messages = [
            Push(
                request,
                self.job,
                self.worker,
                self.incarnation,
                own.boots[shard],
                self.map.epoch,
                self.table.name,
                seq,
                told_clock,
                step,
                steps,
                samples,
                read_versions[shard],
                kind,
                self._keys[shard],
                loss,
                rtt_s,
                wait_s,
                zstd,
                max(0, acknowledged),
            )
            for shard in self._shards
        ]
        return request, self._to_all(request, messages, now, written)

    def outstanding(self) -> Iterator[tuple[int, FromWorker, Frames]]:
        """What has not been answered: to which shard, the message, its frames."""
        for shard, pending in self._outstanding:
            yield shard, pending.message, pending.frames

    def follow(self, former: "Session", now: float) -> list[Send]:
        """Once ready, before anything is asked: go on as `former` did with the shards before.

        If the others have gone beyond what this worker has pushed, it catches up with them, as
        after any registration.
        """
        sends = self._registration.follow(former._registration, now)
        # These know a push of a former life that not all of those had: it is about to be repeated,
        # and is to be known again.
        self.seq = min(self.seq, former.seq)
        self.cargo.feedback = former.cargo.feedback
        self._outstanding.rtt_s = former.rtt_s
        return sends

    @property
    def ready(self) -> Ready | None:
        """Where this worker goes on, once every shard has registered it."""
        return self._registration.ready

    @property
    def ahead(self) -> int:
        """How far the clock that shards are told is ahead of what the driver counts."""
        return self._registration.ahead

    @property
    def rtt_s(self) -> float:
        """How long the last push took, doubled at most from one to the next."""
        return self._outstanding.rtt_s

    @property
    def retry_s(self) -> float:
        """How long the first answer is waited for, at least."""
        return self._outstanding.retry_s

    def leave(self, now: float) -> list[Send]:
        """Tell every shard not to wait for this worker any more; `Departed` follows."""
        self._leaving = True
        request = self._requests.begin(Leave, now, 0)
        messages = [
            Leave(request, self.job, self.worker, self.incarnation, self._registration.boots[shard])
            for shard in self._shards
        ]
        return self._to_all(request, messages, now)

    # --- what happens -----------------------------------------------------------------------------

    def receive(
        self, shard: int, reply: Reply, frames: Sequence[Buffer], now: float
    ) -> tuple[list[Send], list[Event]]:
        """Take one answer; returns what to send and what has come to pass.

        Raises the error that a final refusal stands for. An answer to nothing (late or repeated)
        changes nothing. What it answers is settled once all else is noted: if Ctrl-C comes between,
        it is asked for again, and an answer that is noted twice counts once.
        """
        pending = self._outstanding.heard(shard, reply.request, now)
        if pending is None:
            if reply.request == 0 and isinstance(reply, Refusal):
                return self._unasked(shard, reply, now), []
            return [], []
        match reply:  # the usual first: every other case that is tried costs
            case Ack():
                if reply.boot != self._boots[shard]:
                    return [], []  # the shard has another life by now, which is asked again
                exported = None
                known, push = self._acknowledged.get(shard), pending.message
                if isinstance(push, Push) and (known is None or known.seq < push.seq):
                    self._acknowledged[shard] = push
                if self._unsaved is not None:
                    exported = self._unsaved.told(shard, reply.saved, self.outstanding())
                answered = self._requests.answered(shard, pending.asked, reply, frames, now)
                if reply.duplicate and not self._is_known(shard, reply.seq, pending):
                    answered = [self._usurped(shard, reply.seq), *answered]
                self._outstanding.settle(shard, reply.request)
                return [], [*answered, exported] if exported is not None else answered
            case Weights():
                if reply.boot != self._boots[shard]:
                    return [], []
                read = self.cargo.read(reply, frames)
                asks: list[Send] = []
                events: list[Event] = []
                if read is None:
                    asks = self._ask_whole(shard, pending, now)
                else:
                    events = self._requests.answered(shard, pending.asked, *read, now)
                self._outstanding.settle(shard, reply.request)
                return asks, events
            case Refusal(remedy=Remedy.MOVED):
                return [], [self._relocated(frames)]
            case Refusal():
                return self._refused(shard, reply, pending, now), []
            case Parked() | Renewed():
                return [], []
        self._outstanding.settle(shard, reply.request)
        match reply:
            case Welcome():
                if reply.shard != shard:
                    raise BadInput(
                        f"endpoint of shard {shard}: expected that shard there, got shard"
                        f" {reply.shard} of the job"
                    )
                self._mended.pop(shard, None)
                self._outstanding.welcomed(shard)
                rolled_back = self._registration.rolled_back(shard, reply)
                sends = self._registration.welcomed(shard, reply, now)
                return sends, [rolled_back] if rolled_back is not None else []
            case Joined():
                return self._admitted(shard, reply, now)
            case _:
                return [], self._requests.answered(shard, pending.asked, reply, frames, now)

    def moved(self, shard: int, now: float) -> list[Send]:
        """Another copy of `shard` serves from now on, and the driver's link leads there."""
        hello = self._greet(shard, now)
        self._outstanding.welcomed(shard)
        # The silence until now was another's. It may not serve yet, or the link to it not be open.
        pending = self._outstanding.heard(shard, hello.message.request, now)
        assert pending is not None, "it has just been sent"
        pending.wait_s = min(_NEWCOMER_S, pending.wait_s)
        pending.resend_at = now + pending.wait_s
        return [hello]

    def renewed(self, shard: int, now: float) -> list[Send]:
        """The driver's link to `shard` was cut, and is whole: what was on its way is lost."""
        sends = self._outstanding.again(shard, now)
        return [send for send in sends if self._registration.may_send(shard, send.message)]

    def tick(self, now: float) -> list[Send]:
        """Repeat what has been silent too long.

        Raises Unreachable when a shard stays silent, NotReady when it puts the worker off.
        """
        return self._outstanding.due(now, self._registration.may_send)

    @property
    def next_deadline(self) -> float | None:
        """When to call `tick` next; None while nothing is outstanding."""
        return self._outstanding.next_deadline

    @property
    def unacknowledged(self) -> int:
        """Pushes that not every shard has acknowledged."""
        return self._requests.unacknowledged

    @property
    def boots(self) -> tuple[int, ...]:
        """The life of each shard that this session talks to, once it is ready."""
        return tuple(self._registration.boots[shard] for shard in self._shards)

    @property
    def versions(self) -> tuple[int, ...]:
        """Of each shard the version that it had when it was last greeted, once this is ready."""
        return self._registration.versions

    # --- greeting ---------------------------------------------------------------------------------

    def _greet(self, shard: int, now: float) -> Send:
        return self._registration.greet(shard, now)

    def _admitted(self, shard: int, reply: Joined, now: float) -> tuple[list[Send], list[Event]]:
        own = self._registration
        if own.ready is None:
            sends, ready = own.admitted(shard, reply, now)
            if ready is None:
                return sends, []
            self.seq = ready.seq
            return sends, [ready]
        returning = shard not in own.joined
        behind, sends = own.readmitted(shard, reply, now)
        if behind > 0:
            # A shard that has this worker back is sent all that it owes, next.
            pulls = self._catch_up(behind, now)
            sends += [send for send in pulls if not (returning and send.shard == shard)]
        return sends + (self._readdressed(shard, now) if returning else []), []

    def _catch_up(self, behind: int, now: float) -> list[Send]:
        """A shard counts this worker further by `behind`: what is on its way has to say so, too."""
        for shard, pending in self._outstanding:
            message = pending.message
            if isinstance(message, Push):
                pending.message = msgspec.structs.replace(message, clock=message.clock + behind)
            elif isinstance(message, Pull):
                # An answer to the old clock may have passed a gate that the new one must not.
                self._outstanding.settle(shard, message.request)
        return [
            send
            for request, clock in self._requests.pulls_anew()
            for send in self._ask_weights(request, clock, now)
        ]

    def _relocated(self, frames: Sequence[Buffer]) -> Event:
        if len(frames) != 1:
            raise BadMessage(f"a shard that has moved: expected 1 frame, got {len(frames)}")
        return Relocated(bytes(frames[0]))

    def _is_known(self, shard: int, seq: int, pending: Pending) -> bool:
        """Whether `shard` may have push `seq` from this worker, this life or one before."""
        return pending.repeated or seq <= self._registration.had(shard)

    def _usurped(self, shard: int, seq: int) -> Usurped:
        return Usurped(
            f"worker {self.worker}: another client speaks for incarnation {self.incarnation} of it,"
            f" too: shard {shard} has that one's push {seq} in place of ours"
        )

    # --- refusals ---------------------------------------------------------------------------------

    def _refused(self, shard: int, reply: Refusal, pending: Pending, now: float) -> list[Send]:
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
            case Remedy.BAD_INPUT if isinstance(pending.message, Push):
                return self._spoilt(shard, reply, pending, now)
            case _:
                raise error_of(reply)

    def _unasked(self, shard: int, reply: Refusal, now: float) -> list[Send]:
        """Of a renewal, or of a message of which the shard cannot read which request it is."""
        if reply.remedy is Remedy.BAD_MESSAGE:
            raise error_of(reply)
        if reply.remedy is not Remedy.RESYNCHRONISE or self._leaving:
            return []
        # While this worker owes that shard nothing, no other message would make it greet the shard.
        # An answer from an earlier life of the shard, or while it is greeted, says nothing new.
        if shard not in self._registration.joined or reply.boot < self._boots[shard]:
            return []
        return [self._greet(shard, now)]

    def _spoilt(self, shard: int, reply: Refusal, pending: Pending, now: float) -> list[Send]:
        """Others may have applied their parts of this push: it goes on, without its part here."""
        first = self._requests.spoil(pending.asked, pending.frames)
        self._outstanding.empty(pending, now)
        if self._unsaved is not None:
            self._unsaved.pushed(shard, pending.message, pending.frames)
        if first:
            raise BadInput(f"shard {shard}: {reply.text}")
        return []

    def _resend_pushes(self, shard: int, expected: int, now: float) -> list[Send]:
        # Every push behind the lost one is refused for the same reason: mend it once.
        mended, until = self._mended.get(shard, (0, 0.0))
        if mended == expected and now < until:
            return []
        self._mended[shard] = (expected, now + self._outstanding.first_s)
        return self._outstanding.repeated(shard, expected, now)

    def _readdressed(self, shard: int, now: float) -> list[Send]:
        """Everything outstanding, to the shard's present life."""
        return self._outstanding.readdressed(shard, self._registration.boots[shard], now)

    # --- requests and answers ---------------------------------------------------------------------

    def _ask_weights(self, asked: int, clock: int, now: float) -> list[Send]:
        """Ask every shard for pull `asked`, under a number that it has not been sent with."""
        request, own = self._outstanding.count(), self._registration
        compression = self.cargo.compression
        messages = [
            Pull(
                request,
                self.job,
                self.worker,
                self.incarnation,
                own.boots[shard],
                self.map.epoch,
                self.table.name,
                clock + own.ahead,
                compression.pull,
                compression.zstd,
                self.cargo.base(shard),
                compression.pull_share,
            )
            for shard in self._shards
        ]
        return self._to_all(asked, messages, now)

    def _check_versions(self, read: Sequence[int]) -> None:
        if len(read) != len(self._shards):
            raise BadInput(
                f"push to table {self.table.name}: expected {self.map.shards} read versions,"
                f" one a shard, got {len(read)}"
            )

    def _to_all(
        self,
        asked: int,
        messages: Sequence[FromWorker],
        now: float,
        frames: Sequence[Frames] = (),
    ) -> list[Send]:
        """Ask each shard with its own of `messages`, behind which go its own of `frames`."""
        sends = []
        for shard in self._shards:
            own = frames[shard] if frames else ()
            send = self._outstanding.keep(shard, asked, messages[shard], own, now)
            if self._unsaved is not None:
                self._unsaved.pushed(shard, send.message, send.frames)
            if shard in self._registration.joined:
                sends.append(send)
        return sends

    def _ask_whole(self, shard: int, pending: Pending, now: float) -> list[Send]:
        """Ask for the same weights again, as changes to nothing."""
        assert isinstance(pending.message, Pull)
        pull = msgspec.structs.replace(pending.message, request=self._outstanding.count(), base=0)
        send = self._outstanding.keep(shard, pending.asked, pull, (), now)
        return [send] if shard in self._registration.joined else []
