"""Training along a trace: the order of reads and updates first, then the arithmetic that it asks.

The training simulator carries each message through a session and a shard, some 280 calls of Python
for a gradient. Who reads and applies what when does not depend on gradients, and the timing
simulator knows it for one event a step. So here that simulator leads. At each push the gradient is
computed at the weights that its worker read, and the shard's own store applies it by its rule. The
records are the timing simulator's, and the weights are those of the training simulator, bit for
bit; tests hold both against it.

Versions are immutable and kept by reference, so one lives as long as a worker has still to compute
a gradient from it. Strategies with windows, exchanges or several steps between pulls run the real
step machine; for the others a push is the gradient.

Several runs that push at each of their steps, over no link, are trained *in lockstep*: each run
has a trace of its own, and at the n-th push of all of them the gradients are one call for small
nets. Each run is a table of one store, with its own rule and rate. A run that ends leaves the rest.

What needs the messages themselves stays with the training simulator (`is_traced`): joins and kills,
several shards, limits of staleness, warm starts, fragments. Over a link the refusal of a gradient
that is not finite travels, and pushes that pass it are applied; `NeedsMessages` asks for that
simulator, too.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from msgspec import structs

from cupy_kernels.backends import HOST
from deploy.experiments.cached_ssp import CachedSSP
from deploy.experiments.cluster import worker_name
from deploy.experiments.jobs import ENDLESS, SimulatedJob
from deploy.experiments.problem import BatchedWorkload, Workload
from deploy.experiments.timing_simulation import Flight, TimingSimulation
from deploy.experiments.training_simulation import Course, CurvePoint
from shards.aggregation import CONSTANT, WEIGHINGS, Buffer, Each, Round
from shards.buffer_pool import Buffers
from shards.ledger import Ledger
from shards.parameters import ParameterStore
from shards.schedules import Fixed
from shards.shard_state import WEIGHTS, SavedProgress, array_name
from worker.strategies import (
    ADAG,
    ASP,
    BSP,
    DCASGD,
    EAMSGD,
    EASGD,
    SSP,
    Downpour,
    DynSGD,
    FedBuff,
    LocalSGD,
    Softsync,
    SparkNet,
    StaleRate,
)
from worker.strategies.base import Floats
from worker.training import step_machine as machine
from worker.training.fragment_machine import build_machine

_TRACED = (
    ADAG, ASP, BSP, CachedSSP, DCASGD, EAMSGD, EASGD, SSP, Downpour, DynSGD, FedBuff, LocalSGD,
    Softsync, SparkNet, StaleRate,
)  # fmt: skip
_RECORDS = 1 << 16  # that a run keeps as tuples


class NeedsMessages(Exception):
    """A run has met what only the training simulator carries."""


def is_traced(job: SimulatedJob) -> bool:
    """Return whether a job can be trained along a trace."""
    cluster = job.cluster
    return (
        type(job.strategy) in _TRACED
        and not job.strategy.warm_up
        and cluster.shards == job.fragments == 1
        and cluster.steady
        and job.stale is None
        and job.steps == ENDLESS
    )


def keeps_step(job: SimulatedJob) -> bool:
    """Return whether a job can be trained in lockstep: each of its events is the push of a step."""
    cluster, half = job.cluster, job.half
    return (
        is_traced(job)
        and _pushes_gradients(job)
        and not isinstance(job.strategy, CachedSSP)
        and not (cluster.link or cluster.links or cluster.partitions)
        and half.weigh == CONSTANT
        and (isinstance(half.merge, Each | Buffer) or half.merge == Round())
        and not (half.rule or job.rule).versions
    )


def _pushes_gradients(job: SimulatedJob) -> bool:
    """Return whether each step pulls, and pushes its gradient."""
    strategy = job.strategy
    period = max(strategy.push_period, strategy.fetch_period)
    return period == 1 and not strategy.windowed and not strategy.exchanges


class TraceTraining:
    """Runs of jobs under way; `run` takes them to a number of gradients.

    Several jobs must each keep step, and differ at most in seed, rate, rule, bound, step times and
    stragglers. Their workload must be a BatchedWorkload.
    """

    def __init__(self, jobs: Sequence[SimulatedJob], workload: Workload) -> None:
        assert len(jobs) == 1 or (
            all(map(keeps_step, jobs)) and isinstance(workload, BatchedWorkload)
        ), "jobs that keep step"
        self.workload = workload
        self._shard = TracedShard(jobs, workload)
        self.runs = [
            TracedRun(job, workload, self._shard, name, number)
            for number, (job, name) in enumerate(zip(jobs, self._shard.names, strict=True))
        ]
        self._under_way = list(self.runs)
        # The gradients of a round are kept until it closes; others are applied at once.
        kept = jobs[0].cluster.workers if isinstance(jobs[0].half.merge, Round) else 1
        shape = len(jobs), workload.table.size
        self._gradients = [np.empty(shape, np.float32) for _ in range(kept)]
        self._weights = np.empty(shape, np.float32)
        self._plain = _pushes_gradients(jobs[0])
        self.gradients = 0

    def run(
        self, gradients: int, *, look_every: int = 0, until_error: float = -1.0
    ) -> list[Course]:
        """Train each job until this number of gradients has been computed, and measure the weights.

        As `TrainingSimulation.run` does; a job that ends early leaves the others. Raises
        NeedsMessages.
        """
        self._measure(until_error)
        while self._under_way and self.gradients < gradients:
            aim = min(gradients, self.gradients + (look_every or gradients))
            self.advance(aim)
            self._measure(until_error)
        return [run.course() for run in self.runs]

    def advance(self, gradients: int) -> None:
        """Train until this number of gradients has been computed in each run."""
        while self._under_way and self.gradients < gradients:
            self._step()
            while not self._plain and any(run.timing.follows_at_once for run in self._under_way):
                self._step()

    def weights(self, run: int = 0) -> Floats:
        """The weights of a run, in an array of its own."""
        return self._shard.weights_of(run).copy()

    def _step(self) -> None:
        """Carry out the next flight of each run."""
        runs = self._under_way
        flights = [run.timing.next_flight() for run in runs]
        first = flights[0]
        ends_step = first.took_s >= 0
        self.gradients += ends_step
        if ends_step:
            for run, flight in zip(runs, flights, strict=True):
                run.gradients += 1
                run.compute_s += flight.took_s
        if first.pushes:
            before = self._shard.version
            if self._plain:
                pushed, steps = self._compute(runs, flights), 1
            else:
                want = runs[0].machines[first.worker.number].next_push()
                pushed, steps = {runs[0].name: want.contribution}, want.steps
            refused = self._shard.push(pushed, flights, steps)
            if refused:
                self._end(refused, before)
                runs = self._under_way
                flights = [
                    flight
                    for flight, name in zip(flights, pushed, strict=True)
                    if name not in refused
                ]
        for run, flight in zip(runs, flights, strict=True):
            run.timing.land(flight)

    def _compute(self, runs: list["TracedRun"], flights: list[Flight]) -> dict[str, Floats]:
        """The gradient that each run pushes, by the names of their tables."""
        out = self._gradients[self._shard.in_round]
        if len(runs) == 1:
            (run,), number = runs, flights[0].worker.number
            gradient = out[0]
            self.workload.gradient(run.held[number][run.part], next(run.batches[number]), gradient)
            if run.cached:
                run.apply_own(number, gradient)
            return {run.name: gradient}
        rows, batches = self._weights, []
        for row, (run, flight) in enumerate(zip(runs, flights, strict=True)):
            number = flight.worker.number
            rows[row] = run.held[number][run.part]
            batches.append(next(run.batches[number]))
        count = len(runs)
        assert isinstance(self.workload, BatchedWorkload)
        self.workload.gradients(rows[:count], np.stack(batches), out[:count])
        return {run.name: gradient for run, gradient in zip(runs, out, strict=False)}

    def _end(self, refused: set[str], version: int) -> None:
        """End the runs with gradients that are not finite, which the shard has refused."""
        for run in self._under_way:
            if run.name in refused:
                if run.linked:
                    raise NeedsMessages
                run.diverge(version)
        self._drop_ended()

    def _measure(self, until_error: float) -> None:
        """Measure the weights of each run, and end those that are done."""
        for run in self._under_way:
            loss, error = self.workload.measure(self._shard.weights_of(run.number))
            if run.curve and not math.isfinite(loss):
                run.diverge(self._shard.version)
            else:
                run.look(self._shard.version, loss, error)
                run.ended = error <= until_error
            if run.timing.waiting_records > _RECORDS:
                run.collect()
        self._drop_ended()

    def _drop_ended(self) -> None:
        self._under_way = [run for run in self._under_way if not run.ended]


class TracedRun:
    """One run: its trace, its workers' weights and batches, and what has been measured.

    `held` has the store's weights that each worker read last, and `part` is the run's own of them.
    """

    def __init__(
        self,
        job: SimulatedJob,
        workload: Workload,
        shard: "TracedShard",
        name: str,
        number: int,
    ) -> None:
        self.name, self.number = name, number
        self.part = shard.part_of(number)
        self.linked = bool(job.cluster.link or job.cluster.links or job.cluster.partitions)
        self.gradients, self.compute_s = 0, 0.0
        self.ended = False
        self.curve: list[CurvePoint] = []
        self._diverged_at: int | None = None
        self._worst_error = workload.worst_error
        self._rows: list[np.ndarray] = []
        workers = range(job.cluster.workers)
        self.batches = [workload.batches(job.seed, worker) for worker in workers]
        self.held: list[Floats] = [shard.weights()] * len(workers)
        self.cached = isinstance(job.strategy, CachedSSP)
        self._steps = [0] * len(workers)
        self._schedules = [job.plan(worker).schedule for worker in workers]
        self._scale = job.half.scale
        self.machines: list[TracedWorker] = []
        pulls: list[deque[Floats]] = [deque(maxlen=job.cluster.delays + 1) for _ in workers]
        on_read: Callable[[int, int], None] = partial(_hold, self.held, pulls, shard.weights)
        if not _pushes_gradients(job):
            self.machines = [TracedWorker(job, workload, worker) for worker in workers]
            on_read = partial(_give, self.machines, shard)
        self.timing = TimingSimulation(job, payload_bytes=4 * workload.table.size, on_read=on_read)

    def apply_own(self, worker: int, gradient: Floats) -> None:
        """Let a worker's copy move by its own update, as its cache does (cached_ssp.py)."""
        rate = self._scale * self._schedules[worker].rate(self._steps[worker])
        self.held[worker] = self.held[worker] - np.float32(rate) * gradient
        self._steps[worker] += 1

    def look(self, version: int, loss: float, error: float) -> None:
        """Note a measurement at the present time."""
        self.curve.append(CurvePoint(version, self.gradients, self.timing.now, loss, error))

    def diverge(self, version: int) -> None:
        """End the run at this version, with the error of a guess."""
        self._diverged_at = version
        self.look(version, math.nan, self._worst_error)
        self.ended = True

    def collect(self) -> None:
        """Keep the records so far as an array."""
        self._rows.append(self.timing.take_records())

    def course(self) -> Course:
        """The run so far."""
        self.collect()
        return Course(
            self.curve,
            np.concatenate(self._rows),
            self.timing.now,
            self.gradients,
            self._diverged_at,
            self.compute_s,
        )


def _hold(
    held: list[Floats],
    pulls: list[deque[Floats]],
    weights: Callable[[], Floats],
    worker: int,
    age: int,
) -> None:
    pulls[worker].appendleft(weights())
    held[worker] = pulls[worker][age]


def _give(machines: list["TracedWorker"], shard: "TracedShard", worker: int, age: int) -> None:
    machines[worker].pull(shard.weights(), shard.version, age)


class TracedWorker:
    """A worker with its step machine, which takes the steps of a window when it pushes them."""

    def __init__(self, job: SimulatedJob, workload: Workload, number: int) -> None:
        self._given: deque[machine.WeightsPulled] = deque()
        self._pulls: deque[machine.WeightsPulled] = deque(maxlen=job.cluster.delays + 1)
        self._workload = workload
        self._batches = workload.batches(job.seed, number)
        self._wants = build_machine(
            job.plan(number), workload.table, worker=worker_name(number), bound=job.real_bound
        ).wants()

    def pull(self, weights: Floats, version: int, age: int) -> None:
        """Keep weights that the shard sends; the steps see those of `age` pulls before."""
        self._pulls.appendleft(machine.WeightsPulled(weights, (version,)))
        self._given.append(self._pulls[age])

    def next_push(self) -> machine.PushContribution:
        """Take the steps up to the next push, from the weights pulled so far."""
        answer: machine.Answer = None
        batch = np.empty(0)
        while True:
            want = self._wants.send(answer)
            match want:
                case machine.ReadBatches():
                    batch = next(self._batches)
                    answer = machine.BatchesRead(len(batch))
                case machine.PullWeights():
                    answer = self._given.popleft()
                case machine.ComputeGradient(weights=weights):
                    gradient = np.empty(weights.shape, np.float32)
                    loss = self._workload.gradient(weights, batch, gradient)
                    answer = machine.GradientComputed(gradient, loss)
                case machine.PushContribution():
                    return want
                case _:
                    raise AssertionError(f"the plan of an experiment does not want {want}")


class TracedShard:
    """The arithmetic of one shard: its store, and how the strategy weighs and merges pushes.

    Each run has a table of its own. `updates.py` has the same rules around its ledger.
    """

    def __init__(self, jobs: Sequence[SimulatedJob], workload: Workload) -> None:
        table, first = workload.table, jobs[0]
        tables = [table]
        if len(jobs) > 1:
            tables = [structs.replace(table, name=f"run{at}") for at in range(len(jobs))]
        described = [job.describe(one) for job, one in zip(jobs, tables, strict=True)]
        (spec,) = first.specs_of(described)
        self.names = [one.name for one in tables]
        self.in_round = 0
        self._size = table.size
        self._workers = first.cluster.workers
        self._half = half = first.half
        self._weigh = WEIGHINGS[half.weigh]
        self._backups = half.merge.backups if isinstance(half.merge, Round) else 0
        self._schedules = {one.table.name: one.schedule for one in described}
        self._steps = 0
        self._round_steps = 0
        self._round: dict[str, dict[str, Floats]] = {name: {} for name in self.names}
        self._fixed: dict[str, float] | None = None
        if all(isinstance(one.schedule, Fixed) for one in described):
            self._fixed = self._rates()
        self._store = ParameterStore(spec, Buffers, HOST)
        start = {
            array_name(name, WEIGHTS): workload.start(job.seed)
            for name, job in zip(self.names, jobs, strict=True)
        }
        self._store.restore(SavedProgress(0, 0, 0, Ledger()), start)
        self.weights = self._store.weights

    @property
    def version(self) -> int:
        return self._store.version

    def part_of(self, run: int) -> slice:
        """Where the weights of a run are."""
        return slice(run * self._size, (run + 1) * self._size)

    def weights_of(self, run: int) -> Floats:
        """The present weights of a run, which will not change."""
        return self._store.weights()[self.part_of(run)]

    def push(self, pushed: dict[str, Floats], flights: Sequence[Flight], steps: int) -> set[str]:
        """Handle the next push of each run, over this many steps; returns the tables refused."""
        base = flights[0].base
        match self._half.merge:
            case Each():
                refused = self._apply(pushed, base)
            case Buffer(size=size):
                refused = self._collect(pushed, base, size)
            case Round():
                return self._join_round(pushed, flights, steps)
            case _:
                raise AssertionError("a merge that is traced")
        self._steps += steps
        return refused

    def _apply(self, pushed: dict[str, Floats], base: int) -> set[str]:
        store, rates, scale = self._store, self._fixed or self._rates(), self._scale(base)
        refused: set[str] = set()
        while pushed:
            if store.apply([pushed], rates, scale=scale, read_version=base) is not None:
                break
            found = self._find_refused(pushed)
            if not found:  # the two ways to sum a norm differ in its last bits
                store.apply([pushed], rates, scale=scale, read_version=base, guarded=False)
                break
            refused |= found
            pushed = {name: push for name, push in pushed.items() if name not in found}
        return refused

    def _collect(self, pushed: dict[str, Floats], base: int, size: int) -> set[str]:
        refused = self._find_refused(pushed)
        accepted = {name: push for name, push in pushed.items() if name not in refused}
        if accepted:
            self._store.collect(accepted, self._scale(base))
            if self._store.buffered >= size:
                self._store.apply_buffer(size, self._fixed or self._rates())
        return refused

    def _join_round(
        self, pushed: dict[str, Floats], flights: Sequence[Flight], steps: int
    ) -> set[str]:
        store, refused = self._store, self._find_refused(pushed)
        if self._backups and flights[0].base < store.version:
            self._steps += steps
            return refused
        for (name, push), flight in zip(pushed.items(), flights, strict=True):
            self._round[name][flight.worker.name] = push
        self.in_round += 1
        self._round_steps += steps
        if self.in_round < self._workers - self._backups:
            return refused
        means = {}
        for name in pushed.keys() - refused:
            pushes = self._round[name]
            # Sorted, as a shard does it: float addition is not associative.
            means[name] = store.parts[name].mean([pushes[w] for w in sorted(pushes)], len(pushes))
        if means:
            rates = self._fixed or self._rates()
            store.apply([means], rates, scale=self._half.scale, guarded=False)
        for pushes in self._round.values():
            pushes.clear()
        self._steps += self._round_steps
        self.in_round = self._round_steps = 0
        return refused

    def _find_refused(self, pushed: dict[str, Floats]) -> set[str]:
        """The names of the tables that refuse their part, by their guards."""
        parts = self._store.parts
        return {
            name
            for name, push in pushed.items()
            if not parts[name].measure(push) <= parts[name].max_squares  # true for NaN, too
        }

    def _scale(self, base: int) -> float:
        if self._half.weigh == CONSTANT:
            return self._half.scale
        return self._half.scale * self._weigh(self._store.version - base)

    def _rates(self) -> dict[str, float]:
        """The rate of each table, as a shard finds it: by the steps of all workers so far."""
        iteration = self._steps // self._workers
        return {name: schedule.rate(iteration) for name, schedule in self._schedules.items()}
