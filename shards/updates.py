"""Turns pushes into versions: a run in one pass, or a round as its mean.

Pushes are applied in runs: one push, or several that arrived together and may share a pass over the
weights; each still gets its own version, acknowledgement and record. For synchronous training,
pushes are collected until every active worker has sent one, and their mean is applied as one
version. Until then a push of a round is not in the ledger.

Weights, ledger, counters and metrics change in the same transition, so no reader sees one without
the others. Whether a push is acceptable at all is decided earlier (shard.py, pushes.py).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.updates import mean
from shards import pushes
from shards.errors import BadInput
from shards.ledger import Ledger
from shards.messages import Push
from shards.metrics import Metrics
from shards.parameters import ParameterStore
from shards.pushes import Arrived
from shards.quiesce import QuiesceTracker
from shards.spec import Merge, ShardSpec


class Applied(NamedTuple):
    """A push that has become part of `version`; to be acknowledged."""

    push: Arrived
    version: int
    staleness: int


class Updates:
    """The updates of one shard; they change `held`, `ledger` and `journal`.

    `steps` and `samples` count what has been applied; `round` holds, by worker, the pushes that
    wait for those of other workers.
    """

    def __init__(
        self, spec: ShardSpec, held: ParameterStore, ledger: Ledger, journal: Metrics
    ) -> None:
        self.steps = 0
        self.samples = 0
        self.round: dict[str, Arrived] = {}
        self._spec = spec
        self._held = held
        self._ledger = ledger
        self._journal = journal
        self._sums = spec.merge is Merge.EACH and held.sums

    @property
    def rate(self) -> float:
        """The learning rate of the next update.

        The schedule's iteration is a step of the whole system: the steps applied so far, divided by
        the number of workers. With one worker it is Caffe's iteration; with more it does not depend
        on which workers are fast, started late or died.
        """
        return self._rate_at(self.steps)

    def joins(self, run: Sequence[Arrived], message: Push) -> bool:
        """Whether a push may be applied in one pass with `run`, which has at least one.

        A run of several has at most one push per worker, which must be its next, and one rate.
        """
        entry = self._ledger.entries.get(message.worker)
        if not self._sums or entry is None or message.seq != entry.seq + 1:
            return False
        steps = self.steps + sum(one.message.steps for one in run)
        same_rate = self._rate_at(steps) == self.rate
        return same_rate and all(one.message.worker != message.worker for one in run)

    def apply(self, run: Sequence[Arrived], now: float) -> list[Applied] | None:
        """Apply a run of pushes in one pass, or keep the only one for its round.

        If the guard refuses the only push, counts that and raises BadInput. If it refuses one of
        several, returns None and changes nothing; the caller then applies them one by one.
        """
        if self._sums:
            rate, before = self.rate, self._held.version
            squares = self._held.apply_together([one.gradient for one in run], rate)
            if squares is not None:
                return [
                    self._note(one, square**0.5, before + number, rate, now)
                    for number, (one, square) in enumerate(zip(run, squares, strict=True))
                ]
            if len(run) > 1:
                return None
        (arrived,) = run
        measured = self._measured(arrived)
        if self._spec.merge is Merge.ROUND:
            self.round[arrived.message.worker] = measured
            return []
        return self._apply([measured], arrived.gradient, now)

    def add_to_round(self, arrived: Arrived) -> None:
        """Keep a push for its round that another copy has judged and keeps too."""
        self.round[arrived.message.worker] = pushes.measured(arrived, self._spec.guard)

    def close_rounds(self, now: float, standstill: QuiesceTracker) -> list[Applied]:
        """Apply every complete round; a round is the pushes that lead to one clock.

        While the shard is quiesced, a round beyond the cut stays open even if it is complete.

        A worker that came back may have joined, at this shard or another, with a clock beyond a
        round. It owes that round nothing; its next push belongs to a later one.
        """
        out: list[Applied] = []
        while self.round:
            reached = min(one.message.clock for one in self.round.values())
            ledger = self._ledger
            active = ((name, ledger.entries[name]) for name in ledger.active)
            late = [name for name, entry in active if entry.clock < reached]
            if not all(worker in self.round for worker in late):
                break
            # Sort by name: float addition is not associative, and the order of arrival is random.
            names = sorted(self.round)
            names = [name for name in names if self.round[name].message.clock == reached]
            if not all(standstill.allows(n, self.round[n].message.seq, now) for n in names):
                break
            arrived = [self.round.pop(name) for name in names]
            out += self._apply(arrived, mean([one.gradient for one in arrived]), now)
        return out

    def _rate_at(self, steps: int) -> float:
        try:
            return self._spec.schedule.rate(steps // self._spec.workers)
        except OverflowError:  # a growing policy; Caffe's reaches infinity too
            return float("inf")

    def _measured(self, arrived: Arrived) -> Arrived:
        """The push with its norm; if the guard refuses it, counts that and raises BadInput."""
        try:
            return pushes.measured(arrived, self._spec.guard)
        except BadInput:
            self._ledger.entries[arrived.message.worker].refused += 1
            raise

    def _apply(
        self,
        arrived: Sequence[Arrived],
        gradient: NDArray[np.float32],
        now: float,
    ) -> list[Applied]:
        """Make the next version from `gradient`, which combines the pushes `arrived`."""
        rate, before = self.rate, self._held.version
        self._held.apply(gradient, rate)
        return [self._note(one, one.norm, before, rate, now) for one in arrived]

    def _note(self, one: Arrived, norm: float, before: int, rate: float, now: float) -> Applied:
        """Record a push that was applied to version `before` and made version `before + 1`."""
        message = one.message
        clock_gap = self._ledger.record(
            message.worker,
            message.seq,
            message.clock,
            message.step,
            message.loss,
            message.acknowledged,
        )
        self.steps += message.steps
        self.samples += message.samples
        applied = Applied(one, before + 1, before - message.read_version)
        self._journal.applied(
            message,
            version=applied.version,
            staleness=applied.staleness,
            clock_gap=clock_gap,
            rate=rate,
            norm=norm,
            payload_bytes=one.payload_bytes,
            now=now,
        )
        return applied
