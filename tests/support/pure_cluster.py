"""Workers and shards without a network, a clock or threads: step machines, sessions and shards.

Each turn carries out one want of one worker, in an order that the test gives. So an interleaving is
data, and what happened is a list of events that an oracle can repeat.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ps import DenseTable, TensorSpec
from ps.job_spec import shard_specs
from ps.session.events import Pulled, Send
from ps.session.session import Session
from shards.ledger import Ledger
from shards.rules import SGD, Decay, Rule
from shards.schedules import Fixed
from shards.shard import Shard
from shards.shard_state import WEIGHTS, SavedProgress, ShardState, array_name
from worker.strategies import Local, Strategy
from worker.training import step_machine as machine
from worker.training.fragment_machine import build_machine
from worker.training.step_machine import Plan

Floats = NDArray[np.float32]
Gradient = Callable[[int, int, Floats], Floats]
Event = tuple[str, int]

TABLE = DenseTable(
    "net", (TensorSpec("a", (300,)), TensorSpec("b", (7, 40), lr_mult=2.0, decay_mult=0.0))
)
RATE, DECAY = 0.05, 0.01


def start(table: DenseTable = TABLE) -> Floats:
    """The weights that training starts from; zero in the padding."""
    arena = table.empty()
    dice = np.random.default_rng(5)
    for view in table.views(arena).values():
        view[...] = dice.standard_normal(view.shape, np.float32)
    return arena


def bowl(worker: int, step: int, weights: Floats) -> Floats:
    """The gradient of a quadratic loss whose minimum differs from batch to batch."""
    dice = np.random.default_rng(1000 * worker + step)
    gradient = TABLE.empty()
    for name, view in TABLE.views(gradient).items():
        at = TABLE.views(weights)[name]
        steep = np.linspace(0.1, 1.0, at.size, dtype=np.float32).reshape(at.shape)
        view[...] = steep * (at - dice.standard_normal(at.shape, np.float32))
    return gradient


class PureWorker:
    """One worker: its machine, its session, and what it waits for."""

    def __init__(self, cluster: "PureCluster", number: int, plan: Plan) -> None:
        self.cluster, self.number = cluster, number
        first = cluster.shards[0].spec
        self.session = Session(
            job=first.job,
            worker=f"w{number}",
            incarnation=0,
            layout=first.layout,
            shard_map=first.map,
        )
        self.machine = build_machine(
            plan, cluster.table, worker=f"w{number}", bound=first.bound, ahead=cluster.ahead
        )
        self.pulled: dict[int, machine.WeightsPulled] = {}  # by request
        self.asked: dict[int, int] = {}  # requests by clock
        self.done = False
        self.wants = self.machine.wants()
        self.want: machine.Want = next(self.wants)

    def turn(self) -> None:
        """Carry out the present want, unless it has to wait."""
        ready, answer = self._answer(self.want)
        if not ready:
            return
        try:
            self.want = self.wants.send(answer)
        except StopIteration:
            self.done = True
            self.cluster.events.append(("leave", self.number))
            self.cluster.deliver(self.number, self.session.leave(0.0))

    def _answer(self, want: machine.Want) -> tuple[bool, machine.Answer]:
        match want:
            case machine.ReadBatches():
                return True, machine.BatchesRead(want.batches)
            case machine.PullWeights():
                self._ask(want.clock)
                if self.asked[want.clock] not in self.pulled:
                    return False, None
                for clock in want.prefetch:
                    self._ask(clock)
                return True, self.pulled.pop(self.asked.pop(want.clock))
            case machine.ComputeGradient():
                self.cluster.events.append(("step", self.number))
                gradient = self.cluster.gradient(self.number, want.step, want.weights)
                return True, machine.GradientComputed(gradient, 1.0)
            case machine.PushContribution():
                self._push(want)
                return True, None
            case machine.PushReport():
                self._report(want)
                return True, None
            case machine.TakeFragment():
                return self._take(want)
        return self.session.pending_pushes == 0, None

    def _ask(self, clock: int) -> None:
        if clock not in self.asked:
            self.asked[clock], sends = self.session.pull(clock, 0.0)
            self.cluster.deliver(self.number, sends)

    def _take(self, want: machine.TakeFragment) -> tuple[bool, machine.Answer]:
        if self.asked[want.clock] not in self.pulled:
            return not want.wait, None
        pulled = self.pulled.pop(self.asked.pop(want.clock))
        self.cluster.events.append(("take", self.number))
        return True, machine.FragmentTaken(pulled.weights, pulled.versions)

    def _report(self, want: machine.PushReport) -> None:
        if want.reports:
            self.cluster.events.append(("push", self.number))
        _, sends = self.session.push(
            want.reports,
            want.versions,
            clock=self.machine.clock + 1,
            step=self.machine.step + want.steps,
            steps=want.steps,
            samples=want.samples,
            loss=want.loss,
            now=0.0,
            tokens=want.tokens,
            window=want.window,
        )
        self.cluster.deliver(self.number, sends)
        if want.clock is not None:
            self._ask(want.clock)

    def _push(self, want: machine.PushContribution) -> None:
        self.cluster.events.append(("push", self.number))
        _, sends = self.session.push(
            want.contribution,
            want.versions,
            clock=self.machine.clock + want.ticks,
            step=self.machine.step + want.steps,
            steps=want.steps,
            samples=want.samples,
            loss=want.loss,
            now=0.0,
        )
        self.cluster.deliver(self.number, sends)
        if want.prefetch is not None:
            self._ask(want.prefetch)


class PureCluster:
    """Shards and workers that take turns."""

    def __init__(
        self,
        strategy: Strategy,
        *,
        workers: int = 1,
        steps: int = 12,
        shards: int = 2,
        bound: int | None = None,
        rule: Rule | None = None,
        rate: float = RATE,
        decay: float = DECAY,
        gradient: Gradient = bowl,
        prefetch: bool = False,
        ahead: int = 1,
        table: DenseTable = TABLE,
        begin: Floats | None = None,
    ) -> None:
        self.table = table
        self.strategy = strategy = strategy.for_workers(workers)
        half = strategy.server(workers)
        plan = Plan(
            steps=steps,
            seed=1,
            strategy=strategy,
            schedule=Fixed(base_rate=rate),
            prefetch=prefetch,
            decay=Decay(decay) if half.deltas else Decay(),
            workers=workers,
        )
        specs = shard_specs(
            table,
            shards=shards,
            rule=half.rule or (SGD() if half.deltas else rule),
            schedule=rate if half.rate is None else half.rate,
            decay=0.0 if half.deltas else decay,
            bound=0 if strategy.synchronous else bound,
            workers=workers,
            merge=half,
            lease_s=1e5,
        )
        self.gradient, self.ahead = gradient, ahead
        self.events: list[Event] = []
        self.shards = [Shard(spec, boot=1) for spec in specs]
        for shard in self.shards:
            part = specs[0].map.cut(start(table) if begin is None else begin, shard.spec.shard)
            arrays = {array_name(table.name, WEIGHTS): part}
            shard.restore(ShardState(SavedProgress(0, 0, 0, Ledger()), arrays))
        self.workers = [PureWorker(self, number, plan) for number in range(workers)]
        for worker in self.workers:
            self.deliver(worker.number, worker.session.hello(0.0))

    def deliver(self, number: int, sends: Sequence[Send]) -> None:
        """Carry messages to the shards, and their answers to the workers, until none is left."""
        queue = deque((number, send) for send in sends)
        while queue:
            sender, send = queue.popleft()
            shard = self.shards[send.shard]
            outs = shard.handle(b"%d" % sender, send.message, send.frames, 0.0)  # type: ignore[arg-type]
            if shard.next_merge(0.0) is not None:  # no step takes time, so no grace does
                outs += shard.tick(0.0)
            for out in outs:
                more = self._receive(int(out.to), send.shard, out.message, out.frames)
                queue.extend((int(out.to), one) for one in more)

    def _receive(self, number: int, shard: int, message: Any, frames: Any) -> list[Send]:
        worker = self.workers[number]
        sends, events = worker.session.receive(shard, message, frames, 0.0)
        for event in events:
            if isinstance(event, Pulled):
                self.events.append(("pull", number))
                arena = self.table.empty()
                for place, sent in enumerate(event.frames):
                    self.shards[0].spec.map.fill(arena, place, sent)
                worker.pulled[event.request] = machine.WeightsPulled(
                    arena, event.versions, self.ahead
                )
        return sends

    def run(self, order: Iterable[int] | None = None) -> Floats:
        """Let the workers take turns, in this order again and again; returns the weights."""
        turns = cycle(list(order) if order is not None else range(len(self.workers)))
        idle = 0
        while not all(worker.done for worker in self.workers):
            worker = self.workers[next(turns)]
            before = worker.want
            if not worker.done:
                worker.turn()
            idle = idle + 1 if worker.done or worker.want is before else 0
            assert idle < 1000, "every worker waits for another"
        return self.weights()

    def weights(self) -> Floats:
        """The shards' weights."""
        arena = self.table.empty()
        for shard in self.shards:
            shard.spec.map.cut(arena, shard.spec.shard)[:] = shard.parameters.weights()
        return arena

    def local(self, number: int) -> Local:
        """A worker's local state."""
        local = self.workers[number].machine.local
        assert local is not None
        return local

    def records(self) -> NDArray[np.void]:
        """The update records of shard 0."""
        return self.shards[0].metrics.since(0)[1]
