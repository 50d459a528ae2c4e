"""A worker's life: pull, push integers, write down what was read and acknowledged, until SIGTERM.

It uses the SDK as any program does. A life that follows a killed one greets with a higher
incarnation, learns what its predecessor had applied, and checks that against the record: a shard
that knows less than was acknowledged has lost something, and one that knows more than was sent made
it up. Where shards roll back, what they may have lost is judged at the end (oracle.py).
"""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from ps import Cluster, DenseTable, TensorSpec
from ps.client import Client
from ps.shared_memory.client_buffers import PulledWeights
from ps.transport.link_emulator import LinkEmulator
from ps.transport.link_model import LinkModel
from shards.schedules import Fixed
from tests.chaos.forks import ChildLeaves, fork_log, fork_on_signal, leave_interpreter
from tests.chaos.journal import Acked, Began, Journal, Leaves, Pushes, Reads, Ready, contents
from tests.chaos.record import TABLE, Record, gradient, mark
from tests.chaos.reports import Learner
from tests.chaos.rows import CODEC, CODED, PLAIN, gather_for, has_rows, row_gradients
from worker.strategies import ADAG
from worker.training import step_machine as machine
from worker.training.step_machine import Plan, StepMachine

PATIENCE_S = 90.0
"""How long a silent shard is waited for: longer than any fault lasts."""
_ENDLESS = 2**31


class Life(msgspec.Struct, frozen=True):
    """What a life is told: who it is, where everything lies, and its pace.

    `burst` pushes go out before their acknowledgements are waited for; then it rests `rest_s`.
    `space` is a process whose network namespace it lives in, None for the harness's own. Where
    `rolls_back`, a shard that died may know less than it had acknowledged. `slow_s` is the delay of
    its link to the last shard, each way. With a `window` it takes that many local steps for each
    push, by a strategy with windows; with a `quorum` it is a learner (reports.py).
    """

    number: int
    workers: int
    incarnation: int
    folder: str
    cluster: str
    transport: str = "auto"
    burst: int = 1
    rest_s: float = 0.002
    retry_s: float = 0.1
    space: int | None = None
    rolls_back: bool = False
    slow_s: float = 0.0
    window: int = 0
    quorum: int = 0

    @property
    def name(self) -> str:
        return f"w{self.number}"

    @property
    def rows(self) -> bool:
        """Return whether it pushes and reads rows; a strategy with windows works without."""
        return has_rows(self.number) and not self.window


class _Ending:
    """Whether SIGTERM has asked for the end."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True


def live(life: Life) -> int:
    """Work until SIGTERM; returns the exit status, 0 when all was acknowledged and left."""
    try:
        return _live(life)
    except ChildLeaves:
        return leave_interpreter()


def _live(life: Life) -> int:
    ending = _Ending()
    folder = Path(life.folder)
    record, journal = Record(folder, life.name), Journal(folder, life.name)
    with ExitStack() as stack:
        cluster = Cluster.load(Path(life.cluster))
        if life.slow_s:
            cluster = stack.enter_context(_last_shard_slow(cluster, life.slow_s))
        journal.write(Began(time.monotonic()))
        client = stack.enter_context(
            Client(
                cluster,
                worker=life.name,
                incarnation=life.incarnation,
                transport=life.transport,
                retry_s=life.retry_s,
                patience_s=PATIENCE_S,
                in_flight=life.burst,
                compression={CODED.name: CODEC} if CODED in cluster.layout.sparse else None,
            )
        )
        journal.write(Ready(time.monotonic(), client.seq, _clock(client), life.incarnation))
        least = 0 if life.rolls_back else record.acknowledged
        if not least <= client.seq <= record.sent:
            print(
                f"{life.name}: taken over at push {client.seq}: expected {least}"
                f" (acknowledged) to {record.sent} (sent)",
                file=sys.stderr,
            )
            return 3
        fork_on_signal(client, fork_log(folder, life.name))
        if life.quorum:
            _learn(client, life, record, journal, ending)
            journal.write(Leaves(time.monotonic()))
            return 0
        _read(client, life, journal)  # shows what this life finds missing
        if life.window:
            _Windows(client, life, record, journal, ending).train()
        while not ending.asked:
            _read(client, life, journal)
            _push(client, life, record, journal)
            time.sleep(life.rest_s)
        journal.write(Leaves(time.monotonic()))
    return 0


def _learn(client: Client, life: Life, record: Record, journal: Journal, ending: _Ending) -> None:
    """Learn and report until SIGTERM."""
    learner = Learner(client, life.number, life.workers, life.quorum, life.rest_s, record, journal)
    learner.machine.drive(lambda want: learner.carry_out(want, ends=ending.asked))


class _Windows:
    """Trains by ADAG until SIGTERM: the mean of a window's equal integer steps is one of them.

    So a push holds what a push of single steps does, though the weights have taken `window` local
    steps, and the sums prove the count all the same.
    """

    def __init__(
        self, client: Client, life: Life, record: Record, journal: Journal, ending: _Ending
    ) -> None:
        self.client, self.life = client, life
        self.record, self.journal = record, journal
        self.ending = ending

    def train(self) -> None:
        plan = Plan(
            steps=_ENDLESS,
            seed=1,
            strategy=ADAG(window=self.life.window),
            schedule=Fixed(base_rate=1.0),
            workers=self.life.workers,
        )
        arena = DenseTable("arena", (TensorSpec("of all tables", (self.client.layout.size,)),))
        clock, step = self.client.clock, self.client.step
        steps = StepMachine(plan, arena, worker=self.life.name, clock=clock, step=step)
        steps.drive(self.carry_out)

    def carry_out(self, want: machine.Want) -> machine.Answer:
        match want:
            case machine.ReadBatches():
                return machine.BatchesRead(0 if self.ending.asked else 1)
            case machine.PullWeights():
                pulled = _read(self.client, self.life, self.journal)
                return machine.WeightsPulled(pulled.weights, pulled.versions)
            case machine.ComputeGradient():
                step = self.client.new_gradient()
                seq, life = self.client.seq + 1, self.life
                gradient(step, life.number, life.workers, seq, life.incarnation)
                return machine.GradientComputed(step, 1.0)
            case machine.PushContribution():
                self._push(want)
        return None

    def _push(self, want: machine.PushContribution) -> None:
        asked, seq = time.monotonic(), self.client.seq + 1
        self.record.sends(seq)
        self.journal.write(Pushes(time.monotonic(), seq))
        self.client.push(
            want.contribution, read_versions=want.versions, steps=want.steps, ticks=want.ticks
        )
        _await_acks(self.client, asked, self.record, self.journal)
        time.sleep(self.life.rest_s)


def _read(client: Client, life: Life, journal: Journal) -> PulledWeights:
    asked, before = time.monotonic(), _clock(client)
    gather = gather_for(life.workers) if life.rows else None
    pulled = client.pull(gather=gather)
    at, shard_map = time.monotonic(), client.cluster.map
    # The worker may be put ahead just before or just after it is answered: the lower clock is the
    # one for which the bound held for certain.
    clock = min(before, _clock(client))
    rows = None if gather is None else (gather, pulled.rows[PLAIN.name])
    held = contents(pulled.weights, pulled.versions, shard_map, life.workers, rows)
    journal.write(Reads(asked, at, clock, client.seq, shard_map.epoch, held))
    return pulled


def _push(client: Client, life: Life, record: Record, journal: Journal) -> None:
    asked = time.monotonic()
    for _ in range(life.burst):
        seq = client.seq + 1
        array = client.new_gradient()
        gradient(array, life.number, life.workers, seq, life.incarnation)
        record.sends(seq)
        journal.write(Pushes(time.monotonic(), seq))
        if life.rows:
            rows = row_gradients(life.number, mark(seq, life.incarnation))
            client.push({TABLE: array, **rows}, loss=1.0)
        else:
            client.push(array, loss=1.0)
    _await_acks(client, asked, record, journal)


def _await_acks(client: Client, asked: float, record: Record, journal: Journal) -> None:
    client.flush()
    at = time.monotonic()
    journal.write(Acked(asked, at, client.seq, _clock(client)))
    record.hears(client.seq, at)


def _clock(client: Client) -> int:
    """The worker's clock as the shards are given it."""
    return client.clock + client._current.session.ahead


@contextmanager
def _last_shard_slow(cluster: Cluster, delay_s: float) -> Iterator[Cluster]:
    """The cluster, with the last of its shards behind a slow link."""
    *others, last = cluster.endpoints
    slow = LinkEmulator([last], LinkModel(rtt_s=2 * delay_s))
    try:
        yield msgspec.structs.replace(cluster, endpoints=(*others, *slow.endpoints))
    finally:
        slow.close()
