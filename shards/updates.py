"""Turns pushes into versions: a run in one pass, a round as its mean, or a buffer of several.

Pushes are applied in runs: one push, or several that arrived together and may share a pass over the
weights; each still gets its own version, acknowledgement and record. For synchronous training,
pushes are collected until every active worker has sent one, and their mean is applied as one
version. Until then a push of a round is not in the ledger. A round with backup workers is applied
without the slowest; what they send later is dropped. So is a push above a `StaleLimit` that drops.
It counts in the ledger, because its worker has taken those steps, and is acknowledged as dropped.
Where the parts of a push differ in staleness, one shard may drop its part alone. A buffer, in
contrast, is part of the state (parameters.py): a push in it is in the ledger at once, though not
yet in a version. So are the reports to a quorum (reports.py).

A push counts with a factor on its rate, by its staleness and the strategy (aggregation.py).

Weights, ledger, counters and metrics change in the same transition, so no reader sees one without
the others. Whether a push is acceptable at all is decided earlier (shard.py, push_checks.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf, isfinite
from operator import attrgetter

import msgspec
from msgspec import structs

from shards.aggregation import CONSTANT, EACH, WEIGHINGS, Buffer, Quorum, Round
from shards.errors import BadInput, Full
from shards.ledger import Ledger
from shards.messages import Push
from shards.metrics import Metrics
from shards.parameters import ParameterStore
from shards.push_checks import Arrived
from shards.quiesce import QuiesceTracker
from shards.reports import Reports, ReportTracker, weigh
from shards.schedules import Fixed
from shards.spec import ShardSpec

_GRADIENTS = attrgetter("gradients")  # until Python 3.12 a comprehension is a call


class Applied(msgspec.Struct, frozen=True, gc=False):
    """A push that is part of `version`, or was dropped; to be acknowledged."""

    push: Arrived
    version: int
    staleness: int
    scale: float
    dropped: bool
    late_s: float = 0.0


class Updates:
    """The updates of one shard; they change `parameters`, `ledger` and `metrics`.

    `steps` and `samples` count what workers have pushed, that of dropped pushes as well: without
    them the schedule would fall behind the workers. `round` holds, by worker, the pushes that wait
    for those of other workers.
    """

    def __init__(
        self, spec: ShardSpec, parameters: ParameterStore, ledger: Ledger, metrics: Metrics
    ) -> None:
        self.steps = 0
        self.samples = 0
        self.round: dict[str, Arrived] = {}
        merge = spec.merge
        self.merges_reports = isinstance(merge, Quorum)
        self.reports = (
            ReportTracker(merge, (name for name, part in parameters.parts.items() if part.dense))
            if isinstance(merge, Quorum)
            else ReportTracker(Quorum(), ())
        )
        self._spec = spec
        self._parameters = parameters
        self._ledger = ledger
        self._metrics = metrics
        self.set_rate_factor(spec.rate_factor)
        self._weigh = WEIGHINGS[spec.weigh]
        self._constant = spec.weigh == CONSTANT and spec.stale is None
        self._runs = spec.merge == EACH and self._constant and parameters.runs

    def set_rate_factor(self, factor: float) -> None:
        """Multiply the rates of the schedules by `factor`, unless the workers have done that."""
        self._rate_factor = 1.0 if self._spec.deltas else factor
        # Rates that never change are computed once: they are needed at every push.
        self._fixed_rates: dict[str, float] | None = None
        if all(isinstance(table.schedule, Fixed) for table in self._spec.tables):
            self._fixed_rates = self._rates_at(0)

    @property
    def rate(self) -> float:
        """The learning rate of the job's first table at the next update."""
        try:
            scheduled = self._spec.tables[0].schedule.rate(self.steps // self._spec.workers)
            return scheduled * self._rate_factor
        except OverflowError:
            return inf

    @property
    def _backups(self) -> int:
        return self._spec.merge.backups if isinstance(self._spec.merge, Round) else 0

    def joins(self, run: Sequence[Arrived], message: Push) -> bool:
        """Return whether a push may be applied in one pass with `run`, which has at least one.

        A run of several has at most one push per worker, which must be its next, and one rate.
        """
        entry = self._ledger.entries.get(message.worker)
        if not self._runs or entry is None or message.seq != entry.seq + 1:
            return False
        steps = self.steps + sum(arrived.message.steps for arrived in run)
        # The ledger learns of the first push only when the run is applied, so it could not judge a
        # second one of the same worker.
        if any(arrived.message.worker == message.worker for arrived in run):
            return False
        # One pass has one rate, but a schedule may change it between two pushes.
        return self._rates_at(steps) == self._rates_at(self.steps)

    def apply(self, run: Sequence[Arrived], now: float) -> list[Applied] | None:
        """Apply a run of pushes in one pass, or keep the only one for its round.

        If the guard refuses the only push, counts that and raises BadInput. If it refuses one of
        several, returns None and changes nothing; the caller then applies them one by one. The same
        if a sparse table has no room for their rows, which raises Full.
        """
        if self._spec.stale is not None and self._spec.stale.drops(self._staleness(run[0].message)):
            return [self._drop(self._examine(run[0]), now)]
        if self._parameters.grows and not self._has_room(run):
            return None
        if self._spec.merge == EACH:
            first = run[0].message
            scale = self._spec.scale if self._constant else self._scale(first)
            before = self._parameters.version
            # Taken before the first push is recorded: its steps may move the schedule.
            rates, read = self._fixed_rates or self._rates_at(self.steps), first.read_version
            gradients = list(map(_GRADIENTS, run))
            squares = self._parameters.apply(gradients, rates, scale=scale, read_version=read)
            if squares is not None:
                applied: list[Applied] = []
                for version, (arrived, square) in enumerate(zip(run, squares, strict=True), before):
                    norm = square**0.5
                    applied.append(
                        self._record_push(arrived, norm, version, rates, scale, now, len(run))
                    )
                return applied
            # One of them was refused and nothing has changed: the caller applies them one by one.
            if len(run) > 1:
                return None
        (arrived,) = run
        measured = self._examine(arrived)
        match self._spec.merge:
            case Round():
                return self._collect_round(measured, now)
            case Buffer(size=size):
                return [self._collect(measured, size, now)]
            case Quorum():
                return [self._collect_report(measured, now)]
        # The two ways to sum a norm differ in its last bits, and this one is at the limit.
        self._parameters.apply(gradients, rates, scale=scale, read_version=read, guarded=False)
        return [self._record_push(measured, measured.norm, before, rates, scale, now)]

    def _has_room(self, run: Sequence[Arrived]) -> bool:
        """Return whether sparse tables have room for a run; raises Full if not for a single push.

        The pushes of an open round are applied as well, and none of them can be refused any more.
        """
        pushes = [arrived.gradients for arrived in (*self.round.values(), *run)]
        try:
            self._parameters.check_room(pushes)
        except Full:
            if len(run) > 1:
                return False
            raise
        return True

    def add_to_round(self, arrived: Arrived) -> None:
        """Keep a push for its round that another copy has judged and keeps too."""
        self.round[arrived.message.worker] = self._measure(arrived)

    def close_rounds(self, now: float, quiesce: QuiesceTracker) -> list[Applied]:
        """Apply every complete round; a round is the pushes that lead to one clock.

        While the shard is quiesced, a round beyond the cut stays open even if it is complete.

        A worker that came back may have joined, at this shard or another, with a clock beyond a
        round. It owes that round nothing; its next push belongs to a later one.
        """
        out: list[Applied] = []
        while names := self._complete():
            # All or none: without one of them, this shard's mean would differ from the others'.
            if not all(quiesce.allows(n, self.round[n].message.seq, now) for n in names):
                break
            pushes = [self.round.pop(name) for name in names]
            rates, before = self._rates_at(self.steps), self._parameters.version
            scale = self._spec.scale
            means = self._parameters.mean([arrived.gradients for arrived in pushes])
            reached = max(self._round_clock(arrived.message) for arrived in pushes)
            # Each push was measured when it was collected, and counts as accepted since.
            self._parameters.apply([means], rates, scale=scale, guarded=False)
            out += [
                self._record_push(arrived, arrived.norm, before, rates, scale, now)
                for arrived in pushes
            ]
            if self._backups:
                # The slowest must not hold the others back, so they skip the round as well.
                for worker in self._ledger.active:
                    self._ledger.advance(worker, reached)
        return out

    def restore_reports(self, saved: Mapping[str, Reports]) -> None:
        """Take over the open reports of a state."""
        for table in self.reports.by_table:
            self.reports.by_table[table] = saved.get(table, Reports()).copy()
        self.reports.forget_times()

    def merge_reports(self, tables: Iterable[str]) -> None:
        """Merge the open reports on each of these tables, as a version of its own."""
        for table in tables:
            rates, version = self._rates_at(self.steps), self._parameters.version + 1
            reports = self.reports.close(table, version)
            if not reports.workers:
                continue
            merged = self._parameters.take_reports(table, reports)
            # Each report was measured as it came.
            self._parameters.apply([merged], rates, scale=self._spec.scale, guarded=False)

    def flush(self) -> None:
        """Apply what the buffer holds if no worker is left that could fill it."""
        if self.has_orphaned_buffer:
            self.apply_buffer()

    def apply_buffer(self) -> None:
        """Apply what the buffer holds, however many pushes that are."""
        if isinstance(self._spec.merge, Buffer) and self._parameters.buffered:
            self._parameters.apply_buffer(self._spec.merge.size, self._rates_at(self.steps))
        self.merge_reports(self.reports.tables)

    @property
    def has_orphaned_buffer(self) -> bool:
        """True if the buffer holds pushes, and no worker is left that could fill it."""
        return bool(self._parameters.buffered) and not self._ledger.active

    def _collect_round(self, arrived: Arrived, now: float) -> list[Applied]:
        """Keep a push for its round, or drop it if that round was applied without it."""
        message = arrived.message
        # A push from weights before the last version belongs to a round that is closed by now.
        late = message.read_version < self._parameters.version and message.worker not in self.round
        if self._backups and late:
            return [self._drop(arrived, now)]
        self.round[message.worker] = arrived
        return []

    def _complete(self) -> list[str]:
        """The workers with pushes that make a complete round, by name; none if the round is open.

        They are sorted: float addition is not associative, and the order of arrival is random.
        """
        if not self.round:
            return []
        entries, names = self._ledger.entries, sorted(self.round)
        if self._backups:
            # A worker that has skipped rounds is behind by its own clock, not by the ledger's.
            reached = max(self._round_clock(arrived.message) for arrived in self.round.values())
            behind = [n for n in self._ledger.active if entries[n].clock < reached]
            missing = [name for name in behind if name not in self.round]
            return names if len(missing) <= self._backups else []
        reached = min(arrived.message.clock for arrived in self.round.values())
        behind = [n for n in self._ledger.active if entries[n].clock < reached]
        if not all(worker in self.round for worker in behind):
            return []
        return [name for name in names if self.round[name].message.clock == reached]

    def _round_clock(self, message: Push) -> int:
        """The clock of a push in the order of rounds, in which its worker may have skipped some."""
        return max(message.clock, self._ledger.entries[message.worker].clock + 1)

    def _scale(self, message: Push) -> float:
        """The factor on the rate of a push that is applied now."""
        staleness = self._staleness(message)
        stale = 1.0 if self._spec.stale is None else self._spec.stale.factor(staleness)
        return self._spec.scale * self._weigh(staleness) * stale

    def _staleness(self, message: Push) -> int:
        """The updates since the version that a push was computed from."""
        return self._parameters.version - message.read_version

    def _collect(self, arrived: Arrived, size: int, now: float) -> Applied:
        """Add a push to the buffer, and apply the buffer if it is full."""
        scale, before = self._scale(arrived.message), self._parameters.version
        rates = self._rates_at(self.steps)
        # The push is in the ledger from now on, although in no version yet: the buffer belongs to
        # the saved state, so both survive or neither.
        self._parameters.collect(arrived.gradients, scale)
        if self._parameters.buffered >= size:
            self.apply_buffer()
        return self._record_push(arrived, arrived.norm, before, rates, scale, now)

    def _collect_report(self, arrived: Arrived, now: float) -> Applied:
        """Add a report to those that wait for their merge, or drop it if it is late.

        Its version is the first that it can be in: other fragments may be merged before it, and
        make versions that do not concern it.
        """
        message, rates = arrived.message, self._rates_at(self.steps)
        if not message.parts:  # its table is at other shards: here it only counts
            before = self._parameters.version - 1
            return self._record_push(arrived, arrived.norm, before, rates, 0.0, now)
        ((table, report),) = arrived.gradients.items()
        before = self.reports.by_table[table].changed
        if self.reports.is_late(message):
            self.reports.sit_out(message)
            applied = self._record_push(
                arrived, arrived.norm, before, rates, 0.0, now, dropped=True
            )
            return structs.replace(applied, late_s=self.reports.measure_delay(message, now))
        self.reports.record(message, now)
        norms = self.reports.by_table[table].norms
        self._parameters.collect_report(table, report, weigh(message), norms)
        return self._record_push(arrived, arrived.norm, before, rates, self._spec.scale, now)

    def _drop(self, arrived: Arrived, now: float) -> Applied:
        """Record a push that came too late: its steps are taken, and lost."""
        before, rates = self._parameters.version, self._rates_at(self.steps)
        return self._record_push(arrived, arrived.norm, before, rates, 0.0, now, dropped=True)

    def _rates_at(self, steps: int) -> dict[str, float]:
        """The learning rate of each table after this number of steps.

        A schedule's iteration is a step of the whole system: the steps applied so far, divided by
        the number of workers. With one worker it is Caffe's iteration; with more it does not depend
        on which workers are fast, started late or died.
        """
        iteration = steps // self._spec.workers
        rates = {}
        for name, part in self._parameters.parts.items():
            try:
                rates[name] = part.spec.schedule.rate(iteration) * self._rate_factor
            except OverflowError:  # a growing policy; Caffe's reaches infinity too
                rates[name] = inf
        return rates

    def _examine(self, arrived: Arrived) -> Arrived:
        """The push with its norm; counts it and raises BadInput if the guard refuses it."""
        try:
            return self._measure(arrived)
        except BadInput:
            # Counted before the error leaves: the refusal is a change, which is logged and
            # replicated.
            self._ledger.entries[arrived.message.worker].refused += 1
            raise

    def _measure(self, arrived: Arrived) -> Arrived:
        """The push with its norm; raises BadInput if the guard refuses it."""
        message = arrived.message
        try:
            squares = self._parameters.measure(arrived.gradients)
        except BadInput as error:
            # With a finite loss, NaN in a gradient is rather the fault of the data or the code.
            hint = "" if isfinite(message.loss) else "; is the rate too high?"
            raise BadInput(
                f"push {message.seq} of worker {message.worker}: {error}"
                f" (loss {message.loss:g}){hint}"
            ) from None
        return structs.replace(arrived, norm=squares**0.5)

    def _record_push(
        self,
        arrived: Arrived,
        norm: float,
        before: int,
        rates: dict[str, float],
        scale: float,
        now: float,
        pass_pushes: int = 1,
        *,
        dropped: bool = False,
    ) -> Applied:
        """Record a push that was applied to version `before`, with `scale` times `rates`.

        A dropped one made no version. `pass_pushes` counts the pushes that were applied in one
        pass over the weights and have a version each.
        """
        message = arrived.message
        clock_gap = self._ledger.record(
            message.worker,
            message.seq,
            message.clock,
            message.step,
            message.loss,
            message.acknowledged,
            dropped=dropped,
        )
        self.steps += message.steps
        self.samples += message.samples
        staleness = max(0, before - message.read_version)
        version = before if dropped else before + 1
        self._metrics.record_push(
            message,
            version=version,
            staleness=staleness,
            clock_gap=clock_gap,
            rate=rates[message.parts[0].table] if message.parts else 0.0,
            scale=scale,
            dropped=dropped,
            norm=norm,
            payload_bytes=arrived.payload_bytes,
            pass_pushes=pass_pushes,
            now=now,
        )
        return Applied(arrived, version, staleness, scale, dropped)
