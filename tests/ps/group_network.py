"""Replicated shards on the simulated network: processes die, stop and lose sight of each other.

Each shard is a group of processes under one coordinator, whose record survives it. Processes are
killed only while their group is in sync and whole, which is what `replicated` promises to survive;
stops, cuts, broken connections and the coordinator's own deaths come at any time. A process that
dies or retires is followed by an empty one. Everything is checked as it happens:

- what a worker is told is applied is held by every copy that the coordinator's record may promote;
- a backup's state after an entry is the primary's after that entry, bit for bit;
- whoever answers has accepted no older configuration than anybody who answered before, unless what
  it answers changes nothing;
- in the end the weights hold every push once.
"""

import hashlib
import random
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ps.coordinator import Coordinator, Decision, Group
from ps.events import Send
from shards import codec
from shards.group import Assignment, Beat, Replicate
from shards.ledger import Ledger
from shards.messages import Ack, Install, Pull, Refusal, Remedy
from shards.replica import Effects, Post, Replica
from shards.shard import Outgoing, Shard
from shards.state import Saved
from tests.ps.network import Network, Setting
from tests.ps.parties import BLOCK, JOB, Array, Host, Life, applied

if TYPE_CHECKING:
    from collections.abc import Callable

BEAT_S = 0.1
SILENCE_S = 0.35
REBIRTH_S = 2.0


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """How often each thing goes wrong with the copies."""

    deaths: int = 4
    stops: int = 3
    splits: int = 3
    coordinator_deaths: int = 2


class Process:
    """One life of one copy."""

    def __init__(self, group: "Copies", boot: int) -> None:
        self.group, self.boot = group, boot
        self.alive, self.frozen_until = True, 0.0
        spec = group.net.spec(group.number)
        self.replica = Replica(group.number, boot, lambda: Shard(spec, boot), retry_s=0.4)

    def __repr__(self) -> str:
        return f"{self.boot}: alive {self.alive}, {self.replica.beat()}"


class Copies(Host):
    """All processes of one shard, and what they answer."""

    net: "GroupNetwork"

    def __init__(self, net: "GroupNetwork", number: int) -> None:
        self.net, self.number = net, number
        self.pull_clocks: dict[tuple[bytes, int], int] = {}
        self.admissions: dict[bytes, int] = {}
        self.processes: dict[int, Process] = {}
        self._digests: dict[tuple[int, int], bytes] = {}
        self.installed = False
        self.acknowledged: dict[str, int] = {}

    @property
    def holder(self) -> Process:
        """Who serves, or who would: the holder of the newest settled configuration."""
        record = self.net.record[self.number]
        assert record.settled is not None
        living = [self.processes[boot] for boot in record.promotable if self.processes[boot].alive]
        return living[0]

    @property
    def shard(self) -> Shard:  # type: ignore[override]
        return self.holder.replica.shard

    def begin(self) -> None:
        process = Process(self, next(self.net.boots))
        self.processes[process.boot] = process

        def beat() -> None:
            self.net.report(process, process.replica.beat())

        def tick() -> None:
            self.perform(process, process.replica.tick(self.net.now))

        self.net.every_of(process, BEAT_S, beat)
        self.net.every_of(process, 0.2, tick)

    def install(self, process: Process) -> None:
        """The operator gives the first primary its weights, and asks until it is done."""
        blank = codec.encode_state(Saved(0, 0, 0, Ledger()))
        message = Install(1, JOB, self.net.table.name, [])
        self.installed = True
        self.perform(
            process,
            process.replica.handle(b"operator", message, (blank, bytes(4 * BLOCK)), self.net.now),
        )

    def perform(self, process: Process, effects: Effects) -> None:
        """Check what a replica wants done, and do it."""
        replica = process.replica
        if replica.serving:
            self._digests.setdefault((self._epoch(process), replica.position), self.digest(process))
        answers = [answer for answer in effects.answers if answer.to != b"operator"]
        for answer in answers:
            if isinstance(answer.message, Ack):
                self._note_acknowledged(process, answer)
            self.net.reply(process, answer)
        for post in effects.posts:
            self.net.post(process, post)
        if effects.beat is not None:
            self.net.report(process, effects.beat)
        if replica.retired and process.alive:
            process.alive = False
            self.net.after(REBIRTH_S, None, self.begin)

    def handle_at(
        self, process: Process, sender: bytes, header: bytes, frames: Sequence[Array]
    ) -> None:
        message = codec.decode_request(header)
        if isinstance(message, Pull):
            self.pull_clocks[sender, message.request] = message.clock
        self.perform(
            process, process.replica.handle(sender, message, codec.wrap(frames), self.net.now)
        )

    def receive_at(self, process: Process, origin: int, post: Post) -> None:
        frames = [frame.data if isinstance(frame, np.ndarray) else frame for frame in post.frames]
        before = process.replica.position
        effects = process.replica.receive(origin, post.message, frames, self.net.now)
        replica = process.replica
        if isinstance(post.message, Replicate) and replica.position == before + 1:
            theirs = self._digests.get((post.message.epoch, replica.position))
            assert theirs in (None, self.digest(process)), "the backup is another shard"
        self.perform(process, effects)

    @staticmethod
    def digest(process: Process) -> bytes:
        """Weights, slots and what the ledger says of pushes and clocks."""
        shard = process.replica.shard
        found = hashlib.blake2b()
        for array in (shard.held._weights, *shard.held._slots):
            if array is not None:
                found.update(array.tobytes())
        for name, entry in sorted(shard.ledger.entries.items()):
            found.update(f"{name} {entry.incarnation} {entry.seq} {entry.clock}".encode())
            found.update(f"{entry.step} {entry.standing} {shard.version}".encode())
        return found.digest()

    @staticmethod
    def _epoch(process: Process) -> int:
        active = process.replica._active
        return active.epoch if active else 0

    def _note_acknowledged(self, process: Process, answer: Outgoing) -> None:
        assert isinstance(answer.message, Ack)
        worker = self.net.life_at(answer.to).name
        self.acknowledged[worker] = max(answer.message.seq, self.acknowledged.get(worker, 0))
        self.check_held(f"{process} acknowledges push {answer.message.seq} of {worker}")

    def check_held(self, when: str) -> None:
        """Every acknowledged push is in every copy that may be promoted."""
        for boot in self.net.record[self.number].promotable:
            entries = self.processes[boot].replica.shard.ledger.entries
            for worker, seq in self.acknowledged.items():
                held = entries[worker].seq if worker in entries else 0
                assert held >= seq, (
                    f"shard {self.number}, when {when}: copy {boot} holds {held} pushes of"
                    f" {worker}, {seq} are acknowledged; {self.net.record[self.number]}"
                )

    def check_sums(self) -> None:
        """Every push of every worker is in the weights once, or its share of a round's mean is."""
        weights = self.shard.held.weights()
        for number, life in self.net.lives.items():
            entry = self.shard.ledger.entries[life.name]
            assert entry.seq == self.net.setting.steps
            if self.net.setting.workers == 1 or self.net.setting.merge.value == "each":
                steps = self.net.setting.steps
                assert applied(weights, number) == (steps, steps * (steps + 1) / 2)


class GroupNetwork(Network):
    """A run with replicated shards."""

    hosts: "list[Copies]"  # type: ignore[assignment]

    def __init__(self, setting: Setting, faults: Faults, seed: int) -> None:
        self.boots = count(1)
        self.faults = faults
        self.record: dict[int, Group] = {shard: Group() for shard in range(setting.shards)}
        self.coordinator: Coordinator | None = Coordinator(setting.shards, silence_s=SILENCE_S)
        self.deaths = 0
        self._breaks = random.Random(seed)
        self._routes: dict[tuple[int, int], int] = {}
        self._splits: dict[frozenset[int], float] = {}
        super().__init__(setting, seed)

    def make_host(self, shard: int) -> Copies:
        return Copies(self, shard)

    def run(self) -> "GroupNetwork":
        for copies in self.hosts:
            copies.begin()
            self.after(0.5, None, copies.begin)
        self.every(SILENCE_S / 3, None, self._look_around)
        for accident, times in (
            (self._death, self.faults.deaths),
            (self._stop, self.faults.stops),
            (self._split, self.faults.splits),
            (self._coordinator_death, self.faults.coordinator_deaths),
        ):
            for _ in range(times):
                self.after(self.random.uniform(1, self.setting.quiet_s), None, accident)
        super().run()
        return self

    def tick_hosts(self) -> None:
        """Processes tick by themselves."""

    def life_at(self, address: bytes) -> Life:
        return self._addresses[address]

    def every_of(self, process: Process, period_s: float, action: "Callable[[], None]") -> None:
        """Repeat while a process lives; not while it is stopped."""

        def again() -> None:
            if process.alive:
                if process.frozen_until <= self.now:
                    action()
                self.after(period_s, None, again)

        self.after(self.random.uniform(0, period_s), None, again)

    # --- carrying ---------------------------------------------------------------------------------

    def at(self, process: Process, action: "Callable[[], None]") -> None:
        """Do it at a process: when it thaws, if it is stopped; never, if it is dead."""
        if process.frozen_until > self.now:
            self.after(process.frozen_until - self.now, None, lambda: self.at(process, action))
        elif process.alive:
            action()

    def send(self, life: Life, sends: Sequence[Send]) -> None:
        for send in sends:
            copies = self.hosts[send.shard]
            process = self._route(life, copies)
            if process is None:
                continue
            header, frames = codec.encode(send.message), send.frames

            def deliver(
                process: Process = process, header: bytes = header, frames: Sequence[Array] = frames
            ) -> None:
                self.at(
                    process,
                    lambda: process.group.handle_at(process, life.address, header, frames),
                )

            self._carry((life.number, send.shard), None, frames, deliver)

    def _route(self, life: Life, copies: Copies) -> Process | None:
        """The copy that this worker believes in; a dead one is found out and another tried."""
        living = [process for process in copies.processes.values() if process.alive]
        believed = self._routes.get((life.number, copies.number))
        for process in living:
            if process.boot == believed:
                return process
        if not living:
            return None
        chosen = self.random.choice(living)
        self._routes[life.number, copies.number] = chosen.boot
        return chosen

    def reply(self, process: Process, answer: Outgoing) -> None:
        """To the worker; told that a copy does not serve, it tries another."""
        refused = isinstance(answer.message, Refusal) and answer.message.remedy is Remedy.RETRY
        life = self._addresses[answer.to]
        key = life.number, process.group.number
        if refused and self._routes.get(key) == process.boot:
            del self._routes[key]
        self.answer(process.group.number, answer)

    def _carried(self, ends: frozenset[int], deliver: "Callable[[], None]") -> None:
        """Between processes, 0 being the coordinator: late, lost, doubled or cut off."""

        def arrive() -> None:
            if self._splits.get(ends, 0.0) <= self.now:
                deliver()

        luck = 1.0 if self.now > self.setting.quiet_s else self.random.random()
        copies = 0 if luck < self.setting.drop / 4 else 1 + (luck > 1 - self.setting.duplicate / 4)
        for _ in range(copies):
            self.after(self.random.uniform(0.001, 0.05), None, arrive)

    def post(self, process: Process, post: Post) -> None:
        other = process.group.processes[post.to]

        def deliver() -> None:
            # What a killed process had queued may never have left it.
            if process.alive or self.random.random() < 0.5:
                self.at(other, lambda: other.group.receive_at(other, process.boot, post))

        self._carried(frozenset({process.boot, other.boot}), deliver)

    def report(self, process: Process, beat: Beat) -> None:
        self._carried(frozenset({0, process.boot}), lambda: self._heard(beat))

    def _heard(self, beat: Beat) -> None:
        if self.coordinator is not None:
            self._decide(self.coordinator.hear(beat, self.now))

    def _look_around(self) -> None:
        if self.coordinator is not None:
            self._decide(self.coordinator.tick(self.now))

    def _decide(self, decision: Decision) -> None:
        if decision.record is not None:
            before, self.record = self.record, decision.record
            for shard, group in self.record.items():
                self.hosts[shard].check_held("the record changes")
                # The moment in which a promise begins is the one to test it in.
                if group.in_sync and not before[shard].in_sync and self.random.random() < 0.3:
                    self.after(self.random.uniform(0, 0.05), None, partial(self._kill_in, shard))
        for boot, word in decision.assignments:
            self._tell(boot, word)

    def _break(self, boot: int) -> None:
        """The coordinator notices that its connection to a process broke; not always."""

        def notice() -> None:
            if self.coordinator is not None:
                self._decide(self.coordinator.bury(boot, self.now))

        if self._breaks.random() < 0.3:
            self.after(self._breaks.uniform(0.001, 0.05), None, notice)

    def _tell(self, boot: int, word: Assignment) -> None:
        copies = self.hosts[word.configuration.shard]
        process = copies.processes[boot]

        def take() -> None:
            copies.perform(process, process.replica.assign(word, self.now))
            if process.replica.serving and not copies.installed:
                copies.install(process)

        self._carried(frozenset({0, boot}), lambda: self.at(process, take))

    # --- accidents --------------------------------------------------------------------------------

    def _members(self) -> list[Process]:
        return [
            process
            for copies in self.hosts
            for process in copies.processes.values()
            if process.alive
        ]

    def _whole(self, copies: Copies) -> bool:
        """In sync by the record, with nothing else going wrong: one death is within the promise."""
        group = self.record[copies.number]
        if group.pending is not None or not group.in_sync or not copies.installed:
            return False
        return all(
            copies.processes[boot].alive
            and copies.processes[boot].frozen_until <= self.now
            and not any(boot in ends and end > self.now for ends, end in self._splits.items())
            for boot in group.promotable
        )

    def _death(self) -> None:
        whole = [copies for copies in self.hosts if self._whole(copies)]
        if not whole:
            if self.now < self.setting.quiet_s:
                self.after(1.0, None, self._death)
            return
        self._kill_in(self.random.choice(whole).number)

    def _kill_in(self, shard: int) -> None:
        """End one of the copies that count, if the group is whole."""
        copies = self.hosts[shard]
        if not self._whole(copies) or self.now > self.setting.quiet_s:
            return
        boot = self.random.choice(self.record[copies.number].promotable)
        copies.processes[boot].alive = False
        self._break(boot)
        self.calm = False
        self.deaths += 1
        self.after(self.random.uniform(0, 2 * REBIRTH_S), None, copies.begin)

    def _stop(self) -> None:
        process = self.random.choice(self._members())
        process.frozen_until = self.now + self.random.uniform(0.1, 5.0)

    def _split(self) -> None:
        process = self.random.choice(self._members())
        other = self.random.choice([0, *[p.boot for p in process.group.processes.values()]])
        ends = frozenset({process.boot, other})
        if other == 0:
            self._break(process.boot)
        self._splits[ends] = self.now + self.random.uniform(0.1, 5.0)

    def _coordinator_death(self) -> None:
        self.coordinator = None

        def back() -> None:
            self.coordinator = Coordinator(
                self.setting.shards, silence_s=SILENCE_S, record=dict(self.record)
            )

        self.after(self.random.uniform(0.1, 5.0), None, back)
