"""The step machine of a model in fragments (worker/strategies/fragments.py).

Each dense table is a fragment, which is pushed and requested at its own time; the worker takes the
answer when it has come, and waits for it only right before the fragment's next exchange. Between
the two the shards may merge the reports of others. So the worker's weights are always its own: an
answer is mixed into them, and copied to be the anchor of the next report.
"""

from collections.abc import Callable
from math import nan

import numpy as np

from shards.tables import DenseTable, Layout
from worker.strategies import Local
from worker.strategies.base import Floats, Fragment
from worker.strategies.fragments import Fragments, fragment_after
from worker.training.step_machine import (
    BatchesRead,
    ComputeGradient,
    FragmentTaken,
    GradientComputed,
    Plan,
    PullWeights,
    PushReport,
    ReadBatches,
    StepMachine,
    TakeFragment,
    Wants,
    WeightsPulled,
)


def build_machine(
    plan: Plan,
    tables: DenseTable | Layout,
    *,
    worker: str = "",
    clock: int = 0,
    step: int = 0,
    bound: int | None = None,
    ahead: int = 1,
    on_device: bool = False,
    pulls_at_once: bool = False,
    local: Local | None = None,
    optimizer: Callable[[], Floats] | None = None,
) -> StepMachine:
    """The machine of a worker of this plan; the arguments are those of a StepMachine."""
    kind = FragmentMachine if plan.strategy.fragmented else StepMachine
    return kind(
        plan,
        tables,
        worker=worker,
        clock=clock,
        step=step,
        bound=bound,
        ahead=ahead,
        on_device=on_device,
        pulls_at_once=pulls_at_once,
        local=local,
        optimizer=optimizer,
    )


class FragmentMachine(StepMachine):
    """One worker's loop with a strategy that exchanges each dense table by itself.

    Reports count if they come with those of other workers. After a late one the worker exchanges
    everything earlier by as many steps as it was late: otherwise a worker that began a moment after
    another would be late at each exchange.
    """

    # Steps by which the exchanges come earlier. They are not saved: the time for which a worker was
    # dead has moved its exchanges against those of others, by an unknown part of a period.
    _ahead_by = 0
    _moved_at = 0  # the step at which they were last moved

    def run_in_turn(self) -> Wants:
        plan, strategy = self.plan, self.strategy
        assert isinstance(strategy, Fragments)
        names = self.layout.names
        # A slow worker's period may be shorter than its table count, but one is due at a time.
        period = max(strategy.h, len(names))
        first = self.step + (self.local.steps if self.local is not None else 0)
        for step in range(first, plan.steps):
            rows = yield ReadBatches(plan.iter_size)
            assert isinstance(rows, BatchesRead)
            self.data_s += rows.seconds
            if not rows.rows:
                break
            due = fragment_after(step + self._ahead_by, period, len(names))
            yield from self._receive(due, step, period)
            assert self.local is not None
            computed = yield ComputeGradient(self.local.weights, step)
            if computed is None:
                break
            assert isinstance(computed, GradientComputed)
            samples = rows.rows if computed.rows is None else computed.rows
            self.take(computed, samples, step)
            del computed  # kept until the next step, its array could not be recycled before that
            for fragment in self.local.fragments:
                fragment.window += 1
                fragment.tokens += samples
                fragment.waited += 1
            if due is not None:
                yield from self._report(due, requests=True)
        yield from self._report_rest()

    def _receive(self, due: int | None, step: int, period: int) -> Wants:
        """Take the fragments that have come, and wait for the one that is exchanged after the step.

        At first they all come with one pull.
        """
        if self.local is None or not self.local.fragments:
            pulled = yield PullWeights(self.clock)
            assert isinstance(pulled, WeightsPulled)
            self._begin(pulled)
            return
        strategy = self.strategy
        assert isinstance(strategy, Fragments)
        for number, fragment in enumerate(self.local.fragments):
            if fragment.requested is None or (fragment.waited < strategy.overlap and number != due):
                continue
            name, waits = self.layout.names[number], number == due or not strategy.overlap
            taken = yield TakeFragment(name, fragment.requested, waits)
            if taken is not None:
                assert isinstance(taken, FragmentTaken)
                self._mix(number, taken, strategy.alpha)
                # The reports under way when the exchanges move are as late as this one.
                if taken.late and step >= self._moved_at:
                    self._ahead_by += min(taken.late, period - 1)
                    self._moved_at = step + period

    def _begin(self, pulled: WeightsPulled) -> None:
        """Start from these weights, with what was kept of an earlier state."""
        weights = pulled.weights.copy()
        if self.local is None:
            self.local = Local(weights, pulled.weights.copy(), pulled.versions)
        else:
            self.local.weights, self.local.pulled = weights, pulled.weights.copy()
        self.local.fetched = pulled.versions
        self.local.fragments = [Fragment(pulled.versions) for _ in self.layout.names]
        self.prepare(self.local)

    def _mix(self, number: int, taken: FragmentTaken, alpha: float) -> None:
        """Move the worker's weights towards a fragment that has come, its next anchor."""
        local = self.local
        assert local is not None
        where, new = self._where(number), taken.weights
        local.pulled[where] = new
        weights = local.weights[where]
        if alpha:
            np.multiply(weights, np.float32(alpha), out=weights)
            weights += np.float32(1 - alpha) * new
        else:
            weights[:] = new  # 0 times a weight that has overflowed would be NaN
        local.fragments[number] = Fragment(taken.versions)

    def _report(self, number: int, *, requests: bool) -> Wants:
        """Push how far a fragment went, and request it."""
        local = self.local
        assert local is not None
        fragment, where = local.fragments[number], self._where(number)
        clock = self.clock + 1 if requests else None
        yield PushReport(
            {self.layout.names[number]: local.pulled[where] - local.weights[where]},
            fragment.versions,
            local.steps,
            local.samples,
            self._mean_loss(),
            # A loop that counts no samples counts its steps.
            fragment.tokens or fragment.window,
            fragment.window,
            clock,
        )
        fragment.requested, fragment.waited = clock, 0
        self._settle()

    def _report_rest(self) -> Wants:
        """At the end, push every fragment that was trained since its last report.

        What was trained while a report was under way would be mixed with its answer, for which
        nobody waits any more: these steps are only counted.
        """
        local = self.local
        if local is None:
            return
        for number, fragment in enumerate(local.fragments):
            if fragment.requested is None and fragment.window:
                yield from self._report(number, requests=False)
        if local.steps:
            versions = local.fragments[0].versions
            yield PushReport({}, versions, local.steps, local.samples, self._mean_loss())
            self._settle()
        local.fragments = []  # a later life must not report these steps again

    def _mean_loss(self) -> float:
        """The mean loss of the steps that were not pushed; NaN, as none is known, without any."""
        assert self.local is not None
        return self.local.loss / self.local.steps if self.local.steps else nan

    def _settle(self) -> None:
        assert self.local is not None
        self.count(self.local.steps, 1, self.local.samples)
        self.local.settle()

    def _where(self, number: int) -> slice:
        """The place of a fragment in the arena."""
        keys = self.layout.section(self.layout.names[number])
        return slice(keys.start, keys.stop)
