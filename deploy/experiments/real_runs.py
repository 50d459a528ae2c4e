"""Real runs of a trial, and their replay: recorded turns give the same weights, bit for bit.

A real run has a shard that serves on loopback and a thread with a client for each worker. The
workers are paced: a step computes its gradient, then sleeps up to its drawn duration, because
workers that only compete for a processor have no natural staleness. A step that computes for longer
than half of its duration is an overrun.

A replay gives the simulator's workers the turns of the record: each pull is answered at the version
that the real one read, and pushes are applied in the recorded order. The workers compute their
gradients again. If the real run and the simulator differ anywhere in strategy, session, aggregation
or rule, the weights differ.
"""

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, NamedTuple, cast

import numpy as np
from msgspec import structs
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from deploy.experiments.agreement import distance
from deploy.experiments.cached_ssp import CachedSSP
from deploy.experiments.cluster import Link, worker_name
from deploy.experiments.jobs import SimulatedJob
from deploy.experiments.problem import Workload
from deploy.experiments.training_simulation import CurvePoint, TrainingSimulation, route_of
from deploy.experiments.trials import Trial
from ps.admin_client import AdminClient
from ps.client import Client
from ps.cluster import Cluster
from ps.launch.threads import local_shards
from ps.session.events import Send
from shards.errors import BadInput
from shards.messages import Pull, Push
from shards.transition_io import Arrival
from worker.strategies.base import Floats
from worker.training import step_machine as machine
from worker.training.step_machine import StepMachine
from worker.training.training_loop import ClientDriver

_START_S = 60.0
_MAX_OVERRUNS = 0.01


class RealRun(NamedTuple):
    """A real run: its records in the order of application, its weights, and the share of steps that
    were overruns: with more than a hundredth, the run is marked, and its times mean little."""

    job: SimulatedJob
    records: NDArray[np.void]
    weights: Floats
    seconds: float
    overruns: float

    @property
    def pacing(self) -> str:
        """The share of overruns in words, and the mark."""
        mark = ", MARKED as overrun" if self.overruns > _MAX_OVERRUNS else ""
        return f"{self.overruns:.1%} of the steps were overruns{mark}"


class Comparison(NamedTuple):
    """A real run, its replay, and a simulation of the same job.

    `distance` is the Kolmogorov-Smirnov distance of the histograms of staleness.
    """

    run: RealRun
    equal: bool
    simulated: NDArray[np.void]
    distance: float

    def __str__(self) -> str:
        real, simulated = self.run.records["staleness"], self.simulated["staleness"]
        return (
            f"{len(self.run.records)} updates, replayed:"
            f" {'the same weights, bit for bit' if self.equal else 'OTHER WEIGHTS'}; staleness"
            f" {real.mean():.2f} real, {simulated.mean():.2f} simulated, KS {self.distance:.3f};"
            f" {self.run.pacing}"
        )


def compare(trial: Trial) -> Comparison:
    """Run a trial for real, replay it, and simulate it."""
    workload = trial.problem()
    with threadpool_limits(1):
        run = run_real(trial, workload)
        equal = replay_run(run, workload).tobytes() == run.weights.tobytes()
        gradients = run.job.steps * trial.cluster.workers
        simulated = TrainingSimulation(run.job, workload).run(gradients).records
    return Comparison(run, equal, simulated, distance(run.records, simulated))


def run_real(trial: Trial, workload: Workload) -> RealRun:
    """Run a trial with a real shard, clients and threads; its gradients are shared out evenly.

    Raises BadInput for more than one shard, delays, joins and kills.
    """
    workers = trial.cluster.workers
    if trial.cluster.shards != 1:
        raise BadInput("a real run", expected="1 shard to replay", got=trial.cluster.shards)
    check_real(trial)
    job = structs.replace(trial.job(), steps=max(1, trial.gradients // workers))
    specs = job.specs(workload.table)
    with local_shards(specs, workload.start(job.seed)) as cluster:
        began = time.monotonic()
        with ThreadPoolExecutor(workers) as pool:
            start = Barrier(workers)
            # All workers register before the first one trains, as in the simulator.
            clients = [_client(job, cluster, number) for number in range(workers)]
            trainees = [
                Paced(job, workload, client, number, lambda: start.wait(_START_S))
                for number, client in enumerate(clients)
            ]
            overruns = sum(pool.map(_train, clients, trainees))
        seconds = time.monotonic() - began
        with AdminClient(cluster) as admin:
            (records,) = admin.records()
            weights = admin.read()
    return RealRun(job, records, weights, seconds, overruns / (workers * job.steps))


def check_real(trial: Trial) -> None:
    """Raise BadInput for a cluster that only the simulator has, and for fragments."""
    cluster = trial.cluster
    if trial.job().strategy.fragmented or trial.fragments > 1:
        raise BadInput("a real run", expected="a strategy of whole models", got=trial.strategy)
    if isinstance(trial.job().strategy, CachedSSP):
        raise BadInput("a real run", expected="a strategy without a cache", got=trial.strategy)
    if cluster.delays:
        raise BadInput("a real run", expected="no delays", got=cluster.delays)
    if not cluster.steady:
        raise BadInput("a real run", expected="a cluster without joins and kills", got="some")
    if cluster.partitions:
        raise BadInput("a real run", expected="a cluster without partitions", got="some")


def _client(job: SimulatedJob, cluster: Cluster, number: int) -> Client:
    link = job.cluster.links.get(worker_name(number), job.cluster.link) or None
    return Client(cluster, worker=worker_name(number), link=link)


def _train(client: Client, worker: "Paced") -> int:
    """Train until the end and sign off; returns the number of overruns."""
    with client:
        return worker.train()


class Paced:
    """One real worker: a client and a step machine, paced to the drawn times of its steps.

    It is the cluster's worker `number`. `wait` returns once all workers have weights.
    """

    def __init__(
        self,
        job: SimulatedJob,
        workload: Workload,
        client: Client,
        number: int,
        wait: Callable[[], object],
    ) -> None:
        self._workload, self._wait = workload, cast(Callable[[], object] | None, wait)
        self._times = job.cluster.step_times(job.seed, number)
        self._batches = workload.batches(job.seed, number)
        self._overruns = 0
        self._client = client
        self._machine = StepMachine(
            job.plan(number), workload.table, worker=worker_name(number), bound=job.real_bound
        )
        self._driver = ClientDriver(self._client, self._machine)

    def train(self) -> int:
        """Take all steps; returns the number of overruns."""
        self._machine.drive(self._carry_out)
        return self._overruns

    def _carry_out(self, want: machine.Want) -> machine.Answer:
        match want:
            case machine.PullWeights() if self._wait is not None:
                answer, wait = self._driver.carry_out(want), self._wait
                self._wait = None
                wait()  # no worker pushes before all have the first weights
                return answer
            case machine.ReadBatches():
                self._batch = next(self._batches)
                return machine.BatchesRead(len(self._batch))
            case machine.ComputeGradient():
                began, takes = time.monotonic(), next(self._times)
                gradient = self._client.new_gradient(zeroed=False)
                loss = self._workload.gradient(want.weights, self._batch, gradient)
                computed = time.monotonic() - began
                self._overruns += computed > takes / 2
                time.sleep(max(0.0, takes - computed))
                return machine.GradientComputed(gradient, loss, computed)
        return self._driver.carry_out(want)


# --- replay ---------------------------------------------------------------------------------------


def replay_run(run: RealRun, workload: Workload) -> Floats:
    """The weights that the recorded turns of a run lead to in the simulator.

    Raises BadInput for records that the job cannot have made.
    """
    replay = _Replay.of(run, workload)
    replay.follow(run.records)
    return replay.weights()


def measure_course(run: RealRun, workload: Workload, look_every: int) -> list[CurvePoint]:
    """Measurements of a real run's weights about every `look_every` updates, from its replay.

    Their times are those of the record. Raises BadInput as `replay_run` does.
    """
    replay = _Replay.of(run, workload)
    replay.follow(run.records, look_every)
    return replay.curve


class _Replay(TrainingSimulation):
    """A simulation in which pulls and pushes wait for their recorded turn."""

    def __init__(self, job: SimulatedJob, workload: Workload) -> None:
        self._delayed: dict[bytes, deque[Send]] = defaultdict(deque)
        super().__init__(job, workload)
        self.curve = [self._curve_point()]

    @classmethod
    def of(cls, run: RealRun, workload: Workload) -> "_Replay":
        """A replay without links: turns take the place of times."""
        instant = structs.replace(run.job.cluster, link="", links={})
        return cls(structs.replace(run.job, cluster=instant), workload)

    def carry(self, route: bytes, shard: int, sends: Sequence[Send], link: Link | None) -> None:
        """Hold pulls and pushes; registration has no turn."""
        for send in sends:
            if isinstance(send.message, Pull | Push):
                self._delayed[route].append(send)
            else:
                self.arrive(route, shard, [send])

    def follow(self, records: NDArray[np.void], look_every: int = 0) -> None:
        """Take the recorded turns; measure the weights every `look_every` updates (0: never)."""
        names = {worker_name(number): number for number in range(len(self.workers))}
        numbers = [names[name.decode()] for name in records["worker"]]
        reads = self._reads(numbers, records["read_version"].tolist())
        times, begin = records["time"].tolist(), 0
        passes = records["pass_pushes"].tolist()
        if passes and min(passes) < 1:
            raise BadInput("replay: pass_pushes", expected="1 or more", got=min(passes))
        while begin < len(numbers):
            self._answer_pulls(reads)
            end = begin + passes[begin]
            self._push(numbers[begin:end])
            begin = end
            if look_every and self.shards[0].version >= self.curve[-1].updates + look_every:
                self.curve.append(self._curve_point()._replace(seconds=times[begin - 1] - times[0]))

    def _reads(self, numbers: list[int], versions: list[int]) -> dict[int, deque[int]]:
        """The version that each worker's pulls were answered at, in order."""
        strategy = self.job.strategy
        share, rest = divmod(strategy.fetch_period, strategy.push_period)
        if rest and not strategy.exchanges:
            raise BadInput(
                "replay",
                expected="a push for every pull",
                got=(
                    f"{strategy.name} with a push every {strategy.push_period} steps "
                    f"and a pull every {strategy.fetch_period}"
                ),
            )
        every = 1 if strategy.exchanges else share
        first = [0] if strategy.exchanges else []  # the pull that no push follows
        pushes = {number: [*first] for number in range(len(self.workers))}
        pushed: dict[int, int] = defaultdict(int)
        for number, version in zip(numbers, versions, strict=True):
            if pushed[number] % every == 0:
                pushes[number].append(version)
            pushed[number] += 1
        return {number: deque(read) for number, read in pushes.items()}

    def _answer_pulls(self, reads: dict[int, deque[int]]) -> None:
        """Answer the pulls that read the present version; several, where a worker only pulled."""
        answered = True
        while answered:
            answered = False
            for number, versions in reads.items():
                delayed = self._delayed[route_of(number)]
                pulls = delayed and isinstance(delayed[0].message, Pull)
                if pulls and versions and versions[0] == self.shards[0].version:
                    versions.popleft()
                    self.arrive(route_of(number), 0, [delayed.popleft()])
                    self._compute()
                    answered = True

    def _push(self, numbers: list[int]) -> None:
        """Let a shard apply the pushes that it applied in one pass: their sum rounds otherwise."""
        arrivals = []
        for number in numbers:
            delayed = self._delayed[route_of(number)]
            if not delayed or not isinstance(delayed[0].message, Push):
                raise BadInput(f"{worker_name(number)}: the record has a turn that its job has not")
            send = delayed.popleft()
            message, frames = cast(Any, send.message), cast(Any, send.frames)
            arrivals.append(Arrival(route_of(number), message, frames))
        self.answer(0, self.shards[0].handle_together(arrivals, self.clock.now))
        self._compute()

    def _compute(self) -> None:
        """Let every worker that has weights compute until it sends a message."""
        self.clock.run(lambda: True, math.inf)
