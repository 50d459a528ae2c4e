"""The blocking driver of a worker's loop: it carries out what the step machine wants.

The machine (step_machine.py) decides; this file reads batches, asks the model for gradients and the
client for weights, and measures where the time goes. It runs inside a Spark task, a thread or a
plain process.
"""

import time
from collections.abc import Iterator
from itertools import islice
from math import ceil

import msgspec
import numpy as np
from msgspec import structs

from cupy_kernels.ops.updates import squared_norm
from ps.client import Client
from ps.snapshots.residual_writer import ResidualWriter
from ps.snapshots.worker_state import NO_STATE, OwnState
from worker.strategies.base import Floats
from worker.training import step_machine as machine
from worker.training.fragment_machine import build_machine
from worker.training.model import Ahead, Batch, Differentiable, check_loss
from worker.training.optimizer_state import LocalOptimizer
from worker.training.step_machine import SEEDS, Plan, StepMachine
from worker.training.worker_state import Continued, fresh_state, save_state

__all__ = ["SEEDS", "Plan", "WorkerReport", "train_worker"]


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one incarnation of a worker, and where its time went (seconds).

    `dropped` counts its pushes that came too late for a round or a quorum.

    `transports` are what carried its arrays, one for each shard; `device` is what it computed on.
    `lost` says what of its own state a restarted worker had to continue without, and why; empty if
    nothing.
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
    dropped: int = 0
    transports: tuple[str, ...] = ()
    device: str = "cpu"
    lost: str = ""


def train_worker(
    client: Client,
    model: Differentiable,
    batches: Iterator[Batch],
    plan: Plan,
    *,
    incarnation: int = 0,
    restart_state: Continued | None = None,
) -> WorkerReport:
    """Run `plan` from the step after this worker's last push; `batches` must start at that step.

    `restart_state` is that of a restarted worker; `batches` must then start after the steps in it.
    The run ends early, without error, when `batches` end. The caller closes `client`, which
    writes the state at the end if it has a place for that.
    """
    if restart_state is None:
        restart_state = fresh_state(client, plan.strategy)
    plan.strategy.check(client.cluster.bound, plan.prefetch)
    started, first_step, before = time.monotonic(), client.step, structs.replace(client.times)
    steps = build_machine(
        plan,
        client.layout,
        worker=client.worker,
        clock=client.clock,
        step=client.step,
        bound=client.cluster.bound,
        ahead=client.best_prefetch,
        on_device=isinstance(model, Ahead),
        local=restart_state.local,
    )
    steps.drive(_Driver(client, model, batches, steps).carry_out)
    return WorkerReport(
        worker=client.worker,
        incarnation=incarnation,
        steps=client.step - first_step,
        samples=steps.pushed,
        seconds=time.monotonic() - started,
        compute_s=steps.compute_s,
        data_s=steps.data_s,
        waited_s=client.times.waited_s - before.waited_s,
        network_s=client.times.network_s - before.network_s,
        serialise_s=client.times.serialise_s - before.serialise_s,
        duplicates=client.duplicates,
        dropped=client.dropped,
        transports=client.transports,
        device=str(model.device) if isinstance(model, Ahead) else "cpu",
        lost=restart_state.lost,
    )


class ClientDriver:
    """Carries out the wants that concern the shards: with a client."""

    def __init__(
        self, client: Client, steps: StepMachine, optimizer: LocalOptimizer | None = None
    ) -> None:
        self.client = client
        self.plan = steps.plan
        self._steps = steps
        self._optimizer = optimizer
        self._between = True  # whether no gradient has been taken since the last batches were read
        self.has_state = optimizer is None  # whether the optimiser has begun
        self._saved = client.seq  # the push after which the state was saved last
        self._reported_at, self._step_s = time.monotonic(), 1.0
        client.own_state = self.own_state

    def own_state(self) -> OwnState | None:
        """The state of this worker that a snapshot saves; None within a step."""
        local = self._steps.local
        if local is None or not (self.plan.strategy.keeps or self._optimizer):
            return NO_STATE
        if not (self._between and self.has_state):
            return None
        return save_state(self.plan.strategy, local, self._optimizer)

    def begin_step(self) -> None:
        """A gradient is being taken: there is no state to save until the step has ended."""
        self._between = False

    def end_step(self) -> None:
        """Write the state between two steps if a snapshot wants it, and save it after an exchange.

        Within a window it is not saved: a loop of the user's begins again at the last push.
        """
        self._between = True
        client = self.client
        client.write_requested_state()
        if client.residual_writer is not None and client.seq > self._saved:
            local = self._steps.local
            if local is not None and not local.steps:
                self._save(client.residual_writer, waits=False)

    def _save(self, writer: ResidualWriter, *, waits: bool) -> None:
        """Save the state for this worker's next life, if it has any."""
        keeps = self.plan.strategy.keeps or self._optimizer or self.client.compresses
        if keeps and writer.begin_save(waits=waits):
            state = self.client.copy_state()
            assert state is not None, "between two steps"
            writer.save(*state)
            self._saved = self.client.seq

    def carry_out(self, want: machine.Want) -> machine.Answer:
        """Carry out one want; returns its answer."""
        match want:
            case machine.PullWeights():
                return self._pull(want)
            case machine.PushContribution():
                self._push(want)
            case machine.PushReport():
                self._report(want)
            case machine.TakeFragment():
                return self._take(want)
            case machine.PrefetchWeights():
                self.client.prefetch(want.clock)
            case machine.FlushPushes():
                self.client.flush()
                self._between = True
                if self.client.residual_writer is not None and self.client.seq > self._saved:
                    self._save(self.client.residual_writer, waits=True)
        return None

    def _pull(self, want: machine.PullWeights) -> machine.WeightsPulled:
        pulled = self.client.pull(want.clock)
        self._reported_at = time.monotonic()  # to join and to wait takes no steps
        for clock in want.prefetch:
            self.client.prefetch(clock)
        return machine.WeightsPulled(pulled.weights, pulled.versions, self.client.best_prefetch)

    def _take(self, want: machine.TakeFragment) -> machine.FragmentTaken | None:
        pulled = self.client.take(want.clock, (want.table,), wait=want.wait)
        if pulled is None:
            return None
        return machine.FragmentTaken(pulled.weights, pulled.versions, self._take_late_steps())

    def _take_late_steps(self) -> int:
        """The steps by which the last late report should have come earlier; then 0."""
        late_s, self.client.late_s = self.client.late_s, 0.0
        return ceil(late_s / self._step_s) if late_s else 0

    def _report(self, want: machine.PushReport) -> None:
        now = time.monotonic()
        self._step_s = (now - self._reported_at) / max(1, want.steps)
        self._reported_at = now
        self._note_times()
        self.client.push(
            want.reports,
            read_versions=want.versions,
            steps=want.steps,
            ticks=1,
            samples=want.samples,
            loss=want.loss,
            prefetch=want.clock,
            prefetch_tables=tuple(want.reports),
            tokens=want.tokens,
            window=want.window,
        )

    def _note_times(self) -> None:
        """Count the times of the machine's steps among the client's, which go with a push."""
        times, steps = self.client.times, self._steps
        times.compute_s = max(times.compute_s, steps.compute_s)
        times.data_s = max(times.data_s, steps.data_s)

    def _push(self, want: machine.PushContribution) -> None:
        self._note_times()
        self.client.push(
            want.contribution,
            read_versions=want.versions,
            steps=want.steps,
            ticks=want.ticks,
            samples=want.samples,
            loss=want.loss,
            prefetch=want.prefetch,
        )


class _Driver(ClientDriver):
    """Carries out all wants: with a client, a model and batches."""

    def __init__(
        self,
        client: Client,
        model: Differentiable,
        batches: Iterator[Batch],
        steps: StepMachine,
    ) -> None:
        super().__init__(client, steps)
        self.model = model
        self.batches = batches
        self._inputs: list[Batch] = []
        self._buffers = steps.buffers

    def carry_out(self, want: machine.Want) -> machine.Answer:
        """Carry out one want; returns its answer."""
        match want:
            case machine.ReadBatches():
                return self._read(want.batches)
            case machine.ComputeGradient():
                return self._compute(want)
            case machine.BeginStep():
                return self._begin(want)
            case machine.FinishStep():
                return self._finish()
        return super().carry_out(want)

    def _read(self, count: int) -> machine.BatchesRead:
        self.end_step()
        started = time.monotonic()
        self._inputs = list(islice(self.batches, count))
        rows = sum(len(next(iter(batch.values()))) for batch in self._inputs)
        return machine.BatchesRead(rows, time.monotonic() - started)

    def _compute(self, want: machine.ComputeGradient) -> machine.GradientComputed:
        self.begin_step()
        started = time.monotonic()
        gradient, loss = self._gradient(want.weights, self._inputs, want.step)
        return machine.GradientComputed(gradient, loss, time.monotonic() - started)

    def _begin(self, want: machine.BeginStep) -> machine.StepBegun:
        started, model = time.monotonic(), self.model
        assert isinstance(model, Ahead)
        out = self.client.new_gradient(zeroed=False)
        model.begin(want.weights, self._inputs[0], out, step=want.step, seed=self.plan.seed)
        return machine.StepBegun(out, time.monotonic() - started)

    def _finish(self) -> machine.StepFinished:
        started, model = time.monotonic(), self.model
        assert isinstance(model, Ahead)
        return machine.StepFinished(check_loss(model, model.finish()), time.monotonic() - started)

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
            self._clip(total)
        if len(inputs) > 1:
            total /= np.float32(len(inputs))
        return total, losses / len(inputs)

    def _clip(self, gradient: Floats) -> None:
        """Scale a gradient that is too long; what buffers are changed by is no part of it."""
        changes = [gradient[keys].copy() for keys in self._buffers]
        for keys in self._buffers:
            gradient[keys] = 0.0
        norm = squared_norm(gradient) ** 0.5
        if norm > self.plan.clip:
            gradient *= np.float32(self.plan.clip / norm)
        for keys, change in zip(self._buffers, changes, strict=True):
            gradient[keys] = change
