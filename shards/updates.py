"""Turns pushes into versions: one by one, several in one pass, or a round as its mean.

Pushes are applied as they arrive. Those that arrive together may be applied in one pass; each still
gets its own version, acknowledgement and record. For synchronous training, pushes are collected
until every active worker has sent one, and their mean is applied as one version. Until then a push
of a round is not in the ledger.

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
    """The updates of one shard; they change `held`, the ledger passed in, and `journal`.

    `steps` and `samples` count what has been applied; `round` holds, by worker, the pushes that
    wait for those of other workers.
    """

    def __init__(self, spec: ShardSpec, held: ParameterStore, journal: Metrics) -> None:
        self.steps = 0
        self.samples = 0
        self.round: dict[str, Arrived] = {}
        self._spec = spec
        self._held = held
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

    def joins(self, run: Sequence[Arrived], message: Push, ledger: Ledger) -> bool:
        """Whether a push may be applied in one pass with `run`.

        A run has at most one push per worker, which must be its next, and one learning rate.
        """
        entry = ledger.entries.get(message.worker)
        if not self._sums or entry is None or message.seq != entry.seq + 1:
            return False
        if entry.refused and self._spec.guard.quarantines(entry.refused):
            return False
        if not run:
            return True
        steps = self.steps + sum(one.message.steps for one in run)
        same_rate = self._rate_at(steps) == self.rate
        return same_rate and all(one.message.worker != message.worker for one in run)

    def apply_push(self, arrived: Arrived, ledger: Ledger, now: float) -> list[Applied]:
        """Apply a push, or keep it for its round; raises GiveUp or BadInput if the guard does."""
        worker = arrived.message.worker
        if refused := ledger.entries[worker].refused:
            self._spec.guard.check(worker, refused)
        if self._sums:
            applied = self.apply_run([arrived], ledger, now)
            if applied is not None:
                return applied
        measured = self._measured(arrived, ledger)
        if self._spec.merge is Merge.ROUND:
            self.round[worker] = measured
            return []
        return self._apply([measured], arrived.gradient, ledger, now)

    def add_to_round(self, arrived: Arrived) -> None:
        """Keep a push for its round that another copy has judged and keeps too."""
        self.round[arrived.message.worker] = pushes.measured(arrived, self._spec.guard)

    def apply_run(self, run: Sequence[Arrived], ledger: Ledger, now: float) -> list[Applied] | None:
        """Apply a run of one or more pushes in one pass.

        Returns None, and changes nothing, if the guard refuses one of them.
        """
        rate, before = self._rate_at(self.steps), self._held.version
        squares = self._held.apply_together([one.gradient for one in run], rate)
        if squares is None:
            return None
        return [
            self._note(one, square**0.5, before + number, rate, ledger, now)
            for number, (one, square) in enumerate(zip(run, squares, strict=True))
        ]

    def close_rounds(self, ledger: Ledger, now: float, standstill: QuiesceTracker) -> list[Applied]:
        """Apply every complete round; a round is the pushes that lead to one clock.

        While the shard is quiesced, a round beyond the cut stays open even if it is complete.

        A worker that came back may have joined, at this shard or another, with a clock beyond a
        round. It owes that round nothing; its next push belongs to a later one.
        """
        out: list[Applied] = []
        while self.round:
            reached = min(one.message.clock for one in self.round.values())
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
            out += self._apply(arrived, mean([one.gradient for one in arrived]), ledger, now)
        return out

    def _rate_at(self, steps: int) -> float:
        try:
            return self._spec.schedule.rate(steps // self._spec.workers)
        except OverflowError:  # a growing policy; Caffe's reaches infinity too
            return float("inf")

    def _measured(self, arrived: Arrived, ledger: Ledger) -> Arrived:
        """The push with its norm; if the guard refuses it, counts that and raises BadInput."""
        try:
            return pushes.measured(arrived, self._spec.guard)
        except BadInput:
            ledger.entries[arrived.message.worker].refused += 1
            raise

    def _apply(
        self,
        arrived: Sequence[Arrived],
        gradient: NDArray[np.float32],
        ledger: Ledger,
        now: float,
    ) -> list[Applied]:
        """Make the next version from `gradient`, which combines the pushes `arrived`."""
        rate, before = self.rate, self._held.version
        self._held.apply(gradient, rate)
        return [self._note(one, one.norm, before, rate, ledger, now) for one in arrived]

    def _note(
        self, one: Arrived, norm: float, before: int, rate: float, ledger: Ledger, now: float
    ) -> Applied:
        """Record a push that was applied to version `before` and made version `before + 1`."""
        message = one.message
        ledger.record(
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
            clock_gap=ledger.clock_gap,
            rate=rate,
            norm=norm,
            payload_bytes=one.payload_bytes,
            now=now,
        )
        return applied
