"""Requests of operators: install or export a state, quiesce, hand over, change settings, report.

None of them is subject to incarnation, lease or staleness bound. Each answer goes to the requester.
None of them answers a worker: a handover drops the workers' waiting requests, and they ask again.
"""

from collections.abc import Sequence
from typing import Any

from msgspec import structs
from numpy.typing import NDArray

from shards import live_settings, shard_state, wire_format
from shards.errors import (
    BadMessage,
    DownpourError,
    GiveUp,
    Mismatch,
    Moved,
    Resynchronise,
    Retry,
)
from shards.messages import (
    PROTOCOL,
    AskPiece,
    AskRecords,
    AskStatus,
    ChangeSettings,
    Cut,
    Describe,
    Described,
    Export,
    FromShard,
    HandedOver,
    HandOver,
    Install,
    Installed,
    Probe,
    Probed,
    Quiesce,
    Quiesced,
    Read,
    Records,
    SettingsInForce,
    State,
    Status,
)
from shards.reshard_state import ReshardState
from shards.schema_digest import SCHEMA, differs
from shards.shard_part import ShardPart
from shards.shard_status import ShardStatus
from shards.state_pieces import CutState, GatheredState, OpenExport, OpenExports
from shards.wire_format import Buffer
from shards.worker_requests import WorkerRequests

FromOperator = (
    Install
    | Quiesce
    | HandOver
    | ChangeSettings
    | Export
    | AskPiece
    | Read
    | Describe
    | AskStatus
    | AskRecords
)

Answer = tuple[FromShard, tuple[NDArray[Any] | bytes, ...]]
"""The header, and the frames that follow it."""


class AdminRequests:
    """One incarnation of a shard's answers to its operators."""

    def __init__(self, part: ShardPart, workers: WorkerRequests, reshard: ReshardState) -> None:
        self._part = part
        self._workers = workers
        self._reshard = reshard
        self._shard, self._boot = part.spec.shard, part.boot
        self.exports = OpenExports(part.spec.shard)
        # A piece states its own sizes, so without this bound one message could reserve any amount
        # of memory.
        self._max_bytes = part.spec.arrays_bytes + wire_format.MAX_STATE_BYTES
        self._staged: tuple[Install, GatheredState] | None = None

    def answer(
        self, sender: bytes, message: FromOperator, frames: Sequence[Buffer], now: float
    ) -> Answer:
        """Carry out a request of `sender`.

        Raises BadMessage, BadInput, Retry, Mismatch or GiveUp, and then has changed nothing.
        """
        match message:
            case Install():
                return self._install(message, frames, now)
            case Quiesce():
                return self._quiesce(message, frames, now)
            case HandOver():
                return self._hand_over(message, frames, now)
            case ChangeSettings():
                return self._change_settings(message, now)
            case Export():
                return self._export(sender, message, now)
            case AskPiece():
                return self._next_piece(message, now)
            case Read():
                return self._part.serving.read(message, frames)
            case Describe():
                return self._describe(message)
            case AskStatus():
                reply = Status(message.request, self._shard, self._boot)
                return reply, (wire_format.encode_state(self.status()),)
            case AskRecords():
                first, rows = self._part.metrics.since(message.after)
                return Records(message.request, self._shard, self._boot, first), (rows.tobytes(),)

    def answer_probe(
        self, probe: Probe, frames: Sequence[Buffer], *, unix_s: float, cpu_s: float
    ) -> Answer:
        """Answer a link probe with the size of its frames and one frame of the requested size."""
        reply = Probed(
            probe.request,
            self._shard,
            self._boot,
            PROTOCOL,
            SCHEMA,
            unix_s,
            cpu_s,
            sum(memoryview(frame).nbytes for frame in frames),
        )
        return reply, (bytes(probe.payload_bytes),)

    def status(self) -> ShardStatus:
        """The shard's counters and the status of each worker."""
        updates, metrics = self._part.updates, self._part.metrics
        return ShardStatus(
            self._shard,
            self._part.parameters.version,
            updates.steps,
            updates.samples,
            updates.rate,
            metrics.pushes,
            metrics.pulls,
            metrics.duplicates,
            metrics.dropped,
            metrics.refused,
            metrics.bytes_in,
            metrics.bytes_out,
            metrics.max_clock_gap,
            self._part.ledger.standings(self._workers.waits, self._workers.links),
            metrics.trouble,
            len(self._workers.gate.parked),
            metrics.queue,
            metrics.busy_s,
            self._part.settings,
            *metrics.histograms(),
            metrics.host,
            self._part.parameters.count_rows(),
        )

    def list_staged_pieces(self) -> list[tuple[Install, tuple[Buffer, ...]]]:
        """The pieces of a state that is not installed yet, as requests for another copy."""
        if self._staged is None:
            return []
        install, gathered = self._staged
        return [
            (structs.replace(install, piece=piece), tuple(wire_format.wrap(frames)))
            for piece, frames in gathered.pieces()
        ]

    def stage(self, message: Install, frames: Sequence[Buffer]) -> GatheredState:
        """Keep a piece of a state; those of a state that was not completed are dropped."""
        assert message.piece is not None, "a whole state is installed at once"
        gathered = GatheredState(message.piece.of, self._max_bytes)
        if self._staged is not None and self._staged[1].of == gathered.of:
            gathered = self._staged[1]
        gathered.take(message.piece, frames)
        self._staged = message, gathered
        return gathered

    def _install(self, message: Install, frames: Sequence[Buffer], now: float) -> Answer:
        if message.piece is None:
            return self._install_whole(message, frames, now)
        if not message.keep_workers:
            self._check_fresh()
        gathered = self.stage(message, frames)
        if not gathered.complete:
            version = self._part.parameters.version
            missing = len(gathered.missing)
            return Installed(message.request, self._shard, self._boot, version, missing), ()
        try:
            answer = self._install_whole(message, gathered.frames(), now)
        except DownpourError:
            gathered.drop(message.piece.number)  # other copies of the shard never see this request
            raise
        self._staged = None
        return answer

    def _install_whole(self, message: Install, frames: Sequence[Buffer], now: float) -> Answer:
        part = self._part
        offered, more = shard_state.decode(frames)
        if more:
            raise BadMessage(
                f"install: expected {len(frames) - len(more)} frames, got {len(frames)}"
            )
        # Checked before anything changes: a `restore` that failed half-way could not be undone.
        part.parameters.check_state(offered.arrays)
        # A retried Install is idempotent: the first reply may have been lost in a failover.
        if not (message.keep_workers and part.is_at(offered)):
            self._check_fresh()
            settings = part.settings
            part.restore(offered)
            if settings.revision > part.settings.revision:
                part.follow(settings)  # the Install is a late copy of one before the change
        if message.keep_workers:
            part.ledger.renew(now + part.spec.lease_s)
        else:
            # The workers of a resumed job are other processes: an old lease would make the gate
            # wait for workers that never come.
            part.ledger.detach_workers()
        return Installed(message.request, self._shard, self._boot, part.parameters.version), ()

    def _check_fresh(self) -> None:
        if self._workers.welcomed:  # a late Install would undo what a Welcome has reported
            raise GiveUp(
                f"install: shard {self._shard} serves workers by now; expected a fresh one"
            )

    def _quiesce(self, message: Quiesce, frames: Sequence[Buffer], now: float) -> Answer:
        ledger, reshard = self._part.ledger, self._reshard
        cut = wire_format.decode_state(frames[0], Cut).pushes if frames else ledger.cut
        if reshard.moved_to is not None and not reshard.quiesce.is_owned(message.owner, now):
            raise Moved(f"shard {self._shard} has handed over its part", reshard.moved_to)
        origin, revision = (message.request, self._shard, self._boot), self._part.settings.revision
        if busy_s := reshard.quiesce.busy_s(message.owner, now):
            reply = Quiesced(*origin, missing=True, busy_s=busy_s, revision=revision)
            return reply, (wire_format.encode_state(Cut(ledger.cut)),)
        missing = ledger.short_of(cut)
        # The answer to a late request reaches nobody: its operator has asked something else since.
        if not reshard.quiesce.is_late(message.owner, message.request):
            reshard.quiesce.begin(message.owner, message.request, cut, message.seconds, now)
            if message.apply_buffer and not missing:
                self._part.updates.apply_buffer()
            self._workers.flush(now)  # the last lease may have run out during the quiesce
        reply = Quiesced(*origin, missing, revision=revision)
        return reply, (wire_format.encode_state(Cut(ledger.cut)),)

    def _hand_over(self, message: HandOver, frames: Sequence[Buffer], now: float) -> Answer:
        if len(frames) != 1:
            raise BadMessage(f"hand over: expected one frame, got {len(frames)}")
        successors = bytes(frames[0])
        if len(successors) != message.size:
            raise BadMessage(f"hand over: expected {message.size} bytes, got {len(successors)}")
        self._reshard.hand_over(successors, message.owner, now)
        # Their requests would otherwise be answered here, by a shard that no longer holds the part.
        self._workers.redirect_waiting()
        return HandedOver(message.request, self._shard, self._boot), ()

    def _change_settings(self, message: ChangeSettings, now: float) -> Answer:
        part, reshard = self._part, self._reshard
        if reshard.moved_to is not None:
            raise Moved(f"shard {self._shard} has handed over its part", reshard.moved_to)
        part.parameters.weights()  # raises Retry: a copy of an empty shard would lack the change
        live_settings.check_change(part.spec, message.settings)
        # An operator that quiesces the shard may have exported its state, without this change.
        busy_s = reshard.quiesce.remaining_s(now)
        changed = not busy_s and message.settings.revision > part.settings.revision
        if changed:
            part.follow(message.settings)
        origin = message.request, self._shard, self._boot
        return SettingsInForce(*origin, part.settings, changed, busy_s), ()

    def _describe(self, message: Describe) -> Answer:
        if difference := differs(message.protocol, message.schema):
            raise Mismatch(f"shard {self._shard}: {difference}")
        description = self._reshard.moved_to or self._part.description
        if not description:
            raise Retry(f"shard {self._shard} has no weights yet")
        return Described(message.request, self._shard, self._boot), (description,)

    def _export(self, sender: bytes, message: Export, now: float) -> Answer:
        # A repeated request must not fix a second version, because pieces of two versions do not
        # fit together.
        number = self.exports.find_opened(sender, message.request)
        if number is None:
            frames = shard_state.encode(self._part.copy())
            cut, version = CutState(frames, message.piece_bytes), self._part.parameters.version
            if cut.count == 1:
                return State(message.request, self._shard, self._boot, version), frames
            number = self.exports.open(OpenExport(sender, message.request, version, cut, now))
        return self._piece(message.request, number, 0, now)

    def _next_piece(self, message: AskPiece, now: float) -> Answer:
        # Another incarnation numbers its own exports: the same number may name another version
        # there.
        if message.boot != self._boot:
            raise Resynchronise(f"shard {self._shard} has restarted: begin the export again")
        return self._piece(message.request, message.of, message.number, now)

    def _piece(self, request: int, of: int, number: int, now: float) -> Answer:
        export = self.exports.find(of, now)
        piece, frames = export.cut.piece(number, of)
        return State(request, self._shard, self._boot, export.version, piece), frames
