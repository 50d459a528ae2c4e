"""The worker loop: fetch, compute, push, until the plan is done.

It drives a strategy (when to do what), a model (gradients), batches (data) and the client (shards),
and measures where the time goes. It runs inside a Spark task, a thread or a plain process.

With a model on a device and a plan that prefetches, the loop runs ahead: a step begins before the
previous one is pushed. With prefetching its weights are requested before that push in any case, so
running ahead makes no weights staler, and the device computes while gradients and weights travel.
"""

import time
from collections.abc import Iterator
from itertools import islice

import msgspec
import numpy as np
from msgspec import structs

from cupy_kernels.updates import squared_norm
from ps import Client
from shards import arguments
from shards.schedules import Schedule, schedule_of
from shards.tables import DenseTable, KeyRange, segments
from worker.model import Ahead, Batch, Model, check_loss
from worker.strategies import Local, Strategy, strategy_of
from worker.strategies.base import Floats

SEEDS = -(2**63), 2**63 - 1  # the range of an int64 column of records


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The training plan of one worker, the same for all workers of a job.

    A worker takes `steps` steps, counted over all its incarnations. Each step sums the gradients of
    `iter_size` batches, clips the sum to the global L2 norm `clip` (0: never) and divides it by
    `iter_size`, in Caffe's order. `schedule` gives the learning rate of the steps that a worker
    takes on its own weights between fetches.
    """

    steps: int
    seed: int
    strategy: Strategy
    schedule: Schedule
    iter_size: int = 1
    clip: float = 0.0
    prefetch: bool = False

    def __post_init__(self) -> None:
        for name, value in (
            ("steps", arguments.whole("steps", self.steps, 0)),
            ("seed", arguments.whole("seed", self.seed, *SEEDS)),
            ("strategy", strategy_of("strategy", self.strategy)),
            ("schedule", schedule_of("schedule", self.schedule)),
            ("iter_size", arguments.whole("iter_size", self.iter_size, 1)),
            ("clip", arguments.number("clip", self.clip, least=0, expected="0 or more")),
            ("prefetch", arguments.flag("prefetch", self.prefetch)),
        ):
            structs.force_setattr(self, name, value)


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one incarnation of a worker did, and where its time went (seconds).

    `transports` are what carried its arrays, one for each shard; `device` is what it computed on.
    `lost` says why a resumed worker started without its residual; empty if it did not.
    """

    worker: str
    incarnation: int
    steps: int
    samples: int
    seconds: float
    compute_s: float
    data_s: float
    waited_s: float
    network_s: float
    serialise_s: float
    duplicates: int
    transports: tuple[str, ...] = ()
    device: str = "cpu"
    lost: str = ""


def train_worker(
    client: Client, model: Model, batches: Iterator[Batch], plan: Plan, *, incarnation: int = 0
) -> WorkerReport:
    """Run `plan` from the step after this worker's last push; `batches` must start at that step.

    It ends early, without error, when `batches` end. The caller closes `client`.
    """
    plan.strategy.check(client.cluster.bound, plan.prefetch)
    loop = _Loop(client, model, batches, plan)
    started, first_step, before = time.monotonic(), client.step, structs.replace(client.times)
    loop.run()
    return WorkerReport(
        worker=client.worker,
        incarnation=incarnation,
        steps=client.step - first_step,
        samples=loop.samples,
        seconds=time.monotonic() - started,
        compute_s=loop.compute_s,
        data_s=loop.data_s,
        waited_s=client.times.waited_s - before.waited_s,
        network_s=client.times.network_s - before.network_s,
        serialise_s=client.times.serialise_s - before.serialise_s,
        duplicates=client.duplicates,
        transports=client.transports,
        device=str(model.device) if isinstance(model, Ahead) else "cpu",
    )


class _Begun(msgspec.Struct, frozen=True):
    """A step under way on a device: the array for its gradient, its versions and its samples."""

    out: Floats
    versions: tuple[int, ...]
    samples: int


class _Loop:
    """The state of one run of the loop."""

    def __init__(self, client: Client, model: Model, batches: Iterator[Batch], plan: Plan) -> None:
        self.client = client
        self.model = model
        self.batches = batches
        self.plan = plan
        self.compute_s = self.data_s = 0.0
        self.samples = 0
        self._multipliers = rate_multipliers(model.table)

    def run(self) -> None:
        plan = self.plan
        whole = plan.iter_size == 1 and not plan.clip
        if plan.prefetch and plan.strategy.plain and whole and isinstance(self.model, Ahead):
            self._run_ahead(self.model)
        else:
            self._run_in_turn()
        self.client.flush()

    def _run_in_turn(self) -> None:
        local: Local | None = None
        for step in range(self.client.step, self.plan.steps):
            inputs = self._next_batches()
            if not inputs:
                break
            local = self._fetch(local, step)
            self._step(local, inputs, step)
            if self.plan.strategy.pushes(step):
                self._push(local, self._further(local, step))
        if local is not None and local.steps:
            self._push(local)

    def _run_ahead(self, model: Ahead) -> None:
        begun: _Begun | None = None
        for step in range(self.client.step, self.plan.steps):
            inputs = self._next_batches()
            if not inputs:
                break
            unpushed = 1 if begun is not None else 0
            replica = self.client.pull(self.client.clock + unpushed)
            started = time.monotonic()
            out = self.client.new_gradient(zeroed=False)
            model.begin(replica.weights, inputs[0], out, step=step, seed=self.plan.seed)
            self.compute_s += time.monotonic() - started
            further = self.client.clock + unpushed + 1 if step + 1 < self.plan.steps else None
            if begun is not None:
                self._finish(model, begun, further)
            elif further is not None:
                self.client.prefetch(further)
            begun = _Begun(out, replica.versions, _rows(inputs))
        if begun is not None:
            self._finish(model, begun)

    def _finish(self, model: Ahead, begun: _Begun, further: int | None = None) -> None:
        """Push the oldest step under way, and request the weights of clock `further` with it."""
        started = time.monotonic()
        loss = model.finish()
        self.compute_s += time.monotonic() - started
        self.client.push(
            begun.out,
            read_versions=begun.versions,
            samples=begun.samples,
            loss=loss,
            prefetch=further,
        )
        self.samples += begun.samples

    def _next_batches(self) -> list[Batch]:
        """The batches that one step sums over; empty at the end of the data."""
        started = time.monotonic()
        inputs = list(islice(self.batches, self.plan.iter_size))
        self.data_s += time.monotonic() - started
        return inputs

    def _fetch(self, local: Local | None, step: int) -> Local:
        """The local state for `step`, with new weights if the strategy fetches them."""
        if local is not None and not self.plan.strategy.fetches(step):
            return local
        unpushed = local.steps if local is not None else 0
        replica = self.client.pull(self.client.clock + unpushed + self._more_steps(step))
        if self.plan.prefetch:
            for further in range(1, min(self._ahead(), self.plan.steps - 1 - step) + 1):
                self.client.prefetch(self.client.clock + unpushed + further)
        if local is None:
            return Local(replica.weights, replica.versions)
        local.weights, local.fetched = replica.weights, replica.versions
        return local

    def _ahead(self) -> int:
        """How many steps early to request weights: what the link needs, within the bound."""
        bound = self.client.cluster.bound
        if bound is None:
            return self.client.recommended_prefetch
        return min(self.client.recommended_prefetch, bound - self.plan.strategy.least_bound())

    def _further(self, local: Local, step: int) -> int | None:
        """The clock of the weights to request in one message with the push after `step`.

        It is the furthest clock that the next fetch would request, and that fetch follows at once.
        """
        further = min(self._ahead(), self.plan.steps - 2 - step)
        wanted = self.plan.prefetch and further > 0
        return self.client.clock + local.steps + further if wanted else None

    def _more_steps(self, step: int) -> int:
        """How many steps after `step` use the weights that are fetched for it."""
        later = range(step + 1, self.plan.steps)
        fetched = (other for other in later if self.plan.strategy.fetches(other))
        return next(fetched, self.plan.steps) - step - 1

    def _step(self, local: Local, inputs: list[Batch], step: int) -> None:
        started = time.monotonic()
        gradient, loss = self._gradient(local.weights, inputs, step)
        if local.owed is None:
            local.versions = local.fetched
        rate = self.plan.schedule.rate(step)
        self.plan.strategy.learn(local, gradient, rate, self._multipliers)
        local.steps += 1
        local.samples += _rows(inputs)
        local.loss += loss
        self.compute_s += time.monotonic() - started

    def _gradient(self, weights: Floats, inputs: list[Batch], step: int) -> tuple[Floats, float]:
        """The gradient of one step, in a new array, and the mean loss."""
        total, losses = self.client.new_gradient(zeroed=False), 0.0
        for number, batch in enumerate(inputs):
            part = total if number == 0 else self.client.new_gradient(zeroed=False)
            key = step * len(inputs) + number
            loss = self.model.gradient(weights, batch, part, step=key, seed=self.plan.seed)
            losses += check_loss(self.model, loss)
            if number:
                total += part
        if self.plan.clip > 0:
            norm = squared_norm(total) ** 0.5
            if norm > self.plan.clip:
                total *= np.float32(self.plan.clip / norm)
        if len(inputs) > 1:
            total /= np.float32(len(inputs))
        return total, losses / len(inputs)

    def _push(self, local: Local, further: int | None = None) -> None:
        assert local.owed is not None, "a push follows a step"
        self.client.push(
            local.owed,
            read_versions=local.versions,
            steps=local.steps,
            samples=local.samples,
            loss=local.loss / local.steps,
            prefetch=further,
        )
        self.samples += local.samples
        local.settle()


def _rows(inputs: list[Batch]) -> int:
    return sum(len(next(iter(batch.values()))) for batch in inputs)


def rate_multipliers(table: DenseTable) -> Floats:
    """The `lr_mult` of each float of the table, float32 of shape (table.size,); 0 in padding."""
    multipliers = table.empty()
    for segment in segments(table, KeyRange(0, table.size)):
        multipliers[segment.start : segment.stop] = segment.lr_mult
    return multipliers
