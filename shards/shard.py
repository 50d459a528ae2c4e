"""The shard: one part of the weights, and who may change or read them.

Everything a shard does is a transition: a message, its frames and the time come in, the answers go
out. It opens nothing, waits for nothing and knows no network; a driver (ps/serving/server.py)
carries the bytes, and the same code runs on a virtual clock.

The promises kept here:

- *Exactly once.* The ledger judges each push by incarnation and seq before anything is touched, and
  it is updated in the same transition as the weights.
- *Bounded staleness.* A pull beyond the bound is parked in the gate. After every transition that
  may have raised the slowest clock, `_open` answers whoever may go.
- *Untorn reads.* An apply writes the next version into a buffer that nobody reads (state.py).

A push of a synchronous round is acknowledged only when its round is applied: until then it is not
in the ledger, and its worker repeats it if the shard forgets, as it does when the worker says hello
again: what a Welcome reports of the past must not change any more.

The floats themselves, and where they live, are state.py's; what a push must be like is pushes.py's,
and how it becomes a version updates.py's; how weights are sent is serving.py's.

What a shard leaves to others: moving bytes, keeping time, surviving (snapshots and replicas hold
what `Export` gives), and the question which shard owns which keys.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cupy_kernels.places import HOST, Place
from shards import codec
from shards.codec import Buffer
from shards.errors import BadMessage, DownpourError, GiveUp, Moved, Resynchronise, WrongBuild
from shards.gate import Gate
from shards.journal import Journal
from shards.ledger import Ledger, Verdict
from shards.messages import (
    PROTOCOL,
    Ack,
    AskRecords,
    AskStatus,
    Cut,
    Export,
    FromShard,
    FromWorker,
    Hello,
    Hold,
    Holding,
    Install,
    Installed,
    Join,
    Joined,
    Leave,
    Left,
    Parked,
    Probe,
    Probed,
    Pull,
    Push,
    Read,
    Records,
    Registered,
    Renew,
    Renewed,
    Request,
    Retire,
    Retired,
    ShardStatus,
    Standing,
    State,
    Status,
    Welcome,
)
from shards.pushes import Arrived, Pushes
from shards.refusals import refusal
from shards.serving import Serving
from shards.spec import ShardSpec
from shards.standstill import Stance, Standstill
from shards.state import Held, Saved
from shards.updates import Applied, Updates
from shards.versions import Buffers


class Outgoing(msgspec.Struct, frozen=True):
    """An answer: `to` is the address its request came from; `frames` follow the header."""

    to: bytes
    message: FromShard
    frames: tuple[NDArray[Any] | bytes, ...] = ()


class Arrival(msgspec.Struct, frozen=True):
    """A message that has come, and who from."""

    sender: bytes
    message: Request
    frames: Sequence[Buffer] = ()


class Shard:
    """The state of one shard, and its transitions `handle` and `tick`."""

    def __init__(
        self,
        spec: ShardSpec,
        boot: int,
        buffers: Callable[[int], Buffers] = Buffers,
        place: Place = HOST,
    ) -> None:
        """`boot` numbers this life of the shard; a later life must be given a larger number.

        `buffers` makes what is sent of the weights, for so many floats in the host's memory;
        `place` is where weights and slots live.
        """
        self.spec = spec
        self.boot = boot
        self.held = Held(spec, buffers, place)
        self.ledger = Ledger()
        self.gate = Gate(spec.bound)
        self.journal = Journal()
        self.updates = Updates(spec, self.held, self.journal)
        self._greeted = False
        self._standstill = Standstill()
        self._moved_to: bytes | None = None
        self._exported: dict[str, int] = {}  # the last push of each worker in the last `State`
        self._table = spec.table.name
        self._pushes = Pushes(spec, self.held)
        self._serving = Serving(spec, boot, self.held, self.journal)

    @property
    def size(self) -> int:
        """How many floats it has."""
        return self.held.size

    @property
    def version(self) -> int:
        """How many updates have made the present weights."""
        return self.held.version

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

    def probed(
        self, sender: bytes, probe: Probe, frames: Sequence[Buffer], *, unix_s: float, cpu_s: float
    ) -> Outgoing:
        """Answer a question about the link, for the driver, who alone knows clock and CPU time."""
        try:
            self._check_address(probe)
        except DownpourError as error:
            return self.refuse(sender, probe.request, error)
        reply = Probed(
            probe.request,
            self.spec.shard,
            self.boot,
            PROTOCOL,
            self.spec.build,
            unix_s,
            cpu_s,
            sum(memoryview(frame).nbytes for frame in frames),
        )
        return Outgoing(sender, reply, (bytes(probe.payload_bytes),))

    def handle_together(self, arrivals: Sequence[Arrival], now: float) -> list[Outgoing]:
        """Answer messages that have come by the same moment: as if one after another.

        Where the rule allows it, pushes of different workers are applied in one pass. The pulls
        that came between them are answered behind them, and from what they have made.
        """
        out: list[Outgoing] = []
        run: list[Arrived] = []
        pulls: list[Arrival] = []
        for one in arrivals:
            message = one.message
            if run and isinstance(message, Pull):
                pulls.append(one)
            elif isinstance(message, Push) and self.updates.joins(run, message, self.ledger):
                try:
                    self._check_address(message)
                    self._check_push(message, now)
                    run.append(self._pushes.examine(one.sender, message, one.frames, now))
                except DownpourError as error:
                    out.append(self.refuse(one.sender, message.request, error))
            else:
                out += self._finish(run, pulls, now)
                run, pulls = [], []
                out += self.handle(one.sender, message, one.frames, now)
        return out + self._finish(run, pulls, now)

    def tick(self, now: float) -> list[Outgoing]:
        """Let leases run out; call it at least once a `lease_s / 4`."""
        silent = self.ledger.silent(now)
        return self.expire(silent, now) if silent else []

    def expire(self, workers: Sequence[str], now: float) -> list[Outgoing]:
        """Count these workers no longer, whose leases ran out."""
        self.ledger.expire(workers)
        for worker in workers:
            self.gate.forget(worker)
            self._serving.forget(worker)
        return self._open(now)

    def refuse(self, sender: bytes, request: int, error: DownpourError) -> Outgoing:
        """The Refusal that tells `error`; the driver uses it for bytes that are no message."""
        self.journal.refused += 1
        where = (error.cluster,) if isinstance(error, Moved) else ()
        return Outgoing(sender, refusal(request, self.spec.shard, self.boot, error), where)

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
                return [self._install(sender, message, frames, now)]
            case Hold():
                return [self._hold(sender, message, frames, now)]
            case Retire():
                return [self._retire(sender, message, frames, now)]
            case Export():
                return [self._export(sender, message)]
            case Read():
                return [Outgoing(sender, *self._serving.whole(message.request))]
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
        self.held.weights()
        entry = self.ledger.greet(message.worker, message.incarnation, now + self.spec.lease_s)
        self._greeted = True
        self._serving.forget(message.worker)
        if entry.standing is Standing.GREETED:
            self.gate.forget(message.worker)
            self.updates.round.pop(message.worker, None)
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
        self._serving.forget(message.worker)
        left = Outgoing(sender, Left(message.request, self.spec.shard, self.boot))
        return [left, *self._open(now)]

    def _pull(self, sender: bytes, message: Pull, now: float) -> list[Outgoing]:
        self.ledger.identify(message, now + self.spec.lease_s)
        self._check_epoch(message.epoch)
        self._serving.check(message)
        if not self._may_go(message):
            return self._park(sender, message, now)
        return [Outgoing(sender, *self._serving.pull(message, 0.0, now))]

    def _park(self, sender: bytes, message: Pull | Join, now: float) -> list[Outgoing]:
        """Make it wait; a repetition is told so, which shows its sender that this shard lives."""
        if self.gate.park(sender, message, now):
            return []
        slowest = self.ledger.min_clock or 0
        return [Outgoing(sender, Parked(message.request, self.spec.shard, self.boot, slowest))]

    def _may_go(self, message: Pull | Join) -> bool:
        if isinstance(message, Pull):
            in_round = message.worker in self.updates.round
            return not in_round and self.gate.passes(message.clock, self.ledger.min_clock)
        # Shard 0 alone decides who warms up, or two shards might choose different replicas. Who was
        # admitted once and comes back still counts elsewhere, so it must not wait here.
        return (
            self.spec.shard > 0
            or self.ledger.entries[message.worker].admitted
            or self.updates.steps >= self.spec.warm_steps
            or not [worker for worker in self.ledger.active if worker != message.worker]
        )

    def _open(self, now: float) -> list[Outgoing]:
        """Apply a round that is complete, then answer whoever may go."""
        out: list[Outgoing] = []
        if self.updates.round:
            closed = self.updates.close_rounds(self.ledger, now, self._standstill)
            out += self._acknowledge_all(closed)
        for waiting in self.gate.release(self._may_go):
            if isinstance(waiting.message, Join):
                out.append(self._admit(waiting.sender, waiting.message))
            else:
                waited = now - waiting.since
                answer = self._serving.pull(waiting.message, waited, now)
                out.append(Outgoing(waiting.sender, *answer))
        return out

    # --- pushes ---------------------------------------------------------------------------------

    def _push(
        self, sender: bytes, message: Push, frames: Sequence[Buffer], now: float
    ) -> list[Outgoing]:
        self._check_push(message, now)
        ahead_of = self.updates.round.get(message.worker)
        if ahead_of is not None and message.seq > ahead_of.message.seq:
            slowest = self.ledger.min_clock or 0
            return [Outgoing(sender, Parked(message.request, self.spec.shard, self.boot, slowest))]
        if self.ledger.judge(message.worker, message.seq) is Verdict.DUPLICATE:
            self.journal.duplicates += 1
            # It was applied, so its steps are done: a retried worker catches up with its clock.
            self.ledger.advance(message.worker, message.clock)
            return [
                self._acknowledge(sender, message, self.version, duplicate=True),
                *self._open(now),
            ]
        arrived = self._pushes.examine(sender, message, frames, now)
        applied = self.updates.bring(arrived, self.ledger, now)
        return [*self._acknowledge_all(applied), *self._open(now)]

    def _finish(
        self, run: Sequence[Arrived], pulls: Sequence[Arrival], now: float
    ) -> list[Outgoing]:
        """Apply a run of pushes, then answer the pulls that came after the first of them."""
        if not run:
            return []
        out = [*self._apply_together(run, now), *self._open(now)]
        for one in pulls:
            out += self.handle(one.sender, one.message, one.frames, now)
        return out

    def _apply_together(self, run: Sequence[Arrived], now: float) -> list[Outgoing]:
        """Apply a run in one pass; one by one where that cannot be."""
        if len(run) == 1:
            return self._apply_one(run[0], now)
        applied = self.updates.bring_together(run, self.ledger, now)
        if applied is None:
            return [answer for one in run for answer in self._apply_one(one, now)]
        return self._acknowledge_all(applied)

    def _apply_one(self, arrived: Arrived, now: float) -> list[Outgoing]:
        try:
            return self._acknowledge_all(self.updates.bring(arrived, self.ledger, now))
        except DownpourError as error:
            return [self.refuse(arrived.sender, arrived.message.request, error)]

    def _acknowledge_all(self, applied: Sequence[Applied]) -> list[Outgoing]:
        return [
            self._acknowledge(push.sender, push.message, version, staleness)
            for push, version, staleness in applied
        ]

    def _acknowledge(
        self,
        sender: bytes,
        message: Push,
        version: int,
        staleness: int = 0,
        *,
        duplicate: bool = False,
    ) -> Outgoing:
        asked, shard, boot = message.request, self.spec.shard, self.boot
        saved = self._exported.get(message.worker, 0)
        ack = Ack(asked, shard, boot, message.seq, version, staleness, duplicate, saved)
        return Outgoing(sender, ack)

    # --- operators ------------------------------------------------------------------------------

    def _install(
        self, sender: bytes, message: Install, frames: Sequence[Buffer], now: float
    ) -> Outgoing:
        offered = self.held.read(message.slots, frames)
        # Who asks again need not know that the first answer died with a copy, or a process.
        if not (message.goes_on and self._holds(*offered)):
            if self._greeted:  # a copy that comes late would undo what they have been told
                raise GiveUp(
                    f"install: shard {self.spec.shard} serves workers by now; expected a fresh one"
                )
            self.restore(*offered)
        if message.goes_on:
            self.ledger.renew(now + self.spec.lease_s)
        else:
            self.ledger.dismiss()
        return Outgoing(
            sender, Installed(message.request, self.spec.shard, self.boot, self.version)
        )

    def _hold(self, sender: bytes, message: Hold, frames: Sequence[Buffer], now: float) -> Outgoing:
        asked = codec.decode_state(frames[0], Cut).pushes if frames else self.ledger.cut
        self._standstill.begin(asked, message.seconds, now)
        reply = Holding(message.request, self.spec.shard, self.boot, self.ledger.short_of(asked))
        return Outgoing(sender, reply, (codec.encode_state(Cut(self.ledger.cut)),))

    def _retire(
        self, sender: bytes, message: Retire, frames: Sequence[Buffer], now: float
    ) -> Outgoing:
        if len(frames) != 1:
            raise BadMessage(f"retire: expected one frame, got {len(frames)}")
        successors = bytes(frames[0])
        if len(successors) != message.size:
            raise BadMessage(f"retire: expected {message.size} bytes, got {len(successors)}")
        if self._moved_to is None and not self._standstill.holds(now):
            raise GiveUp(f"retire: shard {self.spec.shard} does not stand still")
        if self._moved_to not in (None, successors):
            # Another operator was first: who was sent there must not be called back.
            raise GiveUp(f"retire: shard {self.spec.shard} has handed over its part to others")
        self._moved_to = successors
        self.gate.clear()  # they ask again, and are told
        self.updates.round.clear()  # or it closes here when the leases of who went on run out
        return Outgoing(sender, Retired(message.request, self.spec.shard, self.boot))

    def _export(self, sender: bytes, message: Export) -> Outgoing:
        saved, weights, slots = self.copy()
        self._exported = self.ledger.cut
        reply = State(message.request, self.spec.shard, self.boot, self.version, list(slots))
        return Outgoing(sender, reply, (codec.encode_state(saved), weights, *slots.values()))

    def status(self) -> ShardStatus:
        """This shard's counters and how each worker stands."""
        return ShardStatus(
            self.spec.shard,
            self.version,
            self.updates.steps,
            self.updates.samples,
            self.updates.rate,
            self.journal.pushes,
            self.journal.pulls,
            self.journal.duplicates,
            self.journal.refused,
            self.journal.bytes_in,
            self.journal.bytes_out,
            self.journal.max_clock_gap,
            self.ledger.standings(self._waits),
        )

    def _waits(self, worker: str) -> bool:
        return self.gate.waits(worker) or worker in self.updates.round

    def _status(self, sender: bytes, message: AskStatus) -> Outgoing:
        reply = Status(message.request, self.spec.shard, self.boot)
        return Outgoing(sender, reply, (codec.encode_state(self.status()),))

    def _give_records(self, sender: bytes, message: AskRecords) -> Outgoing:
        first, rows = self.journal.since(message.after)
        reply = Records(message.request, self.spec.shard, self.boot, first)
        return Outgoing(sender, reply, (rows.tobytes(),))

    # --- copies ---------------------------------------------------------------------------------

    @property
    def prepared(self) -> bool:
        """Whether there is nothing that `prepare` could do before the next push comes."""
        return self.held.prepared

    def prepare(self) -> None:
        """Do a little of what the next push would wait for; while nothing has come, and again
        until `prepared`. No answer shows it.
        """
        self.held.prepare()

    def copy(self) -> tuple[Saved, NDArray[np.float32], dict[str, NDArray[np.float32]]]:
        """The whole state, of one version, in this host's memory; the arrays stay as they are."""
        weights, slots = self.held.copy()
        done = self.updates
        return Saved(self.version, done.steps, done.samples, self.ledger), weights, slots

    def restore(
        self, saved: Saved, weights: NDArray[np.float32], slots: dict[str, NDArray[np.float32]]
    ) -> None:
        """Become what `copy` returned elsewhere, its workers counting as they did there."""
        self.held.restore(saved.version, weights, slots)
        self._serving.begin_anew()
        self.updates.steps, self.updates.samples = saved.steps, saved.samples
        self.ledger = saved.ledger

    def _holds(
        self, saved: Saved, weights: NDArray[np.float32], slots: dict[str, NDArray[np.float32]]
    ) -> bool:
        """Whether that was installed here, and nothing has been pushed since."""
        same = (self.version, self.updates.steps, self.updates.samples) == (
            saved.version,
            saved.steps,
            saved.samples,
        )
        return same and self.ledger.lives == saved.ledger.lives and self.held.is_at(weights, slots)

    def waiting(self) -> list[tuple[FromWorker, tuple[Buffer, ...]]]:
        """Requests that will change something and wait: pushes of open rounds, parked joins."""
        pushes = [(one.message, one.frames) for one in self.updates.round.values()]
        joins = [one.message for one in self.gate.waiting if isinstance(one.message, Join)]
        return [*pushes, *((join, ()) for join in joins)]

    def moving(self, now: float) -> bool:
        """Whether it stands still, or has handed over its part: `copy` tells of neither."""
        return self._moved_to is not None or self._standstill.holds(now)

    @property
    def stance(self) -> Stance:
        """What `moving` asks for, for a copy that is to be as far in a move as this one."""
        return Stance(self._standstill.told, self._moved_to)

    @stance.setter
    def stance(self, stance: Stance) -> None:
        self._standstill, self._moved_to = Standstill(stance.standstill), stance.moved_to

    def let_wait(self, message: Request, frames: Sequence[Buffer], now: float) -> None:
        """Have a request wait here as it does at the copy whose state was restored.

        It is not judged again: its worker may have fallen silent since, and its push still counts.
        """
        if isinstance(message, Push):
            arrived = self._pushes.examine(b"", message, frames, now)
            self.updates.bring(arrived, self.ledger, now)
        elif isinstance(message, Join):
            self.gate.park(b"", message, now)

    def take_over(self, now: float) -> None:
        """Serve from now on, in another copy's place: its workers must say hello to this one."""
        # A copy of the install that came before them must not undo what they brought.
        self._greeted = any(e.standing is not Standing.LEFT for e in self.ledger.entries.values())
        self.ledger.renew(now + self.spec.lease_s)
        self.gate.clear()
        self._standstill.begin_anew(now)

    # --- checks ---------------------------------------------------------------------------------

    def _check_address(self, message: Request | Probe) -> None:
        """The message is for this job, this life of this shard, and this table."""
        if message.job != self.spec.job:
            # Its own job's id is a secret, which a stranger must not be told.
            raise BadMessage(f"shard {self.spec.shard} serves another job than {message.job}")
        if self._moved_to is not None and isinstance(message, FromWorker):
            raise Moved(f"shard {self.spec.shard} has handed over its part", self._moved_to)
        if isinstance(message, Registered) and message.boot != self.boot:
            raise Resynchronise(
                f"shard {self.spec.shard} is in life {self.boot}, the message is for {message.boot}"
            )
        table = getattr(message, "table", self._table)
        if table != self._table:
            raise BadMessage(f"shard {self.spec.shard} holds {self._table}, not {table}")

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self.spec.map.epoch:
            raise Resynchronise(
                f"shard {self.spec.shard} is at map epoch {self.spec.map.epoch},"
                f" the message at {epoch}"
            )

    def _check_push(self, message: Push, now: float) -> None:
        self.ledger.identify(message, now + self.spec.lease_s)
        self._check_epoch(message.epoch)
        self._standstill.check(message.worker, message.seq, now)

    def _identify(self, message: FromWorker, now: float) -> None:
        self.ledger.identify(message, now + self.spec.lease_s)
