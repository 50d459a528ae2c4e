"""The shard: one part of the weights, and the rules for changing and reading it.

Everything a shard does is a transition: a message, its frames and the time come in, the answers go
out. It opens nothing, waits for nothing and knows no network; a driver (ps/server/server.py)
carries the bytes, and the same code runs on a virtual clock.

A message must be for this job and this incarnation of the shard; otherwise it is refused here.
It then goes to `WorkerRequests` or `AdminRequests`; both use `ShardPart` and `ReshardState`:

- `ShardPart` (shard_part.py) is what the shard owns: floats, ledger, counts. All of it that
  outlives a process is one value to copy and restore.
- `WorkerRequests` (worker_requests.py) keeps the promises to workers: each push counts exactly
  once, and no worker reads beyond the staleness bound.
- `AdminRequests` (admin_requests.py) installs and exports state, quiesces the shard, hands over its
  part, changes the job's settings, and reports counters.
- `ReshardState` (reshard_state.py) is the shard's progress in a reshard; both classes respect it.

A shard holds a part of some of the job's tables (table_part.py). parameters.py keeps them at one
version and prevents torn reads: an apply writes the next version into a buffer that nobody reads.
push_checks.py checks a push, updates.py turns it into a version, and pull_replies.py sends weights.

The shard leaves to others: moving bytes, keeping time, surviving crashes (snapshots and replicas
hold what `Export` returns), and assigning keys to shards.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cupy_kernels.backends import HOST, Backend
from shards.admin_requests import AdminRequests, FromOperator
from shards.buffer_pool import Buffers
from shards.errors import BadMessage, DownpourError, Moved, Resynchronise
from shards.job_ids import short_id
from shards.messages import (
    ChangeSettings,
    FromWorker,
    Hello,
    Install,
    Join,
    Leave,
    Probe,
    Pull,
    Push,
    Quiesce,
    Quiesced,
    Read,
    Registered,
    Renew,
    Request,
    SettingsInForce,
)
from shards.push_checks import Arrived
from shards.reshard_state import ReshardProgress, ReshardState
from shards.shard_part import ShardPart
from shards.shard_state import ShardState
from shards.shard_status import ShardStatus
from shards.spec import ShardSpec
from shards.transition_io import Arrival, Outgoing, refuse_request
from shards.wire_format import Buffer
from shards.worker_requests import WorkerRequests


class Expiry(NamedTuple):
    """The workers with leases that ran out, and the tables with a grace that ended."""

    workers: list[str]
    merges: list[str]


class Shard:
    """The state of one shard, and its transitions `handle` and `tick`."""

    def __init__(
        self,
        spec: ShardSpec,
        boot: int,
        buffers: Callable[[int], Buffers] = Buffers,
        backend: Backend = HOST,
    ) -> None:
        """`boot` numbers this incarnation of the shard; a later one must have a larger number.

        `buffers` makes the host buffers that weights are sent from, given their size in floats;
        `backend` holds weights and slots in its memory.
        """
        self.spec = spec
        self.boot = boot
        self.part = ShardPart(spec, boot, buffers, backend)
        self.parameters, self.ledger = self.part.parameters, self.part.ledger
        self.metrics, self.updates = self.part.metrics, self.part.updates
        self.reshard = ReshardState(spec.shard)
        self.workers = WorkerRequests(self.part, self.reshard)
        self.gate = self.workers.gate
        self._admin = AdminRequests(self.part, self.workers, self.reshard)

    @property
    def size(self) -> int:
        """The number of floats in this shard."""
        return self.parameters.size

    @property
    def version(self) -> int:
        """The number of updates in the present weights."""
        return self.parameters.version

    # --- transitions ----------------------------------------------------------------------------

    def handle(
        self, sender: bytes, message: Request, frames: Sequence[Buffer], now: float
    ) -> list[Outgoing]:
        """Answer one message; `now` is in seconds of a monotonic clock.

        An invalid message is answered with a Refusal. It changes nothing, except that a gradient
        refused by the guard is counted in the ledger (gradient_guard.py).
        """
        return self.handle_together((Arrival(sender, message, frames),), now)

    def handle_together(self, arrivals: Sequence[Arrival], now: float) -> list[Outgoing]:
        """Answer messages that arrived together as if they had come one after another.

        Pushes are applied in runs. A run is one push or, where the update rule allows it, pushes
        of several workers, which are applied in one pass over the weights. Pulls that arrived
        between these pushes are answered after the pass, with the version that it made.
        """
        out: list[Outgoing] = []
        run: list[Arrived] = []
        pulls: list[Arrival] = []
        for arrival in arrivals:
            message = arrival.message
            if run:
                # A pull changes nothing, so it need not end a run of pushes; it is answered after
                # the pass.
                if isinstance(message, Pull):
                    pulls.append(arrival)
                    continue
                if not (isinstance(message, Push) and self.updates.joins(run, message)):
                    out += self._finish(run, pulls, now)
                    run, pulls = [], []
            try:
                self._check_address(message)
                if isinstance(message, Push):
                    out += self.workers.examine(arrival.sender, message, arrival.frames, run, now)
                elif isinstance(message, Pull):
                    out += self.workers.pull(arrival.sender, message, arrival.frames, now)
                else:
                    out += self._dispatch(arrival.sender, message, arrival.frames, now)
            except DownpourError as error:
                # The run stays open: a refused message has changed nothing that its pushes depend
                # on.
                out.append(self.refuse(arrival.sender, message.request, error))
        if run:
            out += self._finish(run, pulls, now) if pulls else self.workers.apply(run, now)
        return out

    def answer_probe(
        self, sender: bytes, probe: Probe, frames: Sequence[Buffer], *, unix_s: float, cpu_s: float
    ) -> Outgoing:
        """Answer a link probe; the driver passes its Unix time and CPU time, both in seconds."""
        try:
            self._check_address(probe)
        except DownpourError as error:
            return self.refuse(sender, probe.request, error)
        answer = self._admin.answer_probe(probe, frames, unix_s=unix_s, cpu_s=cpu_s)
        return Outgoing(sender, *answer)

    def tick(self, now: float) -> list[Outgoing]:
        """Expire leases; the driver calls it every `lease_s / 4`, and at `next_merge`.

        Before a late call the driver calls `forgive_silence`.
        """
        due = self.due(now)
        return [] if due is None else self.expire(due.workers, now, due.merges)

    def due(self, now: float) -> "Expiry | None":
        """The arguments for a call of `expire` now; None if there is nothing to do.

        Exports with no further requests are dropped here: no answer depends on when that happens.

        A quiesce may end by itself after the last lease has run out. No message then
        triggers the buffered pushes; calling `expire` with empty lists applies them.
        """
        self._admin.exports.expire(now)
        silent = self.ledger.silent(now)
        merges = self.workers.due_merges(now)
        return Expiry(silent, merges) if silent or merges or self.workers.owes_flush(now) else None

    def next_merge(self, now: float) -> float | None:
        """When the driver has to call `tick` for reports that wait, by its clock; None if never."""
        return self.workers.next_merge(now)

    def forgive_silence(self, late_s: float) -> None:
        """Extend all leases by `late_s`, the seconds by which the driver's `tick` was delayed.

        Messages of that time, renewals included, have arrived but have not been handled yet. So at
        most one tick interval counts as silence, however long the driver was held up.
        """
        self.ledger.forgive_silence(late_s)

    def expire(
        self, workers: Sequence[str], now: float, merges: Sequence[str] = ()
    ) -> list[Outgoing]:
        """Stop counting these workers at the gate: their leases ran out.

        `merges` are the tables on which the reports are merged without those that are missing.
        """
        return self.workers.expire(workers, now, merges)

    def refuse(self, sender: bytes, request: int, error: DownpourError) -> Outgoing:
        """The Refusal for `error`; the driver also uses it for bytes that are not a message."""
        return refuse_request(self.part, sender, request, error)

    def _dispatch(
        self,
        sender: bytes,
        message: Hello | Join | Renew | Leave | FromOperator,
        frames: Sequence[Buffer],
        now: float,
    ) -> list[Outgoing]:
        """Answer a message that is neither a push nor a pull; raises any error of the checks."""
        match message:
            case Hello():
                return self.workers.hello(sender, message, now)
            case Join():
                return self.workers.join(sender, message, now)
            case Renew():
                return self.workers.renew(sender, message, now)
            case Leave():
                return self.workers.leave(sender, message, now)
            case ChangeSettings():
                answer, _ = self._admin.answer(sender, message, frames, now)
                # An unchanged one is not logged, so it must open nothing.
                changed = isinstance(answer, SettingsInForce) and answer.changed
                return [Outgoing(sender, answer), *(self.workers.open(now) if changed else ())]
            case Quiesce() if message.apply_buffer:
                held, cut = self._admin.answer(sender, message, frames, now)
                # Workers may wait for the merge. A refused request is not logged: it opens nothing.
                obeyed = isinstance(held, Quiesced) and not held.busy_s
                return [Outgoing(sender, held, cut), *(self.workers.open(now) if obeyed else ())]
            case _:
                return [Outgoing(sender, *self._admin.answer(sender, message, frames, now))]

    def _finish(
        self, run: Sequence[Arrived], pulls: Sequence[Arrival], now: float
    ) -> list[Outgoing]:
        """Apply a run of pushes, then answer the pulls that arrived after the first of them."""
        acknowledged = self.workers.apply(run, now)
        return acknowledged + self.handle_together(pulls, now) if pulls else acknowledged

    def _check_address(self, message: Request | Probe) -> None:
        """Check that the message is for this job and for this incarnation of this shard.

        Raises BadMessage, Moved or Resynchronise.
        """
        if message.job != self.spec.job:
            # A job's id is a secret. The error must reveal neither this job's id to the sender nor
            # the sender's to readers of its error, for example on Spark's web pages.
            raise BadMessage(
                f"shard {self.spec.shard} serves another job than {short_id(message.job)}"
            )
        # Before the check of the boot number: a worker of an earlier incarnation must learn of the
        # new shards as well. Operators are not redirected, because one may still need this shard's
        # cut.
        if self.reshard.moved_to is not None and isinstance(message, FromWorker | Read):
            raise Moved(f"shard {self.spec.shard} has handed over its part", self.reshard.moved_to)
        if isinstance(message, Registered) and message.boot != self.boot:
            raise Resynchronise(
                f"shard {self.spec.shard} is incarnation {self.boot}, "
                f"the message is for {message.boot}"
            )

    # --- for its driver -------------------------------------------------------------------------

    def status(self) -> ShardStatus:
        """This shard's counters and the status of each worker."""
        return self._admin.status()

    @property
    def is_prepared(self) -> bool:
        """True if `prepare` has nothing left to do before the next push."""
        return self.parameters.is_prepared

    def prepare(self) -> None:
        """Do a small part of the work that the next push would otherwise wait for.

        The driver calls it while no message is waiting, until `is_prepared`. No answer depends on
        it.
        """
        self.parameters.prepare()

    # --- for its WAL and its replicas ------------------------------------------------------------

    def copy(self) -> ShardState:
        """The whole state at one version, in host memory; the arrays will not change later.

        The ledger is not copied: encode it before the next transition.
        """
        return self.part.copy()

    def restore(self, state: ShardState) -> None:
        """Take over the state that another shard's `copy` returned; active workers stay active."""
        self.part.restore(state)

    def waiting(self) -> list[tuple[Request, tuple[Buffer, ...]]]:
        """Requests that will change the state: pushes of open rounds, parked joins, and the pieces
        of a state that is not installed yet.
        """
        return [*self.workers.waiting(), *self._admin.list_staged_pieces()]

    def park_request(self, message: Request, frames: Sequence[Buffer], now: float) -> None:
        """Park a request that is also parked at the copy that this state was restored from.

        The ledger does not check it again: its worker's lease may have expired since, and its push
        still counts.
        """
        if isinstance(message, Install):
            self._admin.stage(message, frames)
        else:
            self.workers.park_request(message, frames, now)

    def moving(self, now: float) -> bool:
        """Return whether it is quiesced or has handed over; `copy` contains neither fact."""
        return self.reshard.has_begun(now)

    @property
    def progress(self) -> ReshardProgress:
        """Resharding progress, for replication to another copy."""
        return self.reshard.progress

    @progress.setter
    def progress(self, progress: ReshardProgress) -> None:
        self.reshard.progress = progress

    def take_over(self, now: float) -> None:
        """Serve in place of another copy from now on; its workers must say hello to this one."""
        self.workers.take_over(now)
        # Its end is a time of the former copy's clock, which says nothing here.
        self.reshard.quiesce.reset(now)

    def roll_back(self, now: float) -> None:
        """Serve from now on with a state that may lack pushes that it acknowledged before.

        The Welcome says so, and each worker then reports, in its Join, the last push that was
        acknowledged to it.
        """
        self.part.rolled_back = True
        self.ledger.roll_back()
        self.metrics.roll_back(self.boot)
        self.take_over(now)
