"""The session: a worker's side of the protocol with all shards, as a pure state machine.

Theory. One logical request (a pull, a push) is one message to each shard and is complete when each
has answered. Nothing is lost as long as every message that has not been answered is kept and sent
again: the shard recognises a repetition (by seq for a push, by request number for the rest), so
repeating is always safe. Hence the whole of reliability here is a table of outstanding messages
with a deadline each, and these reactions:

- silence for `retry_s`, or twice what the last push took: send it again, then twice as late each
  time up to eightfold, because on a slow link the first copy may still be on its way;
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

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ps.compression import Compression
from ps.events import (
    Asked,
    Departed,
    Event,
    Frames,
    Pending,
    Pulled,
    Pushed,
    Ready,
    Relocated,
    Send,
    Unreachable,
)
from ps.feedback import Feedback
from ps.view import View, advanced
from shards import codec, packing, payloads
from shards.codec import Buffer
from shards.errors import BadInput, BadMessage, GiveUp
from shards.messages import (
    PROTOCOL,
    Ack,
    FromWorker,
    Hello,
    Join,
    Joined,
    Kind,
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

_TRIES = 3  # at least, before patience ends
_NEWCOMER_S = 0.1  # that the first answer of a copy that has just taken over is waited for
_LONGEST = 8  # times the first wait: no later is a message repeated

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
        self._shape = (table.size,)  # which is summed over its tensors
        self.map = shard_map
        self.retry_s = min(retry_s, patience_s / _TRIES)
        self.patience_s = patience_s
        self.compression = compression or Compression()
        self.feedback = (
            Feedback(self.compression, table.size) if self.compression.push is not None else None
        )
        self._views: dict[int, View] = {}
        self.seq = 0
        self.ready: Ready | None = None
        self._request = 0
        self._rtt_s = 0.0
        # On the wire: where this life was last let in, the clock that its pushes reach with the
        # weights it has been given so far, and how far that is ahead of what the driver counts.
        self._admission: int | None = None
        self._reached = self._ahead = 0
        self._boots: dict[int, int] = {}
        self._joined: set[int] = set()
        self._welcomes: dict[int, Welcome] = {}
        self._acknowledged: dict[int, int] = {}
        self._mended: dict[int, tuple[int, float]] = {}
        self._pending: dict[tuple[int, int], Pending] = {}
        self._asked: dict[int, Asked] = {}
        self._heard: dict[int, float] = {}

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
        self._check_push(gradient, read_versions)
        kind = Kind.F4 if plain or self.feedback is None else self.feedback.kind
        zstd = self.compression.zstd and not plain
        written = self._cut(gradient) if plain else self._write(gradient)
        self.seq += 1
        seq = self.seq
        told_clock = clock + self._ahead
        self._reached = max(self._reached, told_clock)
        request = self._next(Push, now, clock)

        def message(shard: int) -> FromWorker:
            return Push(
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
                codec.flatten(self.map.ranges[shard]),
                loss,
                rtt_s,
                wait_s,
                zstd,
            )

        return request, self._to_all(request, message, now, lambda shard: written[shard])

    def outstanding(self) -> Iterator[tuple[int, FromWorker, Frames]]:
        """What has not been answered: to which shard, the message, its frames."""
        for (shard, _), pending in self._pending.items():
            yield shard, pending.message, pending.frames

    def follow(self, former: "Session", clock: int) -> None:
        """Once ready, before anything is asked: go on as `former` did with the shards before.

        `clock` is what `former` had told them with its last push that they applied. If the others
        have gone on without this worker meanwhile, it counts on from beside them, as ever.
        """
        assert self.ready is not None, "the driver waits for Ready first"
        self.feedback = former.feedback
        self._ahead = former.ahead + max(0, self.ready.clock - clock)
        self._rtt_s = former.rtt_s

    @property
    def ahead(self) -> int:
        """How far the clock that shards are told is ahead of what the driver counts."""
        return self._ahead

    @property
    def rtt_s(self) -> float:
        """How long the last push took, doubled at most from one to the next."""
        return self._rtt_s

    def leave(self, now: float) -> list[Send]:
        """Tell every shard not to wait for this worker any more; `Departed` follows."""
        request = self._next(Leave, now, 0)
        return self._to_all(
            request,
            lambda shard: Leave(
                request, self.job, self.worker, self.incarnation, self._boots[shard]
            ),
            now,
        )

    # --- what happens -----------------------------------------------------------------------------

    def receive(
        self, shard: int, reply: Reply, frames: Sequence[Buffer], now: float
    ) -> tuple[list[Send], list[Event]]:
        """Take one answer; returns what to send and what has come to pass.

        Raises the error that a final refusal stands for. An answer to nothing (late or repeated)
        changes nothing.
        """
        self._heard[shard] = now
        key = (shard, reply.request)
        pending = self._pending.get(key)
        if pending is None:
            # To a renewal; or the shard could not even read which request it refuses.
            if (
                reply.request == 0
                and isinstance(reply, Refusal)
                and reply.remedy is Remedy.BAD_MESSAGE
            ):
                raise error_of(reply)
            return [], []
        match reply:
            case Refusal(remedy=Remedy.MOVED):
                return [], [self._relocated(frames)]
            case Refusal():
                return self._refused(shard, reply, pending, now), []
            case Parked() | Renewed():
                return [], []
            case Welcome():
                del self._pending[key]
                return self._welcomed(shard, reply, now), []
            case Joined():
                del self._pending[key]
                return self._admitted(shard, reply, now)
            case Weights():
                del self._pending[key]
                read = self._read(reply, frames)
                if read is None:
                    return self._ask_whole(shard, pending, now), []
                return [], self._answered(shard, pending.asked, *read, now)
            case _:
                del self._pending[key]
                return [], self._answered(shard, pending.asked, reply, frames, now)

    def moved(self, shard: int, now: float) -> list[Send]:
        """Another copy of `shard` serves from now on, and the driver's link leads there."""
        self._heard[shard] = now  # the silence until now was another's
        hello = self._greet(shard, now)
        # It may not be ready to serve yet, or the link to it not open.
        pending = self._pending[shard, hello.message.request]
        pending.wait_s = min(_NEWCOMER_S, pending.wait_s)
        pending.resend_at = now + pending.wait_s
        return [hello]

    def tick(self, now: float) -> list[Send]:
        """Repeat what has been silent too long; raises Unreachable when a shard stays silent."""
        deadline = self.next_deadline
        if deadline is None or deadline > now:
            return []
        if now - deadline > self.retry_s:
            # The driver was away, computing or stopped: what it did not hear then is no silence.
            away_s = now - deadline
            self._heard = {shard: min(now, at + away_s) for shard, at in self._heard.items()}
        due = []
        for (shard, _), pending in self._pending.items():
            if pending.resend_at > now:
                continue
            if now - self._heard[shard] > self.patience_s:
                what = type(pending.message).__name__.lower()
                raise Unreachable(
                    f"shard {shard} has not answered {self.worker}'s {what} for"
                    f" {self.patience_s:g} s",
                    shard,
                )
            pending.wait_s = min(2 * pending.wait_s, self._longest_s)
            pending.resend_at = now + pending.wait_s
            if self._may_send(shard, pending.message):
                due.append(Send(shard, pending.message, pending.frames))
        return due

    @property
    def next_deadline(self) -> float | None:
        """When to call `tick` next; None while nothing is outstanding."""
        return min((pending.resend_at for pending in self._pending.values()), default=None)

    @property
    def unacknowledged(self) -> int:
        """Pushes that not every shard has acknowledged."""
        return sum(asked.kind is Push for asked in self._asked.values())

    @property
    def boots(self) -> tuple[int, ...]:
        """The life of each shard that this session talks to, once it is ready."""
        return tuple(self._boots[shard] for shard in range(self.map.shards))

    # --- greeting ---------------------------------------------------------------------------------

    def _greet(self, shard: int, now: float) -> Send:
        self._joined.discard(shard)
        pushes = [
            pending.message.seq
            for (to, _), pending in self._pending.items()
            if to == shard and isinstance(pending.message, Push)
        ]
        self._acknowledged[shard] = min(pushes, default=self.seq + 1) - 1
        for key in [
            key
            for key, pending in self._pending.items()
            if key[0] == shard and isinstance(pending.message, Hello | Join)
        ]:
            del self._pending[key]
        request = self._count()
        hello = Hello(request, self.job, self.worker, self.incarnation, PROTOCOL, self.build)
        return self._keep(shard, request, hello, (), now)

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
        return self._keep(shard, request, join, (), now)

    def _joining(self, shard: int) -> bool:
        return any(
            to == shard and isinstance(pending.message, Join)
            for (to, _), pending in self._pending.items()
        )

    def _admitted(self, shard: int, reply: Joined, now: float) -> tuple[list[Send], list[Event]]:
        returning = shard not in self._joined
        self._joined.add(shard)
        if self.ready is not None:
            sends = self._catch_up(reply.clock, now) if shard == 0 else []
            return sends + (self._resend_all(shard, now) if returning else []), []
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
        for key, pending in list(self._pending.items()):
            if isinstance(pending.message, Push):
                pending.message = msgspec.structs.replace(
                    pending.message, clock=pending.message.clock + behind
                )
            elif isinstance(pending.message, Pull):
                del self._pending[key]
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
        self._mended[shard] = (expected, now + self._retry_s)
        sends = []
        for (to, _), pending in self._pending.items():
            message = pending.message
            if to == shard and isinstance(message, Push) and message.seq >= expected:
                pending.wait_s = self._retry_s
                pending.resend_at = now + pending.wait_s
                sends.append(Send(shard, message, pending.frames))
        return sends

    def _resend_all(self, shard: int, now: float) -> list[Send]:
        """Everything outstanding, addressed to the shard's present life, in the order asked."""
        sends = []
        for (to, _), pending in self._pending.items():
            if to != shard:
                continue
            if isinstance(pending.message, Registered):
                pending.message = msgspec.structs.replace(pending.message, boot=self._boots[shard])
            pending.wait_s = self._retry_s
            pending.resend_at = now + pending.wait_s
            sends.append(Send(shard, pending.message, pending.frames))
        return sends

    # --- requests and answers ---------------------------------------------------------------------

    def _count(self) -> int:
        self._request += 1
        return self._request

    def _next(self, kind: type[FromWorker], now: float, clock: int) -> int:
        assert self.ready is not None, "the driver waits for Ready first"
        request = self._count()
        self._asked[request] = Asked(kind, now, clock, {})
        return request

    @property
    def _retry_s(self) -> float:
        """How long the first answer is waited for."""
        return min(max(self.retry_s, 2 * self._rtt_s), self.patience_s / _TRIES)

    @property
    def _longest_s(self) -> float:
        """How long any later answer is waited for."""
        return min(_LONGEST * self._retry_s, self.patience_s / _TRIES)

    def _ask_weights(self, asked: int, clock: int, now: float) -> list[Send]:
        """Ask every shard for pull `asked`, under a number that it has not been sent with."""
        request = self._count()

        def message(shard: int) -> FromWorker:
            return Pull(
                request,
                self.job,
                self.worker,
                self.incarnation,
                self._boots[shard],
                self.map.epoch,
                self.table.name,
                clock + self._ahead,
                self.compression.pull,
                self.compression.zstd,
                self._views[shard].number if shard in self._views else 0,
                self.compression.pull_share,
            )

        return self._to_all(asked, message, now)

    def _write(self, gradient: NDArray[np.float32]) -> list[Frames]:
        """The frames of the next push, for each shard."""
        if self.feedback is not None:
            return self.feedback.encode(gradient, self.seq + 1, self.map.ranges)
        cut = self._cut(gradient)
        if self.compression.zstd:
            return [tuple(packing.pack(part) for part in parts) for parts in cut]
        return cut

    def _cut(self, gradient: NDArray[np.float32]) -> list[Frames]:
        return [self.map.cut(gradient, shard) for shard in range(self.map.shards)]

    def _check_push(self, gradient: NDArray[np.float32], read_versions: Sequence[int]) -> None:
        what = f"push to table {self.table.name}"
        if gradient.shape != self._shape or gradient.dtype != np.float32:
            raise BadInput(
                f"{what}: expected float32 of shape {self._shape},"
                f" got {gradient.dtype} of shape {gradient.shape}"
            )
        if not gradient.flags.c_contiguous:
            raise BadInput(f"{what}: expected a contiguous array, got strides {gradient.strides}")
        if len(read_versions) != self.map.shards:
            raise BadInput(
                f"{what}: expected {self.map.shards} read versions, one a shard,"
                f" got {len(read_versions)}"
            )

    def _to_all(
        self,
        asked: int,
        message: Callable[[int], FromWorker],
        now: float,
        frames: Callable[[int], Frames] = lambda _: (),
    ) -> list[Send]:
        sends = []
        for shard in range(self.map.shards):
            send = self._keep(shard, asked, message(shard), frames(shard), now)
            if shard in self._joined:
                sends.append(send)
        return sends

    def _keep(
        self, shard: int, asked: int, message: FromWorker, frames: Frames, now: float
    ) -> Send:
        if all(to != shard for to, _ in self._pending):
            self._heard[shard] = now  # it was asked nothing, so its silence begins here
        wait_s = self._retry_s
        key = (shard, message.request)
        self._pending[key] = Pending(message, frames, asked, now + wait_s, wait_s)
        return Send(shard, message, frames)

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
        if len(asked.answers) < self.map.shards:
            return []
        del self._asked[request]
        if asked.kind is Pull:
            self._reached = max(self._reached, asked.clock + self._ahead + 1)
        answers = [asked.answers[s] for s in range(self.map.shards)]
        replies = [reply for reply, _ in answers]
        if asked.kind is Pull:
            return [self._pulled(request, _all(Weights, replies), [own for _, own in answers])]
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
            Kind.F4 if self.compression.pulls_changes else self.compression.pull,
        )

    def _pushed(self, request: int, acks: Sequence[Ack], took_s: float) -> Pushed:
        # Doubled at most, or one outage would have every later message waited for as long.
        self._rtt_s = min(took_s, max(self.retry_s, 2 * self._rtt_s))
        return Pushed(
            request,
            acks[0].seq,
            max([ack.staleness for ack in acks]),
            sum([ack.duplicate for ack in acks]),
            took_s,
        )

    def _read(
        self, reply: Weights, frames: Sequence[Buffer]
    ) -> tuple[Weights, Sequence[Buffer]] | None:
        """The payloads in an answer, checked; of changes the weights that they lead to.

        None if they are changes to a view that this worker has not, since its answer was lost.
        """
        ranges, wanted = self.map.ranges[reply.shard], self.compression.pull
        changes = self.compression.pulls_changes
        if reply.kind is not wanted and not (changes and reply.kind is Kind.F4):
            raise BadMessage(f"weights: expected them as {wanted}, got {reply.kind}")
        parts = payloads.checked("weights", reply.kind, reply.zstd, ranges, frames)
        if not changes:
            return reply, [part.data for part in parts]
        view = advanced(self._views.get(reply.shard), reply, parts)
        if view is None:
            return None
        self._views[reply.shard] = view
        return msgspec.structs.replace(reply, version=view.version), view.frames

    def _ask_whole(self, shard: int, pending: Pending, now: float) -> list[Send]:
        """Ask for the same weights again, as changes to nothing."""
        assert isinstance(pending.message, Pull)
        pull = msgspec.structs.replace(pending.message, request=self._count(), base=0)
        send = self._keep(shard, pending.asked, pull, (), now)
        return [send] if shard in self._joined else []


def _all(kind: type[Answer], replies: Sequence[Reply]) -> Sequence[Answer]:
    """The replies, each of which is of this kind; raises BadMessage."""
    found = [reply for reply in replies if isinstance(reply, kind)]
    if len(found) < len(replies):
        names = sorted({type(reply).__name__ for reply in replies})
        raise BadMessage(f"expected {kind.__name__} of each shard, got {', '.join(names)}")
    return found
