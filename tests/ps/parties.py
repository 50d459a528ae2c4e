"""The two parties of the simulated network: a life of a worker, and the host of a shard.

A life drives a real session as the blocking client does, without blocking. A host holds everything
that its real shard answers against the promises before it lets it travel.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ps.events import Departed, Event, Pulled, Pushed, Ready, Send
from ps.feedback import ERROR
from ps.session import Session
from shards import codec
from shards.errors import Fenced
from shards.ledger import Ledger
from shards.messages import (
    AskRecords,
    Export,
    Install,
    Joined,
    Pull,
    Records,
    Renew,
    Standing,
    State,
    Weights,
)
from shards.records import RECORD
from shards.shard import Arrival, Outgoing, Shard
from shards.state import Saved
from shards.views import Change, Views

if TYPE_CHECKING:
    from tests.ps.network import Network

JOB, BUILD = "sim-job", "sim-build"
SCALE = 12  # divisible by every size of a round up to four
BLOCK = 256
PUMP_S = 0.1
PATIENCE_S = 60.0
HORIZON_S = 600.0

Array = NDArray[np.float32]


def applied(weights: Array, number: int) -> tuple[float, float]:
    """What a shard's weights hold of worker `number`: how many pushes, and the sum of their seq."""
    return -weights[2 * number] / SCALE, -weights[2 * number + 1] / SCALE


class Life:
    """One incarnation of a worker: pull, compute, push, until its plan is done."""

    def __init__(self, net: "Network", number: int, incarnation: int) -> None:
        self.net, self.number, self.incarnation = net, number, incarnation
        self.name = f"w{number}"
        self.address = f"{self.name}/{incarnation}".encode()
        self.alive, self.departed, self.computing = True, False, False
        self.frozen_until = 0.0
        self.step = self.clock = 0
        self.ready: Ready | None = None
        self.versions = (0,) * net.setting.shards
        self.pulled: dict[int, Pulled] = {}
        self.asked: list[tuple[int, int]] = []
        self.session = Session(
            job=JOB,
            worker=self.name,
            incarnation=incarnation,
            build=BUILD,
            table=net.table,
            shard_map=net.map,
            retry_s=0.5,
            patience_s=PATIENCE_S,
            compression=net.setting.compression,
        )

    def __repr__(self) -> str:
        asked = f"asked for {self.asked}, {self.session.unacknowledged} pushes in flight"
        return f"{self.name}/{self.incarnation} at step {self.step}, clock {self.clock}, {asked}"

    def begin(self) -> None:
        self.net.send(self, self.session.hello(self.net.now))
        self.net.every(PUMP_S, self, lambda: self.net.send(self, self.session.tick(self.net.now)))
        self.net.every(self.net.setting.lease_s / 4, self, self._renew)

    def _check_views(self, pulled: Pulled) -> None:
        """Of one view, both ends hold the same floats; and what is pulled is one of them."""
        for number, view in self.session._views.items():
            assert pulled.versions[number] <= view.version
            kept = self.net.hosts[number].views[view.number]
            assert b"".join(map(bytes, view.frames)) == kept, "another view than was sent"

    def residual(self) -> Array:
        """What its compressed pushes have not brought yet."""
        feedback = self.session.feedback
        return self.net.table.empty() if feedback is None else feedback.state()[ERROR]

    def _renew(self) -> None:
        if self.ready is not None and not self.departed:
            for shard, boot in enumerate(self.session.boots):
                renew = Renew(0, JOB, self.name, self.incarnation, boot)
                self.net.send(self, [Send(shard, renew)])

    def receive(self, shard: int, header: bytes, frames: Sequence[Array]) -> None:
        reply = codec.decode_reply(header)
        try:
            sends, events = self.session.receive(
                shard, reply, [codec.wrap([frame])[0] for frame in frames], self.net.now
            )
        except Fenced:
            assert self.net.lives[self.number] is not self, "only a former life is fenced"
            self.alive = False
            return
        self.net.send(self, sends)
        for event in events:
            self._note(event)

    def _note(self, event: Event) -> None:
        match event:
            case Ready():
                assert event.seq == event.step, "one push a step"
                self.ready, self.step, self.clock = event, event.step, event.clock
            case Pulled():
                self._check_views(event)
                for version, former in zip(event.versions, self.versions, strict=True):
                    assert version >= former, f"{self.name} read {version} after {former}"
                self.pulled[event.request] = event
            case Pushed():
                for host in self.net.hosts:
                    applied = host.shard.ledger.entries[self.name].seq
                    assert applied >= event.seq, f"acknowledged {event.seq}, applied {applied}"
            case Departed():
                self.departed = True
        self._go_on()

    def _go_on(self) -> None:
        """Do whatever comes next, if it can be done now."""
        if self.computing or self.departed:
            return
        setting, session = self.net.setting, self.session
        if self.step >= setting.steps:
            if not session.unacknowledged:
                self.departed = True
                self.net.send(self, session.leave(self.net.now))
            return
        if not self.asked:
            self._ask(self.clock)
        request, _ = self.asked[0]
        if request in self.pulled and session.unacknowledged < setting.in_flight:
            self.asked.pop(0)
            self.versions = self.pulled.pop(request).versions
            if setting.prefetch and self.step + 1 < setting.steps:
                self._ask(self.clock + 1)
            self.computing = True
            self.net.after(self.net.random.expovariate(1.0), self, self._push)

    def _ask(self, clock: int) -> None:
        request, sends = self.session.pull(clock, self.net.now)
        self.asked.append((request, clock))
        self.net.send(self, sends)

    def _push(self) -> None:
        self.computing = False
        self.step, self.clock = self.step + 1, self.clock + 1
        _, sends = self.session.push(
            self.net.gradient(self.number, self.session.seq + 1),
            self.versions,
            clock=self.clock,
            step=self.step,
            steps=1,
            samples=1,
            loss=0.0,
            rtt_s=0.0,
            wait_s=0.0,
            now=self.net.now,
        )
        self.net.send(self, sends)
        self._go_on()


class WatchedViews(Views):
    """Notes each view that a shard has led a worker to, by its number."""

    def __init__(self, shard: Shard, seen: dict[int, bytes]) -> None:
        super().__init__(shard.spec.map.ranges[shard.spec.shard], shard.boot)
        self._seen = seen

    def serve(self, worker: str, *told: Any) -> Change:
        change = super().serve(worker, *told)
        self._seen[change.number] = self._views[worker].weights.tobytes()
        return change


class Host:
    """A shard, its lives, and the checks on everything that it answers."""

    def __init__(self, net: "Network", number: int) -> None:
        self.net, self.number = net, number
        self.shard = Shard(net.spec(number), boot=1)
        self.waiting: list[Arrival] = []
        self.rows: list[NDArray[np.void]] = []
        self.pull_clocks: dict[tuple[bytes, int], int] = {}
        self.admissions: dict[bytes, int] = {}
        self.views: dict[int, bytes] = {}
        self._watch_views()
        blank = codec.encode_state(Saved(0, 0, 0, Ledger()))
        self._operate(Install(1, JOB, net.table.name, []), (blank, bytes(4 * BLOCK)))

    def _operate(
        self, message: Install | Export | AskRecords, frames: Sequence[bytes] = ()
    ) -> Outgoing:
        (answer,) = self.shard.handle(b"operator", message, frames, self.net.now)
        return answer

    def handle(self, sender: bytes, header: bytes, frames: Sequence[Array]) -> None:
        message = codec.decode_request(header)
        if isinstance(message, Pull):
            self.pull_clocks[sender, message.request] = message.clock
        if not self.waiting:
            self.net.after(self.net.setting.busy_s, None, self._take_turn)
        self.waiting.append(Arrival(sender, message, codec.wrap(frames)))

    def _take_turn(self) -> None:
        """As the server loop does: whatever came while it was busy is dealt with together."""
        arrivals, self.waiting = self.waiting, []
        self._look(self.shard.handle_together(arrivals, self.net.now))

    def tick(self) -> None:
        answers = self.shard.tick(self.net.now)
        entries = self.shard.ledger.entries.values()
        self.net.calm &= all(entry.standing is not Standing.EXPIRED for entry in entries)
        self._look(answers)

    def _look(self, answers: Sequence[Outgoing]) -> None:
        """Hold every answer against the promises, then let it travel."""
        shard, bound = self.shard, self.net.setting.bound
        entries = shard.ledger.entries
        active = {n: e for n, e in entries.items() if e.standing is Standing.ACTIVE}
        slowest = min((entry.clock for entry in active.values()), default=None)
        for answer in answers:
            if isinstance(answer.message, Joined):
                self.admissions.setdefault(answer.to, answer.message.clock)
        for answer in answers:
            if isinstance(answer.message, Weights):
                (frame,) = answer.frames
                assert isinstance(frame, np.ndarray)
                clock = self.pull_clocks[answer.to, answer.message.request]
                if bound is not None and slowest is not None:
                    assert clock - bound <= slowest, f"pull at {clock}, slowest at {slowest}"
                    self._check_freshness(frame, clock - bound, list(active))
            self.net.answer(self.number, answer)
        if bound is not None:
            assert shard.ledger.clock_gap <= bound + 1, f"gap {shard.ledger.clock_gap}"
            assert shard.journal.max_clock_gap <= bound + 1
        for waiting in shard.gate._parked.values():
            assert not shard._may_go(waiting.message), f"left waiting: {waiting.message}"

    def _check_freshness(self, frame: Array, least: int, active: list[str]) -> None:
        """In calm weather the served weights themselves hold what the bound demands."""
        for life in self.net.lives.values():
            if self.net.calm and life.name in active:
                # It counts from where it was admitted, and had pushed nothing then.
                owed = least - self.admissions[life.address]
                assert applied(frame, life.number)[0] >= owed, "staler than the bound"

    def _watch_views(self) -> None:
        self.shard._serving._views = WatchedViews(self.shard, self.views)

    def restart(self) -> None:
        """Die, and come back from what was exported last: just now."""
        self.collect()
        answer = self._operate(Export(2, JOB, self.net.table.name))
        assert isinstance(answer.message, State)
        frames = [f if isinstance(f, bytes) else f.tobytes() for f in answer.frames]
        self.waiting.clear()
        self.shard = Shard(self.shard.spec, self.shard.boot + 1)
        self._watch_views()
        self._operate(Install(3, JOB, self.net.table.name, answer.message.slots), frames)

    def collect(self) -> None:
        answer = self._operate(AskRecords(4, JOB, self.net.table.name, 0))
        assert isinstance(answer.message, Records)
        assert isinstance(answer.frames[0], bytes)
        self.rows.append(np.frombuffer(answer.frames[0], RECORD))

    def check_sums(self) -> None:
        """Every push of every worker was applied once, in order, and is in the weights."""
        self.collect()
        rows = np.concatenate(self.rows)
        sizes = dict(zip(*np.unique(rows["apply_version"], return_counts=True), strict=True))
        read = self.shard._serving.whole(0)[1][0]
        assert isinstance(read, np.ndarray)
        for number, life in self.net.lives.items():
            # The share of each push in the update that it became a part of.
            mine = rows[rows["worker"] == life.name.encode()]
            assert mine["seq"].tolist() == list(range(1, self.net.setting.steps + 1))
            assert np.all(np.diff(mine["incarnation"]) >= 0), "a former life wrote"
            shares = [SCALE // sizes[row["apply_version"]] for row in mine]
            wanted = (sum(shares), sum(s * row["seq"] for s, row in zip(shares, mine, strict=True)))
            left = life.residual()[BLOCK * self.number :]
            kept = (left[2 * number], left[2 * number + 1])
            assert (kept[0] - read[2 * number], kept[1] - read[2 * number + 1]) == wanted
