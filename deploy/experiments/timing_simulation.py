"""The timing simulator: who applies what when, for thousands of workers, without gradients.

It answers what a cluster would do: staleness, waits, updates a second. The gate, the strategy's
questions and the models of step times and links are the real ones. The rest
reproduces, for one shard and for speed, the order in which sessions and shards exchange messages; a
test compares every record with the training simulator's, which runs the real session, ledger and
aggregation.

All that happens between two messages of a worker is known beforehand, so an update costs one event:
the messages that the worker sends at the end of a window, a push and the next pull, travel
together. Gradients may be computed in this order (trace_training.py); then the end of each step is
an event as well. Workers that are too late for a round may `cancel` their step, as K-sync SGD
assumes (Dutta et al. 2018). Downpour's own workers finish it, and the push is dropped.
"""

import heapq
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deploy.experiments.cached_ssp import CachedSSP
from deploy.experiments.cluster import HEADER_BYTES, Link, worker_name
from deploy.experiments.jobs import SimulatedJob
from shards.aggregation import Buffer, Round
from shards.errors import BadInput
from shards.gate import Gate
from shards.messages import Join, Pull

TIMED = np.dtype(
    [
        ("time", "<f8"),
        ("worker", "<i4"),
        ("read_version", "<i8"),
        ("apply_version", "<i8"),
        ("staleness", "<i8"),
        ("clock_gap", "<i8"),
        ("wait_s", "<f8"),
        ("dropped", "<i1"),
    ]
)
"""A record of the timing simulator; the columns mean what they mean in shards/update_records.py."""

_NONE = -1  # no push, or no pull, in a flight
_AT_ONCE = 0  # before every other order
_Row = tuple[float, int, int, int, int, int, float, bool]


class Timing(NamedTuple):
    """A run without gradients: its records of dtype TIMED, and what they add up to.

    `wait_share` is the share of all workers' time that they waited at the gate.
    """

    records: NDArray[np.void]
    seconds: float
    updates: int
    wait_share: float


class TimedWorker:
    """The state of a worker in the simulator.

    `session_clock` is what its session counts, `clock` the one that counts at the gate; `base` is
    the version that the steps not pushed yet were computed from. `turn` numbers its plans: an
    arrival of an earlier one is ignored. `pulled` has its last versions, the newest first, and
    `age` is the number of the one that its steps see; a cached copy was pulled when the slowest
    clock was `copied_at`.
    """

    __slots__ = (
        "acks", "age", "ages", "base", "clock", "copied_at", "draw", "exchanging", "in_round",
        "link", "name", "number", "pulled", "pushed_at", "read", "session_clock", "step", "turn",
        "unpushed", "wait_s",
    )  # fmt: skip

    def __init__(self, number: int, job: SimulatedJob) -> None:
        cluster, seed = job.cluster, job.seed
        self.number, self.name = number, worker_name(number)
        self.draw = cluster.step_times(seed, number)
        self.link: Link | None = cluster.link_between(seed, number, 0)
        self.ages = cluster.ages(seed, number)
        self.pulled: deque[int] = deque(maxlen=cluster.delays + 1)
        self.age = self.copied_at = 0
        self.step = self.unpushed = self.session_clock = self.clock = self.base = self.read = 0
        self.turn = self.acks = 0
        self.wait_s = 0.0
        self.in_round = self.exchanging = False


class Flight(NamedTuple):
    """Messages of one worker that travel together: the clock of a push, and of a pull, or _NONE.

    `took_s` is what a step that ends with it took, or _NONE if none does.
    """

    at: float
    order: int
    worker: TimedWorker
    turn: int
    push: int
    base: int
    pull: int
    took_s: float

    @property
    def pushes(self) -> bool:
        return self.push >= 0


class TimingSimulation:
    """A job without gradients. `payload_bytes` is the size of a push and of weights.

    With `on_read` each step ends with a flight, and the function is called with the number of a
    worker that the shard sends weights to, and how many pulls older are those that it reads.
    `next_flight` and `land` then take turns.
    """

    def __init__(
        self,
        job: SimulatedJob,
        *,
        payload_bytes: int = 0,
        cancel: bool = False,
        on_read: Callable[[int, int], None] | None = None,
    ) -> None:
        cluster, strategy = job.cluster, job.strategy
        if cluster.shards > 1:
            raise BadInput("timing", expected="1 shard, as all would see the same order of updates")
        if not cluster.steady:
            raise BadInput("timing", expected="a cluster without joins and kills", got="some")
        if job.stale is not None:
            raise BadInput("timing: on_stale", expected="wait", got="scale or drop")
        if strategy.warm_up:
            raise BadInput("timing", expected="a strategy without a warm start")
        if strategy.fragmented:
            expected = "a strategy of whole models"
            raise BadInput("timing", expected=expected, got=strategy.name)
        if cancel and (
            cluster.link or cluster.links or strategy.windowed or strategy.fetch_period > 1
        ):
            raise BadInput("timing: cancel", expected="no link, and a pull before every step")
        strategy.check(job.real_bound, prefetch=False)
        self.version = 0
        self._gate = Gate(job.real_bound)
        self._strategy = strategy
        self._delays = cluster.delays
        self._cache_bound = job.bound if isinstance(strategy, CachedSSP) else None
        merge = strategy.server(cluster.workers).merge
        self._size = merge.size if isinstance(merge, Buffer) else 1
        self._rounds = isinstance(merge, Round)
        self._backups = merge.backups if isinstance(merge, Round) else 0
        self._cancel = cancel
        self._sent_bytes = HEADER_BYTES + payload_bytes
        self._ticks = None if not strategy.windowed else 1
        self._on_read = on_read
        self.now = 0.0
        self._buffered = 0
        self._round: list[tuple[TimedWorker, int, int]] = []
        self._rows: list[_Row] = []
        self._planned: list[Flight] = []
        self._order = 0
        self._workers = [TimedWorker(number, job) for number in range(cluster.workers)]
        self._by_name = {worker.name: worker for worker in self._workers}
        # The number of workers at each clock shows the slowest without a look at all of them.
        self._at = {0: cluster.workers}
        self._slowest = self._fastest = self._released = 0
        for worker in self._workers:
            self._greet(worker)

    def run(self, updates: int) -> Timing:
        """Simulate until this number of pushes has been applied or dropped."""
        rows = self._rows
        while len(rows) < updates:
            self.land(self.next_flight())
        records = np.array(rows[:updates], TIMED)
        waited = float(records["wait_s"].sum()) / (len(self._workers) * self.now)
        return Timing(records, self.now, int(records["apply_version"].max()), waited)

    def next_flight(self) -> Flight:
        """The next messages to arrive, at the time that it then is; raises BadInput if none will.

        Nothing has changed yet: `land` is to follow.
        """
        planned = self._planned
        while planned:
            flight = heapq.heappop(planned)
            if flight.turn == flight.worker.turn:
                self.now = flight.at
                return flight
        raise BadInput("every worker waits for another; check the staleness bound")

    @property
    def follows_at_once(self) -> bool:
        """True if the next flight belongs to the moment of the last one."""
        return bool(self._planned) and self._planned[0].order == _AT_ONCE

    @property
    def waiting_records(self) -> int:
        """The number of records since the last call of `take_records`."""
        return len(self._rows)

    def take_records(self) -> NDArray[np.void]:
        """The records since the last call, which are no longer kept."""
        records = np.array(self._rows, TIMED)
        self._rows.clear()
        return records

    # --- what a worker does -----------------------------------------------------------------------

    def _greet(self, worker: TimedWorker) -> None:
        """Hello and Join, a round trip each without arrays; then the first pull."""
        link, at = worker.link, 0.0
        if link is not None:
            for _ in range(2):
                at = link.down(HEADER_BYTES, link.up(HEADER_BYTES, at))
        self._send(worker, at, _NONE, self._pull_clock(worker))

    def _send(
        self,
        worker: TimedWorker,
        at: float,
        push: int,
        pull: int,
        took_s: float = _NONE,
        *,
        follows: bool = False,
    ) -> None:
        """Send a push, a pull, or both, at the time `at`, at which a step of `took_s` may end.

        What `follows` arrives before all else.
        """
        if self._on_read and worker.link is not None and took_s >= 0:
            self._end_step(worker, at, took_s)
            took_s = _NONE
        if worker.link is not None:
            size = (push >= 0) * self._sent_bytes + (pull >= 0) * HEADER_BYTES
            at = worker.link.up(size, at)
        self._order += 1
        order = _AT_ONCE if follows else self._order
        flight = Flight(at, order, worker, worker.turn, push, worker.base, pull, took_s)
        heapq.heappush(self._planned, flight)

    def _end_step(self, worker: TimedWorker, at: float, took_s: float) -> None:
        """Plan the end of a step that no message leaves at, or one over a link."""
        self._order += 1
        flight = Flight(at, self._order, worker, worker.turn, _NONE, worker.base, _NONE, took_s)
        heapq.heappush(self._planned, flight)

    def _compute(self, worker: TimedWorker, at: float) -> None:
        """Take steps from the time `at` until a pull is due; plan what arrives on the way."""
        strategy = self._strategy
        while True:
            if not worker.unpushed:
                worker.base = worker.read
            took_s = next(worker.draw)
            at += took_s
            step = worker.step
            worker.step = step + 1
            worker.unpushed += 1
            pushes, push = strategy.pushes(step), _NONE
            if pushes and strategy.exchanges:
                worker.exchanging = True
                self._send(worker, at, _NONE, worker.session_clock, took_s)
                return
            if pushes:
                push = self._count_push(worker)
            pulls = strategy.fetches(step + 1) and not self._reads_cache(worker)
            if pushes or pulls:
                clock = self._pull_clock(worker) if pulls else _NONE
                self._send(worker, at, push, clock, took_s)
            elif self._on_read:
                self._end_step(worker, at, took_s)
            if pulls or self._cache_bound is not None:
                return

    def _count_push(self, worker: TimedWorker) -> int:
        worker.session_clock += self._ticks or worker.unpushed
        worker.unpushed = 0
        return worker.session_clock

    def _reads_cache(self, worker: TimedWorker) -> bool:
        """Return whether the worker's copy is new enough for its next step (cached_ssp.py)."""
        if self._cache_bound is None:
            return False
        return worker.session_clock - self._cache_bound <= worker.copied_at

    def _pull_clock(self, worker: TimedWorker) -> int:
        """The clock of the last step that the weights will serve, as the step machine asks."""
        if self._ticks:
            return worker.session_clock
        period = self._strategy.fetch_period
        return worker.session_clock + worker.unpushed + period - worker.step % period - 1

    # --- what the shard does ----------------------------------------------------------------------

    def land(self, flight: Flight) -> None:
        """Let the shard handle the messages of a flight."""
        worker = flight.worker
        closed = False
        if flight.push >= 0:
            if flight.pull < 0 and self._cache_bound is not None:
                self._compute(worker, self.now)  # a cached copy needs no answer
            worker.acks += 1
            if self._rounds:
                closed = self._join_round(worker, flight.push, flight.base)
            else:
                self._apply(worker, flight.push, flight.base)
        if flight.pull >= 0 and not self._rounds:
            self._pull(worker, flight.pull)  # its answer leaves with the acknowledgement
        if flight.push >= 0:
            if self._gate.parked and (closed or self._slowest > self._released):
                self._release()
            if closed and self._cancel:
                self._cancel_late(worker)
        if flight.pull >= 0 and self._rounds:
            self._pull(worker, flight.pull)
        if worker.acks and not worker.in_round and (flight.push >= 0 or flight.pull >= 0):
            if worker.link is not None:
                worker.link.down(worker.acks * HEADER_BYTES, self.now)
            worker.acks = 0

    def _pull(self, worker: TimedWorker, clock: int) -> None:
        """Answer a pull, or park it."""
        if worker.in_round or not self._gate.passes(clock, self._slowest):
            self._park(worker, clock)
        else:
            self._read(worker, 0.0)

    def _park(self, worker: TimedWorker, clock: int) -> None:
        pull = Pull(0, "", worker.name, 0, 0, 0, clock, [])
        self._gate.park(b"", pull, self.now)

    def _release(self) -> None:
        """Answer the parked pulls that may pass."""
        self._released = slowest = self._slowest
        for waiting in self._gate.release(lambda pull: self._may_go(pull, slowest)):
            self._read(self._by_name[waiting.message.worker], self.now - waiting.since)

    def _may_go(self, pull: Pull | Join, slowest: int) -> bool:
        in_round = self._by_name[pull.worker].in_round
        return not in_round and self._gate.passes(pull.clock, slowest)

    def _read(self, worker: TimedWorker, waited_s: float) -> None:
        """Send weights to a worker; it then pushes what it exchanges, and takes its next steps."""
        worker.read, worker.copied_at = self.version, self._slowest
        if self._delays:
            worker.pulled.appendleft(self.version)
            kept = len(worker.pulled) - 1
            worker.age = min(next(worker.ages), kept) if kept else 0
            worker.read = worker.pulled[worker.age]
        worker.wait_s += waited_s
        if self._on_read:
            self._on_read(worker.number, worker.age)
        at = self.now
        if worker.link is not None:
            at = worker.link.down(self._sent_bytes + worker.acks * HEADER_BYTES, at)
        worker.acks = 0
        if worker.exchanging:
            worker.exchanging = False
            worker.base = worker.read
            self._send(worker, at, self._count_push(worker), _NONE, follows=worker.link is None)
        self._compute(worker, at)

    def _apply(self, worker: TimedWorker, clock: int, base: int) -> None:
        """Apply a push by itself, or add it to the buffer."""
        before = self.version
        self._buffered += 1
        if self._buffered >= self._size:
            self._buffered = 0
            self.version = before + 1
        self._note(worker, clock, before, base)

    def _join_round(self, worker: TimedWorker, clock: int, base: int) -> bool:
        """Keep a push for its round, or drop it; returns whether the round was complete."""
        if self._backups and base < self.version:
            self._note(worker, clock, self.version, base, dropped=True)
            return False
        worker.in_round = True
        self._round.append((worker, clock, base))
        if len(self._round) < len(self._workers) - self._backups:
            return False
        members, before = self._round, self.version
        self._round = []
        self.version = before + 1
        reached = max(max(pushed, member.clock + 1) for member, pushed, _ in members)
        for member, pushed, read in sorted(members, key=lambda entry: entry[0].name):
            self._note(member, pushed, before, read)
            member.in_round = False
        if self._backups:
            for other in self._workers:
                self._raise_clock(other, reached)
        return True

    def _cancel_late(self, closing: TimedWorker) -> None:
        """Let the workers that the round just closed left out pull new weights at once."""
        for worker in self._workers:
            if worker is not closing and worker.base < self.version:
                worker.turn += 1
                worker.unpushed = 0
                self._read(worker, 0.0)

    def _note(
        self, worker: TimedWorker, clock: int, before: int, base: int, *, dropped: bool = False
    ) -> None:
        """Record a push that was applied to version `before`, or dropped there."""
        self._raise_clock(worker, clock)
        staleness = before - base if before > base else 0
        gap, version = self._fastest - self._slowest, before if dropped else before + 1
        self._rows.append(
            (self.now, worker.number, base, version, staleness, gap, worker.wait_s, dropped)
        )
        worker.wait_s = 0.0

    def _raise_clock(self, worker: TimedWorker, clock: int) -> None:
        former = worker.clock
        if clock <= former:
            return
        worker.clock = clock
        at = self._at
        at[clock] = at.get(clock, 0) + 1
        self._fastest = max(self._fastest, clock)
        at[former] -= 1
        if not at[former]:
            del at[former]
            while self._slowest not in at:
                self._slowest += 1
