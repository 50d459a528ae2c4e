"""The shard: one part of the weights, and who may change or read them.

Everything a shard does is a transition: a message, its frames and the time come in, the answers go
out. It opens nothing, waits for nothing and knows no network; a driver (ps/serving/server.py)
carries the bytes, and the same code runs on a virtual clock.

A message is for this job, this life of the shard and this table, or it is refused here. Then it is
a worker's or an operator's:

- `Part` (part.py) is what the shard owns: floats, ledger, counts. All of it that outlives a process
  is one value to copy and restore.
- `Workers` (workers.py) keeps the promises to workers: each push counts exactly once, and nobody
  reads beyond the staleness bound.
- `Operators` (operators.py) installs and exports, holds still, hands over, tells figures.
- `Move` (move.py) is how far the shard is on its way to others, which both go by.

That reads are untorn is state.py's: an apply writes the next version into a buffer that nobody
reads. What a push must be like is pushes.py's, how it becomes a version updates.py's, how weights
are sent serving.py's.

What a shard leaves to others: moving bytes, keeping time, surviving (snapshots and replicas hold
what `Export` gives), and the question which shard owns which keys.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.places import HOST, Place
from shards.codec import Buffer
from shards.errors import BadMessage, DownpourError, Moved, Resynchronise
from shards.job_ids import shown
from shards.messages import (
    FromWorker,
    Hello,
    Join,
    Leave,
    Probe,
    Pull,
    Push,
    Registered,
    Renew,
    Request,
    ShardStatus,
)
from shards.move import Move, Stance
from shards.operators import Operators
from shards.part import Part
from shards.pushes import Arrived
from shards.spec import ShardSpec
from shards.state import Saved
from shards.transitions import Arrival, Outgoing, refused
from shards.versions import Buffers
from shards.workers import Workers


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
        self.part = Part(spec, boot, buffers, place)
        self.held, self.ledger = self.part.held, self.part.ledger
        self.journal, self.updates = self.part.journal, self.part.updates
        self.move = Move(spec.shard)
        self.workers = Workers(self.part, self.move)
        self.gate = self.workers.gate
        self._operators = Operators(self.part, self.workers, self.move)
        self._table = spec.table.name

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
        answer = self._operators.probed(probe, frames, unix_s=unix_s, cpu_s=cpu_s)
        return Outgoing(sender, *answer)

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
                    run.append(self.workers.examine(one.sender, message, one.frames, now))
                except DownpourError as error:
                    out.append(self.refuse(one.sender, message.request, error))
            else:
                out += self._finish(run, pulls, now)
                run, pulls = [], []
                out += self.handle(one.sender, message, one.frames, now)
        return out + self._finish(run, pulls, now)

    def tick(self, now: float) -> list[Outgoing]:
        """Let leases run out; call it each `lease_s / 4`, and `excuse` before it if it is late."""
        silent = self.ledger.silent(now)
        return self.expire(silent, now) if silent else []

    def excuse(self, late_s: float) -> None:
        """Its driver looks at leases so much later than it meant to, for it was held up.

        What workers said meanwhile, their renewals among it, has come but not been heard. So no
        more than the time between two looks counts as silence, however long the driver took.
        """
        self.ledger.excuse(late_s)

    def expire(self, workers: Sequence[str], now: float) -> list[Outgoing]:
        """Count these workers no longer, whose leases ran out."""
        return self.workers.expire(workers, now)

    def refuse(self, sender: bytes, request: int, error: DownpourError) -> Outgoing:
        """The Refusal that tells `error`; the driver uses it for bytes that are no message."""
        return refused(self.part, sender, request, error)

    def _dispatch(
        self, sender: bytes, message: Request, frames: Sequence[Buffer], now: float
    ) -> list[Outgoing]:
        match message:
            case Push():
                return self.workers.push(sender, message, frames, now)
            case Pull():
                return self.workers.pull(sender, message, now)
            case Hello():
                return self.workers.hello(sender, message, now)
            case Join():
                return self.workers.join(sender, message, now)
            case Renew():
                return self.workers.renew(sender, message, now)
            case Leave():
                return self.workers.leave(sender, message, now)
            case _:
                return [Outgoing(sender, *self._operators.answer(message, frames, now))]

    def _finish(
        self, run: Sequence[Arrived], pulls: Sequence[Arrival], now: float
    ) -> list[Outgoing]:
        """Apply a run of pushes, then answer the pulls that came after the first of them."""
        if not run:
            return []
        out = self.workers.apply(run, now)
        for one in pulls:
            out += self.handle(one.sender, one.message, one.frames, now)
        return out

    def _check_address(self, message: Request | Probe) -> None:
        """The message is for this job, this life of this shard, and this table."""
        if message.job != self.spec.job:
            # A job's id is a secret: a stranger is not told this one's, nor whoever reads the
            # stranger's errors, on Spark's pages say, the other's.
            raise BadMessage(
                f"shard {self.spec.shard} serves another job than {shown(message.job)}"
            )
        if self.move.moved_to is not None and isinstance(message, FromWorker):
            raise Moved(f"shard {self.spec.shard} has handed over its part", self.move.moved_to)
        if isinstance(message, Registered) and message.boot != self.boot:
            raise Resynchronise(
                f"shard {self.spec.shard} is in life {self.boot}, the message is for {message.boot}"
            )
        table = getattr(message, "table", self._table)
        if table != self._table:
            raise BadMessage(f"shard {self.spec.shard} holds {self._table}, not {table}")

    # --- for its driver -------------------------------------------------------------------------

    def status(self) -> ShardStatus:
        """This shard's counters and how each worker stands."""
        return self._operators.status()

    @property
    def prepared(self) -> bool:
        """Whether there is nothing that `prepare` could do before the next push comes."""
        return self.held.prepared

    def prepare(self) -> None:
        """Do a little of what the next push would wait for; while nothing has come, and again
        until `prepared`. No answer shows it.
        """
        self.held.prepare()

    # --- for its log, and for another copy of it ------------------------------------------------

    def copy(self) -> tuple[Saved, NDArray[np.float32], dict[str, NDArray[np.float32]]]:
        """The whole state, of one version, in this host's memory; the arrays stay as they are."""
        return self.part.copy()

    def restore(
        self, saved: Saved, weights: NDArray[np.float32], slots: dict[str, NDArray[np.float32]]
    ) -> None:
        """Become what `copy` returned elsewhere, its workers counting as they did there."""
        self.part.restore(saved, weights, slots)

    def waiting(self) -> list[tuple[FromWorker, tuple[Buffer, ...]]]:
        """Requests that will change something and wait: pushes of open rounds, parked joins."""
        return self.workers.waiting()

    def let_wait(self, message: Request, frames: Sequence[Buffer], now: float) -> None:
        """Have a request wait here as it does at the copy whose state was restored.

        It is not judged again: its worker may have fallen silent since, and its push still counts.
        """
        self.workers.let_wait(message, frames, now)

    def moving(self, now: float) -> bool:
        """Whether it stands still, or has handed over its part: `copy` tells of neither."""
        return self.move.begun(now)

    @property
    def stance(self) -> Stance:
        """What `moving` asks for, for a copy that is to be as far in a move as this one."""
        return self.move.stance

    @stance.setter
    def stance(self, stance: Stance) -> None:
        self.move.stance = stance

    def take_over(self, now: float) -> None:
        """Serve from now on, in another copy's place: its workers must say hello to this one."""
        self.workers.take_over(now)
        self.move.standstill.begin_anew(now)

    def roll_back(self, now: float) -> None:
        """Serve from now on with a state that may lack what a former life has acknowledged.

        Workers are told so when they say hello, and say what they had been told.
        """
        self.part.rolled_back = True
        self.ledger.roll_back()
        self.journal.roll_back(self.boot)
        self.take_over(now)
