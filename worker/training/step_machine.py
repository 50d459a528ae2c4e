"""One worker's training loop as a pure state machine: what it wants next, given the answers so far.

The machine follows a plan: read batches, pull weights, compute a gradient, push, until the plan is
done or the data ends. It opens nothing, waits for nothing and reads no clock. It is a generator: it
yields a want, and the driver sends back the answer, with the seconds that it took. A thin
driver carries the wants out with a client, a model and batches (training_loop.py); a simulator can
do the same on a virtual clock, with the same strategies.

    want                             answer
    ReadBatches(batches)             BatchesRead: the number of rows; 0 at the end of the data
    PullWeights(clock, prefetch)     WeightsPulled: weights and their versions
    PrefetchWeights(clock)           none; their answer travels meanwhile
    PushReport(reports, ...)         none; with it the tables are requested
    TakeFragment(table, clock, wait) FragmentTaken: a table that was requested; none if under way
    ComputeGradient(weights, step)   GradientComputed: over the batches read last, and the loss;
                                     none where the data turns out to have ended
    BeginStep(weights, step)         StepBegun, on a device: the array that the gradient will be in
    FinishStep()                     StepFinished: the oldest step begun is done
    PushContribution(...)            none; a push does not wait
    FlushPushes()                    none; every push is acknowledged

A strategy decides when to pull and push and what happens in between (strategies/base.py). The
machine keeps the counts: steps and clock, samples and losses not pushed yet, and how far ahead to
request weights.

With a model on a device and a plan that prefetches, the machine runs ahead: a step begins before
the previous one is pushed. With prefetching its weights are requested before that push in any case,
so running ahead makes no weights staler, and the device computes while gradients and weights
travel.
"""

from collections.abc import Callable, Generator, Mapping
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import structs

from shards import argument_checks
from shards.live_settings import check_factor
from shards.rules import Decay, decay_of
from shards.schedules import Schedule, schedule_of
from shards.tables import DenseTable, KeyRange, Layout, segments
from worker.strategies import Local, Strategy, strategy_of
from worker.strategies.base import Floats

SEEDS = -(2**63), 2**63 - 1  # the range of an int64 column of records


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The training plan of one worker, the same for all workers of a job.

    A worker takes `steps` steps, counted over all its incarnations. Each step sums the gradients of
    `iter_size` batches, clips the sum to the global L2 norm `clip` (0: never) and divides it by
    `iter_size`, in Caffe's order. `schedule` gives the learning rate of the steps that a worker
    takes on its own weights, times `rate_factor`; `decay` is their weight decay, where the shards
    apply none. `workers` is the number of workers that train together.
    """

    steps: int
    seed: int
    strategy: Strategy
    schedule: Schedule
    iter_size: int = 1
    clip: float = 0.0
    prefetch: bool = False
    decay: Decay = Decay()
    workers: int = 1
    rate_factor: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (
            ("steps", argument_checks.whole("steps", self.steps, 0)),
            ("seed", argument_checks.whole("seed", self.seed, *SEEDS)),
            ("strategy", strategy_of("strategy", self.strategy)),
            ("schedule", schedule_of("schedule", self.schedule)),
            ("iter_size", argument_checks.whole("iter_size", self.iter_size, 1)),
            ("clip", argument_checks.number("clip", self.clip, least=0, expected="0 or more")),
            ("prefetch", argument_checks.flag("prefetch", self.prefetch)),
            ("decay", decay_of("decay", self.decay)),
            ("workers", argument_checks.whole("workers", self.workers, 1)),
            ("rate_factor", check_factor("rate_factor", self.rate_factor)),
        ):
            structs.force_setattr(self, name, value)


# --- wants ----------------------------------------------------------------------------------------


class ReadBatches(NamedTuple):
    """Read the next batches, this many, which the next step sums over."""

    batches: int


class PullWeights(NamedTuple):
    """Pull the weights for a step at `clock`, then request those of the clocks in `prefetch`."""

    clock: int
    prefetch: tuple[int, ...] = ()


class ComputeGradient(NamedTuple):
    """Compute the gradient of plan step `step` at `weights`, over the batches read last."""

    weights: Floats
    step: int


class BeginStep(NamedTuple):
    """Begin what ComputeGradient does, on a device."""

    weights: Floats
    step: int


class FinishStep(NamedTuple):
    """Wait for the oldest step begun."""


class PushContribution(NamedTuple):
    """Push a contribution over `steps` steps, which raises the worker's clock by `ticks`.

    `versions`, one a shard, are those that it was computed from; `prefetch` is the clock of weights
    to request in the same message.
    """

    contribution: Floats
    versions: tuple[int, ...]
    steps: int
    ticks: int
    samples: int
    loss: float
    prefetch: int | None = None


class PrefetchWeights(NamedTuple):
    """Request the weights of a later clock."""

    clock: int


class PushReport(NamedTuple):
    """Push how far the weights of the tables in `reports` went, and request these for `clock`.

    The worker's clock rises by 1. `steps`, `samples` and `loss` are those since the last push of
    any table; over `window` steps since it was received the table has learnt from `tokens` samples.
    Without a `clock` nothing is requested. Reports on no table only count.
    """

    reports: Mapping[str, Floats]
    versions: tuple[int, ...]
    steps: int
    samples: int
    loss: float
    tokens: int = 0
    window: int = 0
    clock: int | None = None


class TakeFragment(NamedTuple):
    """Take the weights of a table that were requested for `clock`; with `wait`, wait for them."""

    table: str
    clock: int
    wait: bool


class FlushPushes(NamedTuple):
    """Wait until every push is acknowledged by every shard."""


Want = (
    ReadBatches
    | PullWeights
    | ComputeGradient
    | BeginStep
    | FinishStep
    | PushContribution
    | PrefetchWeights
    | PushReport
    | TakeFragment
    | FlushPushes
)


# --- answers --------------------------------------------------------------------------------------


class BatchesRead(NamedTuple):
    """The number of rows read; 0 at the end of the data."""

    rows: int
    seconds: float = 0.0


class WeightsPulled(NamedTuple):
    """Weights, which nobody writes to, and their versions; `ahead` is how early the link needs to
    be asked, in steps."""

    weights: Floats
    versions: tuple[int, ...]
    ahead: int = 1


class FragmentTaken(NamedTuple):
    """The weights of a table, which nobody writes to, and their versions.

    `late` are the steps by which a report of this worker was too late, since the last answer.
    """

    weights: Floats
    versions: tuple[int, ...]
    late: int = 0


class GradientComputed(NamedTuple):
    """A gradient in an array of its own, and the loss.

    `rows` is the number of rows, where it was not known yet when the batches were read.
    """

    gradient: Floats
    loss: float
    seconds: float = 0.0
    rows: int | None = None


class StepBegun(NamedTuple):
    """A step under way: `gradient` is its array."""

    gradient: Floats
    seconds: float = 0.0


class StepFinished(NamedTuple):
    """The oldest step begun is done."""

    loss: float
    seconds: float = 0.0


Answer = (
    BatchesRead | WeightsPulled | FragmentTaken | GradientComputed | StepBegun | StepFinished | None
)
Wants = Generator[Want, Answer, None]


class _Ahead(NamedTuple):
    """A step under way on a device."""

    gradient: Floats
    versions: tuple[int, ...]
    samples: int


class StepMachine:
    """One worker's loop from `step` on.

    `clock` and `step` are those of the worker's last push. `bound` is the staleness bound of the
    shards. With `pulls_at_once` the batches of a step need no reading, so a pull follows the push
    before it immediately, and is requested in one message with it. A machine may continue with the
    `local` state that another one left between two steps. An `optimizer` takes the steps on the
    worker's own weights in place of the strategy's rule. `pushed` counts the samples in pushes;
    `compute_s` and `data_s` add up the seconds in answers.
    """

    def __init__(
        self,
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
    ) -> None:
        self.plan = plan
        self.strategy = plan.strategy.for_worker(worker)
        self.clock, self.step = clock, step
        self.local = local
        self.pushed = 0
        self.compute_s = self.data_s = 0.0
        self._bound = bound
        self._optimizer = optimizer
        self._link_ahead = ahead
        self._pulls_at_once = pulls_at_once
        self.layout = tables if isinstance(tables, Layout) else Layout((tables,))
        self._segments = tuple(
            structs.replace(run, start=start + run.start, stop=start + run.stop)
            for table in self.layout.tables
            for start in (self.layout.section(table.name).start,)
            for run in segments(table, KeyRange(0, table.size))
        )
        self.buffers = [run.keys for run in self._segments if run.buffer]
        if local is not None:
            self.prepare(local)
        whole = plan.iter_size == 1 and not plan.clip
        self._runs_ahead = plan.prefetch and self.strategy.plain and whole and on_device

    def wants(self) -> Wants:
        """The wants, in order; each is answered by `send`."""
        yield from self._run_ahead() if self._runs_ahead else self.run_in_turn()
        yield FlushPushes()

    def drive(self, carry_out: Callable[[Want], Answer]) -> None:
        """Carry out every want with a function that returns its answer."""
        wants = self.wants()
        try:
            want = next(wants)
            while True:
                want = wants.send(carry_out(want))
        except StopIteration:
            return

    # --- step after step --------------------------------------------------------------------------

    def run_in_turn(self) -> Wants:
        """The wants of one step after another."""
        plan, strategy = self.plan, self.strategy
        local_steps = self.local.steps if self.local is not None else 0
        for step in range(self.step + local_steps, plan.steps):
            rows = yield ReadBatches(plan.iter_size)
            assert isinstance(rows, BatchesRead)
            self.data_s += rows.seconds
            if not rows.rows:
                break
            if self._needs_weights() or strategy.fetches(step):
                yield from self._pull(step)
            assert self.local is not None
            computed = yield ComputeGradient(self.local.weights, step)
            if computed is None:
                break
            assert isinstance(computed, GradientComputed)
            self.take(computed, rows.rows if computed.rows is None else computed.rows, step)
            del computed  # kept until the next step, its array could not be recycled before that
            if strategy.pushes(step):
                yield from self._push(self._further(step))
        if self.local is not None and self.local.steps:
            yield from self._push()

    def _pull(self, step: int) -> Wants:
        """Bring new weights for `step` into the local state."""
        local = self.local
        clock = self.clock
        if not self.strategy.windowed:
            clock += (local.steps if local is not None else 0) + self._more_steps(step)
        first = self.clock + (local.steps if local is not None else 0)
        later = min(self._ahead(), self.plan.steps - 1 - step) if self.plan.prefetch else 0
        pulled = yield PullWeights(clock, tuple(range(first + 1, first + later + 1)))
        assert isinstance(pulled, WeightsPulled)
        self._link_ahead = pulled.ahead
        if local is None:
            local = self.local = Local(pulled.weights, pulled.weights, pulled.versions)
            self.prepare(local)
        local.pulled, local.fetched = pulled.weights, pulled.versions
        self.strategy.on_pull(local, pulled.weights)

    def _needs_weights(self) -> bool:
        """Return whether weights to step from lack: at first, or restored between windows."""
        if self.local is None:
            return True
        if self.strategy.exchanges:
            return False
        # A window that the end of a plan cut short was pushed: the next begins with new weights.
        return not self.local.fetched or (self.strategy.windowed and not self.local.steps)

    def prepare(self, local: Local) -> None:
        """Give a local state what it needs of the table and the plan."""
        local.segments, local.decay = self._segments, self.plan.decay
        local.optimizer = self._optimizer

    def take(self, computed: GradientComputed, rows: int, step: int) -> None:
        """Let the strategy learn from a gradient."""
        local = self.local
        assert local is not None
        if not local.steps:
            local.versions = local.fetched
        local.gradient = computed.gradient
        local.count += 1
        rate = self.plan.schedule.rate(step) * self.plan.rate_factor
        self.strategy.local_step(local, computed.gradient, rate)
        local.steps += 1
        local.samples += rows
        local.loss += computed.loss
        self.compute_s += computed.seconds

    def _push(self, further: int | None = None) -> Wants:
        local = self.local
        assert local is not None
        if self.strategy.exchanges:
            yield from self._pull(self.step + local.steps)
            local.versions = local.fetched
        steps = local.steps
        ticks = 1 if self.strategy.windowed else steps
        contribution = self.strategy.contribution(local)
        if self.buffers:
            self._share_buffers(local, contribution)
        mean_loss = local.loss / steps
        yield PushContribution(
            contribution, local.versions, steps, ticks, local.samples, mean_loss, further
        )
        self.count(steps, ticks, local.samples)
        local.settle()

    def _share_buffers(self, local: Local, contribution: Floats) -> None:
        """Push of the changes to buffers what the strategy's share is."""
        share = np.float32(self.strategy.buffer_share(self.plan.workers))
        for buffer in self.buffers:
            if self.strategy.windowed and not self.strategy.exchanges:
                contribution[buffer] = local.pulled[buffer] - local.weights[buffer]
            contribution[buffer] *= share

    def count(self, steps: int, ticks: int, samples: int) -> None:
        """Count a push."""
        self.step += steps
        self.clock += ticks
        self.pushed += samples

    # --- prefetching ------------------------------------------------------------------------------

    def _ahead(self) -> int:
        """The steps by which to request weights early: what the link needs, within the bound."""
        if self._bound is None:
            return self._link_ahead
        return min(self._link_ahead, self._bound - self.strategy.least_bound())

    def _further(self, step: int) -> int | None:
        """The clock of the weights to request in one message with the push after `step`.

        It is the furthest clock that the next fetch would request, and that fetch follows at once.
        """
        assert self.local is not None
        if not self.plan.prefetch:
            return self._next_fetch(step + 1) if self._pulls_at_once else None
        further = min(self._ahead(), self.plan.steps - 2 - step)
        return self.clock + self.local.steps + further if further > 0 else None

    def _next_fetch(self, step: int) -> int | None:
        """The clock at which `step` will fetch, after the push before it; None if it does not."""
        if step >= self.plan.steps or self.strategy.exchanges or not self.strategy.fetches(step):
            return None
        assert self.local is not None
        if self.strategy.windowed:
            return self.clock + 1
        return self.clock + self.local.steps + self._more_steps(step)

    def _more_steps(self, step: int) -> int:
        """The number of steps after `step` that use the weights that are fetched for it."""
        for later in range(step + 1, self.plan.steps):
            if self.strategy.fetches(later):
                return later - step - 1
        return self.plan.steps - step - 1

    # --- ahead of the pushes ----------------------------------------------------------------------

    def _run_ahead(self) -> Wants:
        under_way: _Ahead | None = None
        for step in range(self.step, self.plan.steps):
            rows = yield ReadBatches(1)
            assert isinstance(rows, BatchesRead)
            self.data_s += rows.seconds
            if not rows.rows:
                break
            unpushed = 1 if under_way is not None else 0
            pulled = yield PullWeights(self.clock + unpushed)
            assert isinstance(pulled, WeightsPulled)
            begun = yield BeginStep(pulled.weights, step)
            assert isinstance(begun, StepBegun)
            self.compute_s += begun.seconds
            further = self.clock + unpushed + 1 if step + 1 < self.plan.steps else None
            if under_way is not None:
                yield from self._finish(under_way, further)
            elif further is not None:
                yield PrefetchWeights(further)
            under_way = _Ahead(begun.gradient, pulled.versions, rows.rows)
        if under_way is not None:
            yield from self._finish(under_way)

    def _finish(self, done: _Ahead, further: int | None = None) -> Wants:
        """Push the oldest step under way, and request the weights of clock `further` with it."""
        finished = yield FinishStep()
        assert isinstance(finished, StepFinished)
        self.compute_s += finished.seconds
        yield PushContribution(
            done.gradient, done.versions, 1, 1, done.samples, finished.loss, further
        )
        self.count(1, 1, done.samples)
