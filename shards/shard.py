"""The shard: one part of the weights, and the only place where they change.

Everything a shard does is a transition: a message, its frames and the time come in, the answers go
out. It opens nothing, waits for nothing and knows no network; a driver (ps/server.py) carries the
bytes, and the same code runs on a virtual clock.

The promises kept here:

- *Exactly once.* The ledger judges each push by incarnation and seq before anything is touched, and
  it is updated in the same transition as the weights.
- *Bounded staleness.* A pull beyond the bound is parked in the gate. After every transition that
  may have raised the slowest clock, `_open` answers whoever may go.
- *Untorn reads.* An apply writes the next version into a buffer that nobody reads (versions.py).

Pushes are applied one by one as they come, or, for synchronous training, gathered until every
registered worker has brought one and then applied as their average, which is one version. Such a
push is acknowledged only when its round is applied: until then it is not in the ledger, and its
worker repeats it if the shard forgets, as it does when the worker says hello again: what a Welcome
reports of the past must not change any more.

What a shard leaves to others: moving bytes, keeping time, surviving (snapshots and replicas hold
what `Export` gives), and the question which shard owns which keys.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cupy_kernels.updates import squared_norm
from shards import codec
from shards.codec import Buffer
from shards.errors import (
    BadInput,
    BadMessage,
    DownpourError,
    Fenced,
    Gap,
    GiveUp,
    Resynchronise,
    Retry,
    WrongBuild,
)
from shards.gate import Gate
from shards.journal import Journal
from shards.ledger import Ledger, Verdict
from shards.messages import (
    PROTOCOL,
    Ack,
    AskRecords,
    AskStatus,
    Count,
    Export,
    FromOperator,
    FromShard,
    FromWorker,
    Hello,
    Install,
    Installed,
    Join,
    Joined,
    Kind,
    Leave,
    Left,
    Parked,
    Pull,
    Push,
    Read,
    Records,
    Refusal,
    Registered,
    Remedy,
    Renew,
    Renewed,
    Request,
    ShardStatus,
    Standing,
    State,
    Status,
    Weights,
    Welcome,
    WorkerStatus,
)
from shards.spec import Merge, ShardSpec
from shards.tables import segments
from shards.versions import Buffers


class Outgoing(msgspec.Struct, frozen=True):
    """An answer: `to` is the address its request came from; `frames` follow the header."""

    to: bytes
    message: FromShard
    frames: tuple[NDArray[np.float32] | bytes, ...] = ()


class Saved(msgspec.Struct, frozen=True):
    """What a snapshot holds beside the arrays, all of one version."""

    version: Count
    steps: Count
    samples: Count
    ledger: Ledger


class _Arrived(msgspec.Struct, frozen=True):
    """A valid push that is to be applied."""

    sender: bytes
    message: Push
    gradient: NDArray[np.float32]
    norm: float
    time: float


_REMEDIES: tuple[tuple[type[DownpourError], Remedy], ...] = (
    (Gap, Remedy.GAP),
    (Resynchronise, Remedy.RESYNCHRONISE),
    (Retry, Remedy.RETRY),
    (Fenced, Remedy.FENCED),
    (WrongBuild, Remedy.WRONG_BUILD),
    (BadMessage, Remedy.BAD_MESSAGE),
    (BadInput, Remedy.BAD_INPUT),
    (DownpourError, Remedy.GIVE_UP),
)


class Shard:
    """The state of one shard, and its transitions `handle` and `tick`."""

    def __init__(self, spec: ShardSpec, boot: int) -> None:
        """`boot` numbers this life of the shard; a later life must be given a larger number."""
        self.spec = spec
        self.boot = boot
        self.ranges = spec.map.ranges[spec.shard]
        self.size = sum(len(keys) for keys in self.ranges)
        self.ledger = Ledger()
        self.gate = Gate(spec.bound)
        self.version = 0
        self.steps = 0
        self.samples = 0
        self.journal = Journal()
        self._keys = codec.flatten(self.ranges)
        self._segments = segments(spec.table, self.ranges)
        self._weights: NDArray[np.float32] | None = None
        self._greeted = False
        self._buffers = Buffers(self.size)
        self._slots: tuple[NDArray[np.float32], ...] = ()
        self._round: dict[str, _Arrived] = {}

    # --- transitions ----------------------------------------------------------------------------

    def handle(
        self, sender: bytes, message: Request, frames: Sequence[Buffer], now: float
    ) -> list[Outgoing]:
        """Answer one message; `now` is in seconds of a monotonic clock.

        A message that cannot be honoured is answered by a Refusal and changes nothing.
        """
        try:
            self._check_address(message)
            return self._dispatch(sender, message, frames, now)
        except DownpourError as error:
            return [self.refuse(sender, message.request, error)]

    def tick(self, now: float) -> list[Outgoing]:
        """Let leases run out; call it at least once a `lease_s / 4`."""
        silent = self.ledger.expire(now)
        for worker in silent:
            self.gate.forget(worker)
        return self._open(now) if silent else []

    def refuse(self, sender: bytes, request: int, error: DownpourError) -> Outgoing:
        """The Refusal that tells `error`; the driver uses it for bytes that are no message."""
        self.journal.refused += 1
        remedy = next(remedy for kind, remedy in _REMEDIES if isinstance(error, kind))
        expected = error.expected if isinstance(error, Gap) else 0
        text = " ".join(str(error).split())[:256]
        return Outgoing(
            sender, Refusal(request, self.spec.shard, self.boot, remedy, text, expected)
        )

    def _dispatch(
        self, sender: bytes, message: Request, frames: Sequence[Buffer], now: float
    ) -> list[Outgoing]:
        match message:
            case Push():
                return self._push(sender, message, frames, now)
            case Pull():
                return self._pull(sender, message, now)
            case Hello():
                return self._hello(sender, message, now)
            case Join():
                return self._join(sender, message, now)
            case Renew():
                self._identify(message, now)
                return [Outgoing(sender, Renewed(message.request, self.spec.shard, self.boot))]
            case Leave():
                return self._leave(sender, message, now)
            case Install():
                return [self._install(sender, message, frames)]
            case Export():
                return [self._export(sender, message)]
            case Read():
                return [self._serve(sender, message.request, 0.0)]
            case AskStatus():
                return [self._status(sender, message)]
            case AskRecords():
                return [self._give_records(sender, message)]

    # --- workers --------------------------------------------------------------------------------

    def _hello(self, sender: bytes, message: Hello, now: float) -> list[Outgoing]:
        if message.protocol != PROTOCOL or message.build != self.spec.build:
            raise WrongBuild(
                f"shard {self.spec.shard} runs protocol {PROTOCOL} build {self.spec.build},"
                f" worker {message.worker} runs protocol {message.protocol} build {message.build}"
            )
        self._installed()
        entry = self.ledger.greet(message.worker, message.incarnation, now + self.spec.lease_s)
        self._greeted = True
        if entry.standing is Standing.GREETED:
            self.gate.forget(message.worker)
            self._round.pop(message.worker, None)
        welcome = Outgoing(
            sender,
            Welcome(
                message.request,
                self.spec.shard,
                self.boot,
                self.spec.map.epoch,
                self.version,
                entry.seq,
                entry.step,
                self.spec.lease_s,
            ),
        )
        # A new life does not count before it joins, so the slowest clock may have risen.
        return [welcome, *self._open(now)]

    def _join(self, sender: bytes, message: Join, now: float) -> list[Outgoing]:
        self._identify(message, now)
        if not self._may_go(message):
            return self._park(sender, message, now)
        return [self._admit(sender, message), *self._open(now)]

    def _admit(self, sender: bytes, message: Join) -> Outgoing:
        clock = self.ledger.join(message.worker, message.clock)
        return Outgoing(sender, Joined(message.request, self.spec.shard, self.boot, clock))

    def _leave(self, sender: bytes, message: Leave, now: float) -> list[Outgoing]:
        self._identify(message, now)
        self.ledger.leave(message.worker)
        self.gate.forget(message.worker)
        self.journal.forget(message.worker)
        left = Outgoing(sender, Left(message.request, self.spec.shard, self.boot))
        return [left, *self._open(now)]

    def _pull(self, sender: bytes, message: Pull, now: float) -> list[Outgoing]:
        self._identify(message, now)
        self._check_epoch(message.epoch)
        if not self._may_go(message):
            return self._park(sender, message, now)
        return [self._serve_worker(sender, message, 0.0, now)]

    def _park(self, sender: bytes, message: Pull | Join, now: float) -> list[Outgoing]:
        """Make it wait; a repetition is told so, which shows its sender that this shard lives."""
        if self.gate.park(sender, message, now):
            return []
        slowest = self.ledger.min_clock or 0
        return [Outgoing(sender, Parked(message.request, self.spec.shard, self.boot, slowest))]

    def _may_go(self, message: Pull | Join) -> bool:
        if isinstance(message, Pull):
            in_round = message.worker in self._round
            return not in_round and self.gate.passes(message.clock, self.ledger.min_clock)
        # Shard 0 alone decides who warms up, or two shards might choose different replicas. Who was
        # admitted once and comes back still counts elsewhere, so it must not wait here.
        return (
            self.spec.shard > 0
            or self.ledger.entries[message.worker].admitted
            or self.steps >= self.spec.warm_steps
            or not [worker for worker in self.ledger.active if worker != message.worker]
        )

    def _open(self, now: float) -> list[Outgoing]:
        """Apply a round that is complete, then answer whoever may go."""
        out = self._close_rounds(now)
        for waiting in self.gate.release(self._may_go):
            if isinstance(waiting.message, Join):
                out.append(self._admit(waiting.sender, waiting.message))
            else:
                waited = now - waiting.since
                out.append(self._serve_worker(waiting.sender, waiting.message, waited, now))
        return out

    def _serve_worker(self, sender: bytes, message: Pull, waited_s: float, now: float) -> Outgoing:
        self.journal.read(message.worker, self.version, now)
        return self._serve(sender, message.request, waited_s)

    def _serve(self, sender: bytes, request: int, waited_s: float) -> Outgoing:
        weights = self._installed()
        self.journal.pulls += 1
        self.journal.bytes_out += weights.nbytes
        reply = Weights(
            request,
            self.spec.shard,
            self.boot,
            self.spec.map.epoch,
            self.spec.table.name,
            self.version,
            Kind.F4,
            self._keys,
            waited_s,
        )
        return Outgoing(sender, reply, self._split(weights))

    # --- pushes ---------------------------------------------------------------------------------

    def _push(
        self, sender: bytes, message: Push, frames: Sequence[Buffer], now: float
    ) -> list[Outgoing]:
        self._identify(message, now)
        self._check_epoch(message.epoch)
        ahead_of = self._round.get(message.worker)
        if ahead_of is not None and message.seq > ahead_of.message.seq:
            slowest = self.ledger.min_clock or 0
            return [Outgoing(sender, Parked(message.request, self.spec.shard, self.boot, slowest))]
        if self.ledger.judge(message.worker, message.seq) is Verdict.DUPLICATE:
            self.journal.duplicates += 1
            # It was applied, so its steps are done: a retried worker catches up with its clock.
            self.ledger.advance(message.worker, message.clock)
            return [self._acknowledge(sender, message, 0, duplicate=True), *self._open(now)]
        arrived = self._examine(sender, message, frames, now)
        if self.spec.merge is Merge.ROUND:
            self._round[message.worker] = arrived
            return self._open(now)
        return [*self._apply([arrived], arrived.gradient, now), *self._open(now)]

    def _examine(
        self, sender: bytes, message: Push, frames: Sequence[Buffer], now: float
    ) -> _Arrived:
        """The push's gradient as one array, once everything about it is known to fit."""
        self._installed()
        if message.keys != self._keys:
            raise BadMessage(
                f"push covers keys {codec.show(message.keys)};"
                f" shard {self.spec.shard} owns {codec.show(self._keys)}"
            )
        if message.read_version > self.version:
            raise BadMessage(
                f"push {message.seq} of worker {message.worker} was computed from version"
                f" {message.read_version}; shard {self.spec.shard} is at {self.version}"
            )
        parts = codec.arrays(f"push {message.seq}", message.kind, self.ranges, frames)
        gradient = parts[0] if len(parts) == 1 else np.concatenate(parts)
        # ZeroMQ hands out short frames at odd addresses; each loop would be compiled anew for them.
        gradient = np.require(gradient, requirements="A")
        squares = squared_norm(gradient)
        if not np.isfinite(squares):
            raise BadInput(
                f"push {message.seq} of worker {message.worker} holds NaN or infinity:"
                f" expected finite gradients (loss {message.loss:g}); is the rate too high?"
            )
        self.journal.bytes_in += gradient.nbytes
        return _Arrived(sender, message, gradient, squares**0.5, now)

    def _close_rounds(self, now: float) -> list[Outgoing]:
        """Apply every round that nobody is missing from; a round is the pushes to one clock.

        A worker that came back may have been let in beyond a round, at this shard or another: it
        has nothing to bring to it, and its next push belongs to a later one.
        """
        out: list[Outgoing] = []
        while self._round:
            reached = min(one.message.clock for one in self._round.values())
            active = ((name, self.ledger.entries[name]) for name in self.ledger.active)
            late = [name for name, entry in active if entry.clock < reached]
            if not all(worker in self._round for worker in late):
                break
            # By name, because float addition is not associative and arrival order is chance.
            names = sorted(self._round)
            names = [name for name in names if self._round[name].message.clock == reached]
            out += self._apply_mean([self._round.pop(name) for name in names], now)
        return out

    def _apply_mean(self, arrived: Sequence[_Arrived], now: float) -> list[Outgoing]:
        total = arrived[0].gradient.copy()
        for other in arrived[1:]:
            total += other.gradient
        total /= np.float32(len(arrived))
        return self._apply(arrived, total, now)

    def _apply(
        self, arrived: Sequence[_Arrived], gradient: NDArray[np.float32], now: float
    ) -> list[Outgoing]:
        """Make the next version out of `gradient`, which is what `arrived` brought."""
        weights = self._installed()
        rate = self.rate
        out = self._buffers.take()
        self.spec.rule.apply(
            weights,
            gradient,
            self._slots,
            out,
            self._segments,
            rate=rate,
            decay=self.spec.decay,
            count=self.version + 1,
        )
        before, self.version, self._weights = self.version, self.version + 1, out
        replies = []
        for one in arrived:
            message = one.message
            self.ledger.record(
                message.worker, message.seq, message.clock, message.step, message.loss
            )
            self.steps += message.steps
            self.samples += message.samples
            staleness = before - message.read_version
            self.journal.applied(
                message,
                version=self.version,
                staleness=staleness,
                clock_gap=self.ledger.clock_gap,
                rate=rate,
                norm=one.norm,
                payload_bytes=one.gradient.nbytes,
                now=now,
            )
            replies.append(self._acknowledge(one.sender, message, staleness, duplicate=False))
        return replies

    def _acknowledge(
        self, sender: bytes, message: Push, staleness: int, *, duplicate: bool
    ) -> Outgoing:
        return Outgoing(
            sender,
            Ack(
                message.request,
                self.spec.shard,
                self.boot,
                message.seq,
                self.version,
                staleness,
                duplicate,
            ),
        )

    @property
    def rate(self) -> float:
        """The learning rate of the next update.

        The schedule's iteration is a step of the whole system: the steps applied so far, divided by
        the number of workers. With one worker it is Caffe's iteration; with more it does not depend
        on who is fast, who started late or who died.
        """
        try:
            return self.spec.schedule.rate(self.steps // self.spec.workers)
        except OverflowError:  # a policy that grows: Caffe's comes to infinity too
            return float("inf")

    # --- operators ------------------------------------------------------------------------------

    def _install(self, sender: bytes, message: Install, frames: Sequence[Buffer]) -> Outgoing:
        if self._greeted:  # a copy that comes late would undo what they have been told
            raise GiveUp(
                f"install: shard {self.spec.shard} serves workers by now; expected a fresh one"
            )
        names = list(self.spec.rule.slot_names)
        if message.slots and sorted(message.slots) != sorted(names):
            raise BadInput(
                f"install on shard {self.spec.shard}: expected the slots {names} of rule"
                f" {type(self.spec.rule).__name__}, got {message.slots}"
            )
        if len(frames) != 2 + len(message.slots):
            raise BadMessage(
                f"install: expected {2 + len(message.slots)} frames, got {len(frames)}"
            )
        saved = codec.decode_state(frames[0], Saved)
        weights = self._whole(frames[1]).copy()
        slots = dict.fromkeys(names, np.zeros(self.size, np.float32))
        slots.update(zip(message.slots, map(self._whole, frames[2:]), strict=True))
        self._weights, self._slots = weights, tuple(slots[name].copy() for name in names)
        self.version, self.steps, self.samples = saved.version, saved.steps, saved.samples
        self.ledger = saved.ledger
        self.ledger.dismiss()
        return Outgoing(
            sender, Installed(message.request, self.spec.shard, self.boot, self.version)
        )

    def _export(self, sender: bytes, message: Export) -> Outgoing:
        weights = self._installed()
        saved = Saved(self.version, self.steps, self.samples, self.ledger)
        # Slots change in place with the next push, so this answer takes copies of them.
        slots = tuple(slot.copy() for slot in self._slots)
        reply = State(
            message.request,
            self.spec.shard,
            self.boot,
            self.version,
            list(self.spec.rule.slot_names),
        )
        return Outgoing(sender, reply, (codec.encode_state(saved), weights, *slots))

    def status(self) -> ShardStatus:
        """This shard's counters and how each worker stands."""
        workers = tuple(
            WorkerStatus(
                name,
                entry.standing,
                entry.incarnation,
                entry.takeovers,
                entry.clock,
                entry.step,
                entry.seq,
                self.gate.waits(name) or name in self._round,
                entry.loss,
            )
            for name, entry in self.ledger.entries.items()
        )
        return ShardStatus(
            self.spec.shard,
            self.version,
            self.steps,
            self.samples,
            self.rate,
            self.journal.pushes,
            self.journal.pulls,
            self.journal.duplicates,
            self.journal.refused,
            self.journal.bytes_in,
            self.journal.bytes_out,
            self.journal.max_clock_gap,
            workers,
        )

    def _status(self, sender: bytes, message: AskStatus) -> Outgoing:
        reply = Status(message.request, self.spec.shard, self.boot)
        return Outgoing(sender, reply, (codec.encode_state(self.status()),))

    def _give_records(self, sender: bytes, message: AskRecords) -> Outgoing:
        first, rows = self.journal.since(message.after)
        reply = Records(message.request, self.spec.shard, self.boot, first)
        return Outgoing(sender, reply, (rows.tobytes(),))

    # --- checks ---------------------------------------------------------------------------------

    def _check_address(self, message: Request) -> None:
        """The message is for this job, this life of this shard, and this table."""
        assert isinstance(message, FromWorker | FromOperator)
        if message.job != self.spec.job:
            # Its own job's id is a secret, which a stranger must not be told.
            raise BadMessage(f"shard {self.spec.shard} serves another job than {message.job}")
        if isinstance(message, Registered) and message.boot != self.boot:
            raise Resynchronise(
                f"shard {self.spec.shard} is in life {self.boot}, the message is for {message.boot}"
            )
        table = getattr(message, "table", self.spec.table.name)
        if table != self.spec.table.name:
            raise BadMessage(f"shard {self.spec.shard} holds {self.spec.table.name}, not {table}")

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self.spec.map.epoch:
            raise Resynchronise(
                f"shard {self.spec.shard} is at map epoch {self.spec.map.epoch},"
                f" the message at {epoch}"
            )

    def _identify(self, message: FromWorker, now: float) -> None:
        self.ledger.identify(message, now + self.spec.lease_s)

    def _installed(self) -> NDArray[np.float32]:
        if self._weights is None:
            raise Retry(f"shard {self.spec.shard} has no weights yet")
        return self._weights

    def _whole(self, frame: Buffer) -> NDArray[np.float32]:
        if memoryview(frame).nbytes != self.size * 4:
            raise BadMessage(
                f"install: shard {self.spec.shard} has {self.size * 4} bytes of weights,"
                f" got {memoryview(frame).nbytes}"
            )
        return np.frombuffer(frame, "<f4")

    def _split(self, weights: NDArray[np.float32]) -> tuple[NDArray[np.float32], ...]:
        parts, base = [], 0
        for keys in self.ranges:
            parts.append(weights[base : base + len(keys)])
            base += len(keys)
        return tuple(parts)
