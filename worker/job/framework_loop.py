"""The steps of a loop that another library runs: what `worker.torch`, `worker.jax` and Keras share.

The loop computes a gradient with the weights that it was shown, and gives it to `take`. That hands
it to the worker's step machine (step_machine.py) and carries out what the machine wants until it
wants the next gradient. So the staleness bound, pushes that count exactly once and every strategy
hold as in `worker.loop`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

import ps
from ps.client import Client
from ps.logs import logger
from shards import argument_checks
from shards.errors import BadInput
from shards.messages import MAX_SAMPLES
from shards.tables import Layout
from worker.job.options import MAX_COUNT
from worker.strategies import Strategy
from worker.training.context import Context
from worker.training.fragment_machine import build_machine
from worker.training.optimizer_state import LocalOptimizer, OptimizerState
from worker.training.own_loop import layout_for, plan_for
from worker.training.step_machine import (
    BatchesRead,
    ComputeGradient,
    GradientComputed,
    Plan,
    ReadBatches,
)
from worker.training.training_loop import ClientDriver
from worker.training.worker_state import Continued, restore_state

Floats = NDArray[np.float32]


class LoopWorker(NamedTuple):
    """A worker of a job, and what the adapter of a loop needs to know of it.

    There are several tables only where the strategy exchanges each by itself. `rows` returns the
    number of rows that have been read for the loop so far.
    """

    job: ps.Job
    client: Client
    layout: Layout
    plan: Plan
    restart_state: Continued
    rows: Callable[[], int]


def worker_of(label: str, ctx: Context) -> LoopWorker:
    """The worker of `worker.run` that `ctx` describes; raises BadInput, naming `label`."""
    argument_checks.instance(f"{label}: ctx", ctx, Context, "a worker.Context")
    layout, _ = layout_for(label, ctx.job, ctx.plan.strategy)
    restart_state = ctx.restart_state.between_windows(ctx.plan.strategy.keeps)
    return LoopWorker(
        ctx.job, ctx.worker.client, layout, ctx.plan, restart_state, lambda: ctx.samples
    )


class LoopAdapter(Protocol):
    """An adapter that connects a user's loop to a worker."""

    @property
    def lost(self) -> str:
        """The state that a restarted worker continues without, in words; empty if none."""
        ...

    def finish(self) -> None:
        """Push what a window still holds and wait until all pushes are applied."""
        ...


Adapter = TypeVar("Adapter", bound=LoopAdapter)


def make_adapter(make: Callable[[LoopWorker], Adapter], ctx: Context) -> Adapter:
    """Build the adapter for the worker of `ctx`; it finishes when the user's function returns."""
    adapter = make(worker_of("wrap", ctx))
    ctx.lost = adapter.lost
    ctx.at_end(adapter.finish)
    return adapter


@contextmanager
def join_job(
    make: Callable[[LoopWorker], Adapter],
    job: ps.Job,
    name: str,
    *,
    steps: int = MAX_COUNT,
    strategy: Strategy | str = "downpour",
    workers: int = 1,
    incarnation: int = 0,
    prefetch: bool = False,
    **options: Any,
) -> Iterator[Adapter]:
    """Build the adapter for worker `name` of a job without Spark.

    It finishes with the block, unless by an error. The options are those of `worker.loop`.
    """
    argument_checks.instance("job", job, ps.Job, "a ps.Job")
    layout, plan = plan_for(
        "join", job, steps=steps, strategy=strategy, workers=workers, seed=0, prefetch=prefetch
    )
    with job.worker(name, incarnation=incarnation, **options) as me:
        restart_state = restore_state(me.client, plan.strategy, snapshots=options.get("keep"))
        restart_state = restart_state.between_windows(plan.strategy.keeps)
        adapter = make(LoopWorker(job, me.client, layout, plan, restart_state, lambda: 0))
        if adapter.lost:
            logger("worker", job=job.cluster.job, worker=name).warning("%s", adapter.lost)
        yield adapter
        adapter.finish()


class LoopSteps:
    """One worker's steps; the first weights are shown when it is made. Not for two threads.

    `lost` says what a restarted worker continues without, empty if nothing.
    """

    def __init__(
        self,
        me: LoopWorker,
        *,
        show: Callable[[Floats], None],
        optimizer: LocalOptimizer | None,
    ) -> None:
        """`show` is given the weights for each gradient, an arena that changes after the step.

        `optimizer` is that of a loop which has one of its own: it takes the strategy's local steps.
        """
        client, plan, restart_state, rows = me.client, me.plan, me.restart_state, me.rows
        plan.strategy.check(client.cluster.bound, plan.prefetch)
        if optimizer is not None and plan.rate_factor != 1:
            raise BadInput(
                "rate_factor",
                expected="none with an optimizer of the loop's own, which has the rate",
                got=f"{plan.rate_factor:g}",
            )
        self.client = client
        self.lost = restart_state.lost if optimizer is None else restart_state.lost_with_optimizer
        self._rows = rows
        self._rows_before = rows()
        self._show = show
        machine = build_machine(
            plan,
            me.layout,
            worker=client.worker,
            clock=client.clock,
            step=client.step,
            bound=client.cluster.bound,
            ahead=client.best_prefetch,
            pulls_at_once=True,
            local=restart_state.local,
            optimizer=None if optimizer is None else optimizer.step,
        )
        self._driver = ClientDriver(client, machine, optimizer)
        self._wants = machine.wants()
        self._gradient_request: ComputeGradient | None = None
        self._shown_at = time.monotonic()
        self._continue(None)
        if optimizer is not None and not self.is_done:
            self._begin_optimizer(optimizer, restart_state.optimizer)

    def _begin_optimizer(self, optimizer: LocalOptimizer, saved: OptimizerState | None) -> None:
        try:
            optimizer.begin(saved)
        except BadInput as error:
            assert saved is not None, "a fresh state always fits"
            of = f"of {saved.worker}" if saved.worker else "of its optimizer"
            self.lost = f"{self.client.worker} began without the state {of}: {error}"
        self._driver.has_state = True

    @property
    def is_done(self) -> bool:
        """True once the last step of the plan has been taken."""
        return self._gradient_request is None

    def begin(self) -> tuple[Floats, Floats]:
        """The weights that were shown, and an array of any content for their gradient.

        Raises BadInput after the last step.
        """
        if self._gradient_request is None:
            raise BadInput(f"step: worker {self.client.worker} has taken its last step already")
        return self._gradient_request.weights, self.client.new_gradient(zeroed=False)

    def take(self, gradient: Floats, loss: Any, samples: int | None) -> None:
        """Take a step with the gradient, in the array of `begin`, and show the next weights.

        `samples` None are the rows that have been read since the last step.
        """
        # With the loop's own reading: a learner's grace is reckoned in such steps (aggregation.py).
        seconds = time.monotonic() - self._shown_at
        now = self._rows()
        rows = now - self._rows_before
        if samples is not None:
            rows = argument_checks.whole("step: samples", samples, 0, MAX_SAMPLES)
        self._rows_before = now
        self._continue(
            GradientComputed(gradient, argument_checks.loss_of("step: loss", loss), seconds, rows)
        )

    def finish(self) -> None:
        """Push what a window still holds and wait until all pushes are applied; no step follows."""
        if self._gradient_request is not None:
            self._continue(None)

    def _continue(self, answer: GradientComputed | None) -> None:
        """Carry out what the machine wants until it wants a gradient, and show the weights.

        The batches are the loop's own: it reads them when the weights are there. No answer to the
        wish for a gradient ends the run.
        """
        self._gradient_request = None
        self._driver.begin_step()
        try:
            want = self._wants.send(answer)
            while not isinstance(want, ComputeGradient):
                if isinstance(want, ReadBatches):
                    self._driver.end_step()
                    want = self._wants.send(BatchesRead(1))
                else:
                    want = self._wants.send(self._driver.carry_out(want))
        except StopIteration:
            return
        self._show(want.weights)
        self._gradient_request, self._shown_at = want, time.monotonic()


def check_takes_optimizer(label: str, optimizer: Any, strategy: Strategy, table: str) -> None:
    """Raise BadInput, naming `label`, where the strategy takes steps of its own rule.

    `table` is the function in which rule and rate are chosen in place of the optimiser.
    """
    if not strategy.takes_optimizer:
        raise BadInput(
            f"{label}: optimizer: strategy {strategy.name}",
            expected=(
                "None, because this strategy takes steps of its own rule: "
                f"choose rule and rate in {table}"
            ),
            got=type(optimizer).__name__,
        )
