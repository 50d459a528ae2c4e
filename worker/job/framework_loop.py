"""The steps of a loop that another library runs: what `worker.torch`, `worker.jax` and Keras share.

The loop computes a gradient with the weights that it was shown, and gives it to `take`. That hands
it to the worker's step machine (step_machine.py) and carries out what the machine wants until it
wants the next gradient. So the staleness bound, pushes that count exactly once and every strategy
hold as in `worker.loop`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

import ps
from ps.client import Client
from shards import argument_checks
from shards.errors import BadInput
from shards.tables import DenseTable
from worker.job.options import MAX_COUNT
from worker.strategies import Strategy
from worker.training.context import Context
from worker.training.own_loop import only_table, plan_for
from worker.training.step_machine import (
    BatchesRead,
    ComputeGradient,
    GradientComputed,
    Plan,
    ReadBatches,
    StepMachine,
)
from worker.training.training_loop import ClientDriver
from worker.training.worker_state import Continued, continued

Floats = NDArray[np.float32]


class LoopWorker(NamedTuple):
    """A worker of a job with one table, and what the adapter of a loop needs to know of it.

    `rows` returns the number of rows that have been read for the loop so far.
    """

    job: ps.Job
    client: Client
    table: DenseTable
    plan: Plan
    own: Continued
    rows: Callable[[], int]


def worker_of(what: str, ctx: Context) -> LoopWorker:
    """The worker of `worker.run` that `ctx` describes; raises BadInput, naming `what`."""
    argument_checks.instance(f"{what}: ctx", ctx, Context, "a worker.Context")
    name, dense = only_table(what, ctx.job)
    own = ctx.own.between_windows(ctx.plan.strategy.keeps)
    table = dense.table(name)
    return LoopWorker(ctx.job, ctx.worker.client, table, ctx.plan, own, lambda: ctx.samples)


class LoopAdapter(Protocol):
    """What an adapter makes for the loop of a worker."""

    @property
    def lost(self) -> str:
        """What a restarted worker continues without; empty if nothing."""
        ...

    def finish(self) -> None:
        """Push what a window still holds and wait until all pushes are applied."""
        ...


Adapter = TypeVar("Adapter", bound=LoopAdapter)


def wrapped(make: Callable[[LoopWorker], Adapter], ctx: Context) -> Adapter:
    """What `make` makes for the worker of `ctx`; it finishes with the function of the run."""
    made = make(worker_of("wrap", ctx))
    ctx.lost = made.lost
    ctx.at_end(made.finish)
    return made


@contextmanager
def joined(
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
    """What `make` makes for worker `name` of a job without Spark.

    It finishes with the block, unless by an error. The options are those of `worker.loop`.
    """
    argument_checks.instance("job", job, ps.Job, "a ps.Job")
    table, plan = plan_for(
        "join", job, steps=steps, strategy=strategy, workers=workers, seed=0, prefetch=prefetch
    )
    with job.worker(name, incarnation=incarnation, **options) as me:
        own = continued(me.client, plan.strategy, snapshots=options.get("keep"))
        own = own.between_windows(plan.strategy.keeps)
        made = make(LoopWorker(job, me.client, table, plan, own, lambda: 0))
        yield made
        made.finish()


class LoopSteps:
    """One worker's steps; the first weights are shown when it is made. Not for two threads.

    `lost` says what a restarted worker continues without, empty if nothing.
    """

    def __init__(
        self,
        me: LoopWorker,
        *,
        show: Callable[[Floats], None],
        optimized: Callable[[], Floats] | None,
    ) -> None:
        """`show` is given the weights for each gradient, an arena that changes after the step.

        `optimized` is for a loop with an optimiser of its own, which takes the strategy's local
        steps: it returns the weights after one.
        """
        client, plan, own, rows = me.client, me.plan, me.own, me.rows
        plan.strategy.check(client.cluster.bound, plan.prefetch)
        if optimized is not None and plan.rate_factor != 1:
            raise BadInput(
                "rate_factor",
                expected="none with an optimizer of the loop's own, which has the rate",
                got=f"{plan.rate_factor:g}",
            )
        self.client = client
        self.lost = own.lost
        if optimized is not None and client.seq:
            without = "without the state of its optimizer"
            self.lost = (
                f"{own.lost} and {without}" if own.lost else f"{client.worker} continued {without}"
            )
        self._rows = rows
        self._rows_before = rows()
        self._show = show
        machine = StepMachine(
            plan,
            me.table,
            worker=client.worker,
            clock=client.clock,
            step=client.step,
            bound=client.cluster.bound,
            ahead=client.recommended_prefetch,
            pulls_at_once=True,
            local=own.local,
            optimizer=optimized,
        )
        self._driver = ClientDriver(client, machine)
        self._wants = machine.wants()
        self._wanted: ComputeGradient | None = None
        self._continue(None)

    @property
    def ended(self) -> bool:
        """Whether the last step of the plan has been taken."""
        return self._wanted is None

    def begin(self) -> tuple[Floats, Floats]:
        """The weights that were shown, and an array of any content for their gradient.

        Raises BadInput after the last step.
        """
        if self._wanted is None:
            raise BadInput(f"step: worker {self.client.worker} has taken its last step already")
        return self._wanted.weights, self.client.new_gradient(zeroed=False)

    def take(self, gradient: Floats, loss: Any, samples: int | None) -> None:
        """Take a step with the gradient, in the array of `begin`, and show the next weights.

        `samples` None are the rows that have been read since the last step.
        """
        now = self._rows()
        rows = now - self._rows_before if samples is None else samples
        self._rows_before = now
        self._continue(
            GradientComputed(gradient, argument_checks.loss_of("step: loss", loss), rows=rows)
        )

    def finish(self) -> None:
        """Push what a window still holds and wait until all pushes are applied; no step follows."""
        if self._wanted is not None:
            self._continue(None)

    def _continue(self, answer: GradientComputed | None) -> None:
        """Carry out what the machine wants until it wants a gradient, and show the weights.

        The batches are the loop's own: it reads them when the weights are there. No answer to the
        wish for a gradient ends the run.
        """
        self._wanted = None
        try:
            want = self._wants.send(answer)
            while not isinstance(want, ComputeGradient):
                if isinstance(want, ReadBatches):
                    self.client.write_requested_state()
                    want = self._wants.send(BatchesRead(1))
                else:
                    want = self._wants.send(self._driver.carry_out(want))
        except StopIteration:
            return
        self._show(want.weights)
        self._wanted = want


def check_takes_optimizer(what: str, optimizer: Any, strategy: Strategy, table: str) -> None:
    """Raise BadInput, naming `what`, where the strategy takes steps of its own rule.

    `table` is the function in which rule and rate are chosen in place of the optimiser.
    """
    if not strategy.takes_optimizer:
        raise BadInput(
            f"{what}: optimizer: strategy {strategy.name}",
            expected=(
                "None, because this strategy takes steps of its own rule: "
                f"choose rule and rate in {table}"
            ),
            got=type(optimizer).__name__,
        )
