"""The session: a worker's side of the protocol with all shards, as a pure state machine.

Theory. One logical request (a pull, a push) is one message to each shard and is complete when each
has answered. Nothing is lost as long as every message that has not been answered is kept and sent
again: the shard recognises a repetition (by seq for a push, by request number for the rest), so
repeating is always safe. Hence the whole of reliability here is a table of outstanding messages
with a deadline each (outstanding.py), and these reactions:

- silence: send it again, ever later;
- a gap: the shard lacks an earlier push; send all unacknowledged pushes again, in order;
- a resynchronise (the shard restarted, the lease ran out, the map moved): say hello again, join,
  then send everything outstanding to that shard again;
- silence of one shard that owes an answer for `patience_s`, while the driver listens: give up,
  naming it.

Any number of requests may be in flight. The greeting is a request like the others: Hello to every
shard; the smallest push number they report is where this worker goes on (shards that are ahead will
recognise the repetition); then Join to shard 0, which says the clock, then to the others.

A worker has one clock for all shards, or two workers could wait for each other at two of them. When
its lease has run out and the others have gone on without it, shard 0 has it count on from beside
them; the session then adds the difference to every clock it sends, tells it to the other shards by
a Join, and asks anew for what it was pulling. The driver's own count is not touched.

A driver calls a method, sends what it returns, feeds `receive` with what arrives and calls `tick`
by `next_deadline`. The session holds the arrays of an unacknowledged push: until `Pushed` reports
it, their memory must not change. A compressed push is written once, into arrays of its own, and
repeated as it was: written again it would take the residual a second time (feedback.py).
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ps.protocol.cargo import Cargo
from ps.protocol.compression import Compression
from ps.protocol.events import (
    Asked,
    Departed,
    Event,
    Frames,
    Pulled,
    Pushed,
    Ready,
    Relocated,
    Send,
)
from ps.protocol.outstanding import Outstanding, Pending
from ps.protocol.unsaved import Unsaved
from shards import codec
from shards.codec import Buffer
from shards.errors import BadInput, BadMessage, GiveUp
from shards.messages import (
    PROTOCOL,
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

Answer = TypeVar("Answer", bound=Reply)


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
        self.build = build
        self.table = table
        self.map = shard_map
        self._shards = range(shard_map.shards)
        self._keys = [codec.flatten(ranges) for ranges in shard_map.ranges]
        self._outstanding = Outstanding(worker, retry_s, patience_s)
        self.cargo = Cargo(table, shard_map, compression or Compression())
        self._unsaved = Unsaved(shard_map.shards) if self.cargo.feedback is not None else None
        self.seq = 0
        self.ready: Ready | None = None
        self._request = 0
        # On the wire: where this life was last let in, the clock that its pushes reach with the
        # weights it has been given so far, and how far that is ahead of what the driver counts.
        self._admission: int | None = None
        self._reached = self._ahead = 0
        self._boots: dict[int, int] = {}
        self._joined: set[int] = set()
        self._welcomes: dict[int, Welcome] = {}
        self._acknowledged: dict[int, int] = {}
        self._mended: dict[int, tuple[int, float]] = {}
        self._asked: dict[int, Asked] = {}

    # --- what a driver asks for -------------------------------------------------------------------

    def hello(self, now: float) -> list[Send]:
        """Introduce this worker to every shard; `Ready` follows."""
        return [self._greet(shard, now) for shard in range(self.map.shards)]

    def pull(self, clock: int, now: float) -> tuple[int, list[Send]]:
        """Ask for the weights of a step at `clock`; `Pulled` follows when the gate lets it through.

        Several pulls may be in flight; each is answered under its own request number.
        """
        request = self._next(Pull, now, clock)
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
        seq = self.seq + 1
        kind, zstd, written = self.cargo.write(gradient, seq, plain=plain)
        self.seq = seq
        told_clock = clock + self._ahead
        self._reached = max(self._reached, told_clock)
        request = self._next(Push, now, clock)
        messages = [
            Push(
                request,
                self.job,
                self.worker,
                self.incarnation,
                self._boots[shard],
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
            )
            for shard in self._shards
        ]
        return request, self._to_all(request, messages, now, written)

    def outstanding(self) -> Iterator[tuple[int, FromWorker, Frames]]:
        """What has not been answered: to which shard, the message, its frames."""
        for shard, pending in self._outstanding:
            yield shard, pending.message, pending.frames

    def follow(self, former: "Session") -> None:
        """Once ready, before anything is asked: go on as `former` did with the shards before.

        If the others have gone on without this worker meanwhile, and beyond what it has told and
        been given already, it counts on from beside them, as ever.
        """
        assert self.ready is not None, "the driver waits for Ready first"
        # These know a push of a former life that not all of those had: it is about to be repeated,
        # and is to be known again.
        self.seq = min(self.seq, former.seq)
        self.cargo.feedback = former.cargo.feedback
        self._ahead = former.ahead + max(0, self.ready.clock - former._reached)
        self._outstanding.rtt_s = former.rtt_s

    @property
    def ahead(self) -> int:
        """How far the clock that shards are told is ahead of what the driver counts."""
        return self._ahead

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
        request = self._next(Leave, now, 0)
        messages = [
            Leave(request, self.job, self.worker, self.incarnation, self._boots[shard])
            for shard in self._shards
        ]
        return self._to_all(request, messages, now)

    # --- what happens -----------------------------------------------------------------------------

    def receive(
        self, shard: int, reply: Reply, frames: Sequence[Buffer], now: float
    ) -> tuple[list[Send], list[Event]]:
        """Take one answer; returns what to send and what has come to pass.

        Raises the error that a final refusal stands for. An answer to nothing (late or repeated)
        changes nothing.
        """
        pending = self._outstanding.heard(shard, reply.request, now)
        if pending is None:
            # To a renewal; or the shard could not even read which request it refuses.
            if (
                reply.request == 0
                and isinstance(reply, Refusal)
                and reply.remedy is Remedy.BAD_MESSAGE
            ):
                raise error_of(reply)
            return [], []
        match reply:  # the usual first: every other case that is tried costs
            case Ack():
                exported = None
                if self._unsaved is not None:
                    exported = self._unsaved.told(shard, reply.saved, self.outstanding())
                self._outstanding.settle(shard, reply.request)
                answered = self._answered(shard, pending.asked, reply, frames, now)
                return [], [*answered, exported] if exported is not None else answered
            case Weights():
                self._outstanding.settle(shard, reply.request)
                read = self.cargo.read(reply, frames)
                if read is None:
                    return self._ask_whole(shard, pending, now), []
                return [], self._answered(shard, pending.asked, *read, now)
            case Refusal(remedy=Remedy.MOVED):
                return [], [self._relocated(frames)]
            case Refusal():
                return self._refused(shard, reply, pending, now), []
            case Parked() | Renewed():
                return [], []
        self._outstanding.settle(shard, reply.request)
        match reply:
            case Welcome():
                return self._welcomed(shard, reply, now), []
            case Joined():
                return self._admitted(shard, reply, now)
            case _:
                return [], self._answered(shard, pending.asked, reply, frames, now)

    def moved(self, shard: int, now: float) -> list[Send]:
        """Another copy of `shard` serves from now on, and the driver's link leads there."""
        hello = self._greet(shard, now)
        # The silence until now was another's. It may not serve yet, or the link to it not be open.
        pending = self._outstanding.heard(shard, hello.message.request, now)
        assert pending is not None, "it has just been sent"
        pending.wait_s = min(_NEWCOMER_S, pending.wait_s)
        pending.resend_at = now + pending.wait_s
        return [hello]

    def renewed(self, shard: int, now: float) -> list[Send]:
        """The driver's link to `shard` was cut, and is whole: what was on its way is lost."""
        sends = self._outstanding.again(shard, now)
        return [send for send in sends if self._may_send(shard, send.message)]

    def tick(self, now: float) -> list[Send]:
        """Repeat what has been silent too long; raises Unreachable when a shard stays silent."""
        return self._outstanding.due(now, self._may_send)

    @property
    def next_deadline(self) -> float | None:
        """When to call `tick` next; None while nothing is outstanding."""
        return self._outstanding.next_deadline

    @property
    def unacknowledged(self) -> int:
        """Pushes that not every shard has acknowledged."""
        return sum([asked.kind is Push for asked in self._asked.values()])

    @property
    def boots(self) -> tuple[int, ...]:
        """The life of each shard that this session talks to, once it is ready."""
        return tuple(self._boots[shard] for shard in range(self.map.shards))

    @property
    def versions(self) -> tuple[int, ...]:
        """Of each shard the version that it had when it was last greeted, once this is ready."""
        return tuple(self._welcomes[shard].version for shard in range(self.map.shards))

    # --- greeting ---------------------------------------------------------------------------------

    def _greet(self, shard: int, now: float) -> Send:
        self._joined.discard(shard)
        self._outstanding.drop_greetings(shard)
        owed = [pending.message for pending in self._outstanding.to(shard)]
        pushes = [message.seq for message in owed if isinstance(message, Push)]
        self._acknowledged[shard] = min(pushes, default=self.seq + 1) - 1
        request = self._count()
        hello = Hello(request, self.job, self.worker, self.incarnation, PROTOCOL, self.build)
        return self._outstanding.keep(shard, request, hello, (), now)

    def _welcomed(self, shard: int, reply: Welcome, now: float) -> list[Send]:
        self._boots[shard] = reply.boot
        self._welcomes[shard] = reply
        self._mended.pop(shard, None)
        if self.ready is not None:
            self._check_memory(shard, reply)
        if self._admission is not None:
            return [self._join(shard, self._admission, now)]
        if len(self._welcomes) < self.map.shards or self._joining(0):
            return []
        return [self._join(0, 0, now)]

    def _check_memory(self, shard: int, reply: Welcome) -> None:
        """A shard that comes back must still have every push it had acknowledged when greeted."""
        acknowledged = self._acknowledged[shard]
        if reply.seq < acknowledged:
            raise GiveUp(
                f"shard {shard} came back at push {reply.seq} of {self.worker} but had acknowledged"
                f" {acknowledged}: resume the job from its last snapshot"
            )

    def _join(self, shard: int, clock: int, now: float) -> Send:
        request = self._count()
        join = Join(request, self.job, self.worker, self.incarnation, self._boots[shard], clock)
        return self._outstanding.keep(shard, request, join, (), now)

    def _joining(self, shard: int) -> bool:
        return any(isinstance(owed.message, Join) for owed in self._outstanding.to(shard))

    def _admitted(self, shard: int, reply: Joined, now: float) -> tuple[list[Send], list[Event]]:
        returning = shard not in self._joined
        self._joined.add(shard)
        if self.ready is not None:
            sends = self._catch_up(reply.clock, now) if shard == 0 else []
            return sends + (self._readdressed(shard, now) if returning else []), []
        if self._admission is None:
            assert shard == 0, "shard 0 admits first"
            self._admission = reply.clock
            sends = [self._join(other, reply.clock, now) for other in range(1, self.map.shards)]
            if sends:
                return sends, []
        if len(self._joined) < self.map.shards:
            return [], []
        behind = min(self._welcomes.values(), key=lambda welcome: welcome.seq)
        self.ready = Ready(behind.seq, behind.step, self._admission, behind.lease_s)
        self.seq, self._reached = behind.seq, self._admission
        return [], [self.ready]

    def _catch_up(self, clock: int, now: float) -> list[Send]:
        """Shard 0 counts this worker at `clock`: go on from there at every shard, if overtaken."""
        behind = clock - self._reached
        if behind <= 0:
            return []
        self._ahead += behind
        self._reached = self._admission = clock
        sends = [
            self._join(shard, self._admission, now)
            for shard in range(1, self.map.shards)
            if shard in self._joined or self._joining(shard)
        ]
        for shard, pending in self._outstanding:
            message = pending.message
            if isinstance(message, Push):
                pending.message = msgspec.structs.replace(message, clock=message.clock + behind)
            elif isinstance(message, Pull):
                self._outstanding.settle(shard, message.request)
        for request, asked in self._asked.items():
            if asked.kind is Pull:
                # An answer to the old clock may have passed a gate that the new one must not.
                asked.answers.clear()
                sends += self._ask_weights(request, asked.clock, now)
        return [send for send in sends if send.shard > 0]  # shard 0 is sent everything next

    def _relocated(self, frames: Sequence[Buffer]) -> Event:
        if len(frames) != 1:
            raise BadMessage(f"a shard that has moved: expected 1 frame, got {len(frames)}")
        return Relocated(bytes(frames[0]))

    # --- refusals ---------------------------------------------------------------------------------

    def _refused(self, shard: int, reply: Refusal, pending: Pending, now: float) -> list[Send]:
        match reply.remedy:
            case Remedy.RETRY:
                return []
            case Remedy.GAP:
                return self._resend_pushes(shard, reply.expected, now)
            case Remedy.RESYNCHRONISE:
                # Several requests in flight are refused for one reason: greet once.
                if shard not in self._joined and not isinstance(pending.message, Join):
                    return []
                if isinstance(pending.message, Registered) and (
                    pending.message.boot != self._boots.get(shard)
                ):
                    return []
                return [self._greet(shard, now)]
            case _:
                raise error_of(reply)

    def _resend_pushes(self, shard: int, expected: int, now: float) -> list[Send]:
        # Every push behind the lost one is refused for the same reason: mend it once.
        mended, until = self._mended.get(shard, (0, 0.0))
        if mended == expected and now < until:
            return []
        self._mended[shard] = (expected, now + self._outstanding.first_s)
        return self._outstanding.repeated(shard, expected, now)

    def _readdressed(self, shard: int, now: float) -> list[Send]:
        """Everything outstanding, to the shard's present life."""
        return self._outstanding.readdressed(shard, self._boots[shard], now)

    # --- requests and answers ---------------------------------------------------------------------

    def _count(self) -> int:
        self._request += 1
        return self._request

    def _next(self, kind: type[FromWorker], now: float, clock: int) -> int:
        assert self.ready is not None, "the driver waits for Ready first"
        request = self._count()
        self._asked[request] = Asked(kind, now, clock, {})
        return request

    def _ask_weights(self, asked: int, clock: int, now: float) -> list[Send]:
        """Ask every shard for pull `asked`, under a number that it has not been sent with."""
        request = self._count()
        compression = self.cargo.compression

        messages = [
            Pull(
                request,
                self.job,
                self.worker,
                self.incarnation,
                self._boots[shard],
                self.map.epoch,
                self.table.name,
                clock + self._ahead,
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
            if shard in self._joined:
                sends.append(send)
        return sends

    def _may_send(self, shard: int, message: FromWorker) -> bool:
        """Until a shard has registered this worker, only the greeting may go there."""
        return shard in self._joined or isinstance(message, Hello | Join)

    def _answered(
        self, shard: int, request: int, reply: Reply, frames: Sequence[Buffer], now: float
    ) -> list[Event]:
        asked = self._asked.get(request)
        if asked is None:
            return []
        asked.answers[shard] = (reply, frames)
        if len(asked.answers) < len(self._shards):
            return []
        del self._asked[request]
        replies, told = zip(*[asked.answers[one] for one in self._shards], strict=True)
        if asked.kind is Pull:
            self._reached = max(self._reached, asked.clock + self._ahead + 1)
            return [self._pulled(request, _all(Weights, replies), told)]
        if asked.kind is Push:
            return [self._pushed(request, _all(Ack, replies), now - asked.since)]
        _all(Left, replies)
        return [Departed()]

    def _pulled(
        self, request: int, weights: Sequence[Weights], frames: Sequence[Sequence[Buffer]]
    ) -> Pulled:
        return Pulled(
            request,
            tuple([reply.version for reply in weights]),
            tuple([tuple(of_shard) for of_shard in frames]),
            max([reply.waited_s for reply in weights]),
            self.cargo.arrives,
        )

    def _pushed(self, request: int, acks: Sequence[Ack], took_s: float) -> Pushed:
        self._outstanding.took(took_s)
        return Pushed(
            request,
            acks[0].seq,
            max([ack.staleness for ack in acks]),
            sum([ack.duplicate for ack in acks]),
            took_s,
        )

    def _ask_whole(self, shard: int, pending: Pending, now: float) -> list[Send]:
        """Ask for the same weights again, as changes to nothing."""
        assert isinstance(pending.message, Pull)
        pull = msgspec.structs.replace(pending.message, request=self._count(), base=0)
        send = self._outstanding.keep(shard, pending.asked, pull, (), now)
        return [send] if shard in self._joined else []


def _all(kind: type[Answer], replies: Sequence[Reply]) -> Sequence[Answer]:
    """The replies, each of which is of this kind; raises BadMessage."""
    found = [reply for reply in replies if isinstance(reply, kind)]
    if len(found) < len(replies):
        names = sorted({type(reply).__name__ for reply in replies})
        raise BadMessage(f"expected {kind.__name__} of each shard, got {', '.join(names)}")
    return found
