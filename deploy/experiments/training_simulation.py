"""The training simulator: real workers and shards on a virtual clock, with real gradients.

Each worker is a step machine with its strategy and a session; each shard is the real one, with its
gate, ledger, aggregation and rule. Only time is simulated: a step takes a drawn time, and a message
takes as long as the model of its link says. A gradient is computed when its step begins, because
the weights that it is computed from do not change any more. The same job and seed give the same
bytes.

trace_training.py makes the same weights without messages, for the jobs that it knows.

What it leaves out, because it costs no virtual time here: the processors' time of shards and
encoding, the queue of a busy shard, retransmissions (a lost packet delays), and a client's limit of
pushes in flight.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from deploy.experiments.cached_ssp import CachedSSP, WorkerCache
from deploy.experiments.cluster import HEADER_BYTES, Link, WorkerKill, worker_name
from deploy.experiments.fragment_cut import FragmentCut
from deploy.experiments.jobs import SimulatedJob
from deploy.experiments.problem import Batch, Workload
from deploy.virtual_clock import Clock
from ps.session.events import Pulled, Pushed, Ready, Send
from ps.session.flow_control import PushTimes
from ps.session.session import Session
from shards.errors import BadInput
from shards.ledger import Ledger
from shards.shard import Shard
from shards.shard_state import WEIGHTS, SavedProgress, ShardState, array_name
from shards.transition_io import Outgoing
from worker.strategies.base import Floats
from worker.training import step_machine as machine
from worker.training.fragment_machine import build_machine
from worker.training.step_machine import StepMachine

_COLLECTED = 1 << 16  # records that shard 0 keeps until they are collected; it holds twice as many


class CurvePoint(NamedTuple):
    """A measurement of the shards' weights, and what it took to get there.

    `updates` counts the versions of shard 0, `gradients` those of all workers.
    """

    updates: int
    gradients: int
    seconds: float
    loss: float
    error: float


class Course(NamedTuple):
    """One run: its measurements and the records of shard 0's updates (shards/update_records.py).

    `diverged_at` is the update at which a gradient or the weights were no longer finite, or None.
    `compute_s` are the virtual seconds that all workers computed for.
    """

    curve: list[CurvePoint]
    records: NDArray[np.void]
    seconds: float
    gradients: int
    diverged_at: int | None
    compute_s: float = 0.0

    @property
    def final(self) -> CurvePoint:
        return self.curve[-1]

    def first_below(self, error: float) -> CurvePoint | None:
        """The first measurement with at most this error in percent; None if there is none."""
        return next((point for point in self.curve if point.error <= error), None)


class Deadlock(BadInput):
    """Nothing will happen any more, and the gradients wanted are not computed."""


class TrainingSimulation:
    """A job under way; `run` takes it to a number of gradients."""

    def __init__(self, job: SimulatedJob, workload: Workload) -> None:
        self.job, self.workload = job, workload
        self.cut = FragmentCut(workload.table, job.fragments)
        self.layout = self.cut.layout
        self.floats = self.layout.size  # the layout computes it at each call
        self.clock = Clock(job.seed)
        specs = job.specs(self.layout)
        self.map = specs[0].map
        self.shards = [Shard(spec, boot=1) for spec in specs]
        self._merges: list[float | None] = [None] * len(specs)  # the next planned tick of each
        start = self.cut.spread(workload.start(job.seed))
        for shard in self.shards:
            arrays = {
                array_name(part.table, WEIGHTS): start[part.start : part.start + len(part.keys)]
                for part in self.layout.sections(shard.spec.keys)
            }
            shard.restore(ShardState(SavedProgress(0, 0, 0, Ledger()), arrays))
        self.gradients, self.compute_s = 0, 0.0
        self._records: list[NDArray[np.void]] = []
        self._collected = 0
        self.workers = [SimulatedTrainee(self, number) for number in range(job.cluster.workers)]
        self._routes = {worker.route: worker for worker in self.workers}
        for worker in self.workers:
            joins_s = job.cluster.joins.get(worker.name)
            if joins_s is None:
                worker.greet()
            else:
                self.clock.at(joins_s, worker.greet)
        for kill in job.cluster.kill:
            self.clock.at(kill.at_s, self._kill, kill)

    def run(self, gradients: int, *, look_every: int = 0, until_error: float = -1.0) -> Course:
        """Train until this number of gradients has been computed, and measure the weights.

        Also measures every `look_every` gradients (0: only at the start and the end), and ends
        early at an error of at most `until_error` percent. A run that diverges ends with the error
        of a guess.
        """
        curve = [self._curve_point()]
        diverged_at = None
        while self.gradients < gradients and curve[-1].error > until_error:
            aim = min(gradients, self.gradients + (look_every or gradients))
            try:
                self.advance(aim)
            except Deadlock:
                raise
            except BadInput:  # a shard refuses a gradient that is not finite
                diverged_at = self.shards[0].version
            curve.append(self._curve_point())
            if diverged_at is None and not math.isfinite(curve[-1].loss):
                diverged_at = self.shards[0].version
            if diverged_at is not None:
                curve[-1] = curve[-1]._replace(loss=math.nan, error=self.workload.worst_error)
                break
        self._collect()
        records = np.concatenate(self._records)
        return Course(curve, records, self.clock.now, self.gradients, diverged_at, self.compute_s)

    def weights(self) -> Floats:
        """The shards' weights as the problem has them, in an array of its own."""
        arena = self.layout.empty()
        for shard in self.shards:
            self.map.cut(arena, shard.spec.shard)[:] = shard.parameters.weights()
        return self.cut.gather(arena)

    def gradient(self, weights: Floats, batch: Batch) -> machine.GradientComputed:
        """The gradient at these weights, of the fragments' arena, and the loss."""
        gradient = np.empty(self.workload.table.size, np.float32)
        loss = self.workload.gradient(self.cut.gather(weights), batch, gradient)
        return machine.GradientComputed(self.cut.spread(gradient), loss)

    def advance(self, gradients: int) -> None:
        """Train until this number of gradients has been computed."""
        goes = self.clock.run(lambda: self.gradients < gradients, math.inf)
        if not goes:
            raise Deadlock("every worker waits for another; check the staleness bound")
        if self.shards[0].metrics.pushes - self._collected > _COLLECTED:
            self._collect()

    def _collect(self) -> None:
        first, rows = self.shards[0].metrics.since(self._collected)
        assert first == self._collected, "no record was dropped"
        self._records.append(rows)
        self._collected += len(rows)

    def _curve_point(self) -> CurvePoint:
        measured = self.workload.measure(self.weights())
        updates = self.shards[0].version
        return CurvePoint(updates, self.gradients, self.clock.now, measured.loss, measured.error)

    def carry(self, route: bytes, shard: int, sends: Sequence[Send], link: Link | None) -> None:
        """Carry what a worker sends to a shard, over its link if there is one."""
        if link is None:
            self.arrive(route, shard, sends)
        else:
            at = link.up(_bytes(sends), self.clock.now)
            self.clock.at(at, self.arrive, route, shard, sends)

    def arrive(self, route: bytes, shard: int, sends: Sequence[Send]) -> None:
        """Let a shard handle what a worker has sent, and send its answers on their way."""
        now, host = self.clock.now, self.shards[shard]
        outs: list[Outgoing] = []
        for send in sends:
            outs += host.handle(route, send.message, send.frames, now)  # type: ignore[arg-type]
        self.answer(shard, outs)
        self._plan_merge(shard)

    def _plan_merge(self, shard: int) -> None:
        """Plan the tick that a shard wants for reports that wait, as its driver does."""
        at = self.shards[shard].next_merge(self.clock.now)
        if at is not None and at != self._merges[shard]:
            self._merges[shard] = at
            self.clock.at(max(at, self.clock.now), self._merge, shard, at)

    def _merge(self, shard: int, planned: float) -> None:
        if planned == self._merges[shard]:  # otherwise an earlier one has been planned since
            self._merges[shard] = None
            self.answer(shard, self.shards[shard].tick(self.clock.now))
            self._plan_merge(shard)

    def answer(self, shard: int, outs: Sequence[Outgoing]) -> None:
        """Send a shard's answers on their way, those to one worker together."""
        if len(outs) == 1 and outs[0].to in self._routes:  # the usual case, at no cost
            self._routes[outs[0].to].carry_answers(shard, outs)
            return
        answers: dict[bytes, list[Outgoing]] = defaultdict(list)
        for out in outs:
            answers[out.to].append(out)
        for receiver, together in answers.items():
            if receiver in self._routes:  # a worker that was killed hears nothing any more
                self._routes[receiver].carry_answers(shard, together)

    # --- kills and returns ------------------------------------------------------------------------

    def _kill(self, kill: WorkerKill) -> None:
        worker = self.workers[kill.worker]
        if self._routes.pop(worker.route, None) is None:
            return  # it is dead already
        worker.alive = False
        incarnation = worker.session.incarnation
        self.clock.after(self.job.cluster.lease_s, self._expire, kill.worker, incarnation)
        if kill.back_s is not None:
            self.clock.after(kill.back_s, self._return, kill.worker)

    def _expire(self, number: int, incarnation: int) -> None:
        """End the lease of a worker that has not returned."""
        worker = self.workers[number]
        if not worker.alive and worker.session.incarnation == incarnation:
            for shard, host in enumerate(self.shards):
                self.answer(shard, host.expire([worker.name], self.clock.now))
                self._plan_merge(shard)

    def _return(self, number: int) -> None:
        worker = self.workers[number] = SimulatedTrainee(self, number, self.workers[number])
        self._routes[worker.route] = worker
        worker.greet()


class Streams(NamedTuple):
    """A worker's random streams, and its link to each shard; both outlive restarts."""

    times: Iterator[float]
    ages: Iterator[int]
    batches: Iterator[Batch]
    links: list[Link | None]

    @classmethod
    def of(cls, world: TrainingSimulation, number: int) -> "Streams":
        cluster, seed = world.job.cluster, world.job.seed
        return cls(
            cluster.step_times(seed, number),
            cluster.ages(seed, number),
            world.workload.batches(seed, number),
            [cluster.link_between(seed, number, shard) for shard in range(len(world.shards))],
        )


class SimulatedTrainee:
    """One worker: its step machine, its session, its link to each shard, and what it waits for.

    A worker that returns continues with the batches and step times of its `former` incarnation.
    """

    def __init__(
        self, world: TrainingSimulation, number: int, former: "SimulatedTrainee | None" = None
    ) -> None:
        job = world.job
        self._world = world
        spec = world.shards[0].spec
        incarnation = 0 if former is None else former.session.incarnation + 1
        self.name: str = worker_name(number)
        self.route: bytes = route_of(number, incarnation)
        self.alive = True
        self.session: Session = Session(
            job=spec.job,
            worker=self.name,
            incarnation=incarnation,
            layout=spec.layout,
            shard_map=spec.map,
        )
        self._number = number
        self.machine = self._machine(0, 0)
        self.streams: Streams = Streams.of(world, number) if former is None else former.streams
        self._links = self.streams.links
        self._cache: WorkerCache | None = None
        if isinstance(job.strategy, CachedSSP):
            assert job.bound is not None, "as its check demands"
            self._cache = WorkerCache(job.bound)
        self._pulls: deque[machine.WeightsPulled] = deque(maxlen=job.cluster.delays + 1)
        self._batch: Batch | None = None
        self._wants = self.machine.wants()
        self._asked: int | None = None  # the request for the weights that the machine waits for
        self._fragments = RequestedFragments()
        self._outbox: list[Send] = []
        # Since the last push: the time at the gate, or for a fragment, and in steps.
        self._waited_s = self._computed_s = 0.0
        self._ending = False

    def _machine(self, clock: int, step: int) -> StepMachine:
        job, layout = self._world.job, self._world.layout
        return build_machine(
            job.plan(self._number),
            layout,
            worker=self.name,
            clock=clock,
            step=step,
            bound=job.real_bound,
        )

    # --- messages ---------------------------------------------------------------------------------

    def greet(self) -> None:
        """Register with every shard; the first step follows."""
        self._outbox += self.session.hello(self._world.clock.now)
        self._send()

    def _send(self) -> None:
        """Send what has collected: all messages of one moment to a shard travel together."""
        sends, self._outbox = self._outbox, []
        if len(self._links) == 1:
            self._world.carry(self.route, 0, sends, self._links[0])
            return
        by_shard: dict[int, list[Send]] = defaultdict(list)
        for send in sends:
            by_shard[send.shard].append(send)
        for shard, together in by_shard.items():
            self._world.carry(self.route, shard, together, self._links[shard])

    def carry_answers(self, shard: int, outs: Sequence[Outgoing]) -> None:
        """Carry a shard's answers to this worker."""
        link, clock = self._links[shard], self._world.clock
        if link is None:
            self._receive(shard, outs)
        else:
            clock.at(link.down(_bytes(outs), clock.now), self._receive, shard, outs)

    def _receive(self, shard: int, outs: Sequence[Outgoing]) -> None:
        if not self.alive:
            return
        now = self._world.clock.now
        for out in outs:
            message: Any = out.message
            sends, events = self.session.receive(shard, message, cast(Any, out.frames), now)
            self._outbox += sends
            for event in events:
                if isinstance(event, Pulled) and event.request == self._asked:
                    self._asked = None
                    self._fragments.begin(now)
                    self._waited_s += event.waited_s
                    pulled = self._keep_pull(event)
                    if self._cache is not None:
                        self._cache.keep(pulled, self._world.shards[0].ledger.min_clock or 0)
                    self._resume(pulled)
                elif isinstance(event, Pulled):
                    self._keep_fragment(event, now)
                elif isinstance(event, Pushed):
                    if event.dropped:
                        self._fragments.late_s = event.late_s
                elif isinstance(event, Ready):
                    if event.step:
                        self.machine = self._machine(event.clock, event.step)
                        self._wants = self.machine.wants()
                    self._resume(None)
        if self._ending and not self.session.pending_pushes:
            self._ending = False
            self._outbox += self.session.leave(
                now
            )  # as a client does, so that rounds go without it
        if self._outbox:
            self._send()

    def _keep_pull(self, event: Pulled) -> machine.WeightsPulled:
        arena = np.empty(self._world.floats, np.float32)
        for shard, sent in enumerate(event.frames):
            self._world.map.fill(arena, shard, sent)
        self._pulls.appendleft(machine.WeightsPulled(arena, event.versions))
        if len(self._pulls) == 1:
            return self._pulls[0]
        return self._pulls[min(next(self.streams.ages), len(self._pulls) - 1)]

    def _keep_fragment(self, event: Pulled, now: float) -> None:
        """Keep a table that was requested; the machine continues with it if it waits for it."""
        weights = np.concatenate(
            [np.frombuffer(part[0], np.float32) for part in event.frames if part]
        )
        self._fragments.keep(event.request, weights, event.versions)
        if self._fragments.ends_wait(event.request):
            self._waited_s += now - self._fragments.waits_since
            self._resume(self._fragments.take())

    # --- steps ------------------------------------------------------------------------------------

    def _resume(self, answer: machine.Answer) -> None:
        """Carry out wants until one takes time."""
        send = self._wants.send
        while True:
            want = send(answer)
            match want:
                case machine.ReadBatches():
                    self._batch = next(self.streams.batches)
                    answer = machine.BatchesRead(len(self._batch))
                case machine.PullWeights():
                    if self._cache is not None:
                        answer = self._cache.read(want.clock)
                        if answer is not None:
                            continue
                    now = self._world.clock.now
                    self._asked, sends = self.session.pull(want.clock, now)
                    self._outbox += sends
                    return
                case machine.ComputeGradient():
                    self._compute(want)
                    return
                case machine.PushContribution():
                    self._push(want)
                    answer = None
                case machine.PushReport():
                    self._report(want)
                    answer = None
                case machine.TakeFragment():
                    now = self._world.clock.now
                    answer = self._fragments.look_for(want, now)
                    if answer is None and want.wait:
                        return
                case machine.FlushPushes():
                    self._ending = True  # the end of the plan
                    return
                case _:
                    raise AssertionError(f"the plan of an experiment does not want {want}")

    def _compute(self, want: machine.ComputeGradient) -> None:
        world = self._world
        assert self._batch is not None
        computed = world.gradient(want.weights, self._batch)
        takes_s = next(self.streams.times)
        world.clock.after(takes_s, self._finish_step, computed, takes_s)

    def _finish_step(self, computed: machine.GradientComputed, took_s: float) -> None:
        if not self.alive:
            return
        self._world.gradients += 1
        self._world.compute_s += took_s
        self._computed_s += took_s
        self._resume(computed)
        if self._outbox:
            self._send()

    def _push(self, want: machine.PushContribution) -> None:
        if self._cache is not None:
            schedule = self.machine.plan.schedule
            scale = self._world.job.strategy.server(self._world.job.cluster.workers).scale
            self._cache.apply_own(want.contribution, scale * schedule.rate(self.machine.step))
        self._send_push(want.contribution, want, want.ticks)

    def _report(self, want: machine.PushReport) -> None:
        """Push a report, and request its table in the same message."""
        now = self._world.clock.now
        self._fragments.note_report(want.steps, now)
        self._send_push(want.reports, want, 1, tokens=want.tokens, window=want.window)
        if want.clock is not None:
            request, sends = self.session.pull(want.clock, now, tuple(want.reports))
            self._fragments.requests[want.clock] = request
            self._outbox += sends

    def _send_push(
        self,
        gradient: Floats | Mapping[str, Floats],
        want: machine.PushContribution | machine.PushReport,
        ticks: int,
        *,
        tokens: int = 0,
        window: int = 0,
    ) -> None:
        _, sends = self.session.push(
            gradient,
            want.versions,
            clock=self.machine.clock + ticks,
            step=self.machine.step + want.steps,
            steps=want.steps,
            samples=want.samples,
            loss=want.loss,
            times=PushTimes(self.session.rtt_s, self._waited_s, self._computed_s),
            now=self._world.clock.now,
            tokens=tokens,
            window=window,
        )
        self._waited_s = self._computed_s = 0.0
        self._outbox += sends


class RequestedFragments:
    """The tables that a worker has requested, and those that have come, each by itself.

    It also measures by how many steps a late report should have come earlier, as a real worker's
    driver does (worker/training/training_loop.py).
    """

    def __init__(self) -> None:
        self.requests: dict[int, int] = {}  # by the clock that the machine names
        self.late_s = self.waits_since = 0.0
        self._arrived: dict[int, machine.FragmentTaken] = {}  # by request
        self._awaited: int | None = None  # the clock of the table that the machine waits for
        self._reported_at, self._step_s = 0.0, 1.0

    def begin(self, now: float) -> None:
        """Note that the first weights have come, so that steps begin."""
        self._reported_at = now

    def note_report(self, steps: int, now: float) -> None:
        """Measure the length of the steps since the last report."""
        self._step_s = (now - self._reported_at) / max(1, steps)
        self._reported_at = now

    def keep(self, request: int, weights: Floats, versions: tuple[int, ...]) -> None:
        """Keep a table that has come."""
        self._arrived[request] = machine.FragmentTaken(weights, versions)

    def look_for(self, want: machine.TakeFragment, now: float) -> machine.FragmentTaken | None:
        """The table if it has come; otherwise note that the machine waits, if it does."""
        if self.requests[want.clock] in self._arrived:
            return self._take(want.clock)
        if want.wait:
            self._awaited, self.waits_since = want.clock, now
        return None

    def ends_wait(self, request: int) -> bool:
        """Return whether the machine waits for this request's answer."""
        return self._awaited is not None and self.requests[self._awaited] == request

    def take(self) -> machine.FragmentTaken:
        """The table that the machine has waited for."""
        assert self._awaited is not None
        clock, self._awaited = self._awaited, None
        return self._take(clock)

    def _take(self, clock: int) -> machine.FragmentTaken:
        taken = self._arrived.pop(self.requests.pop(clock))
        late_s, self.late_s = self.late_s, 0.0
        late = math.ceil(late_s / self._step_s) if late_s and self._step_s else 0
        return taken._replace(late=late)


def route_of(number: int, incarnation: int = 0) -> bytes:
    """Where the shards send a worker's answers."""
    return b"%d.%d" % (number, incarnation)


def _bytes(messages: Sequence[Send | Outgoing]) -> int:
    """The bytes of messages that travel together."""
    frames: list[Any] = [frame for message in messages for frame in message.frames]
    return HEADER_BYTES * len(messages) + sum(memoryview(frame).nbytes for frame in frames)
