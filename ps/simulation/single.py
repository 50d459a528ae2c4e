"""A shard in one process, which a restart brings back with a state that it has saved."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ps.logs.shard_log import Logged
from ps.simulation.clock import Party
from ps.simulation.hosts import End, Host
from ps.simulation.invariants import Promise, Violation
from ps.simulation.leases import check_silent
from ps.simulation.network import Deliver
from shards import codec
from shards.errors import DownpourError
from shards.messages import Export, Install, State
from shards.records import RECORD
from shards.shard import Shard
from shards.transitions import Arrival, Outgoing
from shards.views import Change, Views

if TYPE_CHECKING:
    from ps.simulation.world import World

SAVE_S = 1.0  # how often a state is kept that a lossy restart may come back with

Saving = tuple[float, list[str], list[bytes]]
"""When, the slots' names, and the frames of an Install."""


class WatchedViews(Views):
    """Notes each view that a shard has led a worker to, by life and number."""

    def __init__(self, shard: Shard, seen: dict[tuple[int, int], bytes]) -> None:
        super().__init__(shard.spec.map.ranges[shard.spec.shard])
        self._boot, self._seen = shard.boot, seen

    def serve(self, worker: str, *told: Any) -> Change:
        change = super().serve(worker, *told)
        self._seen[self._boot, change.number] = self._views[worker].weights.tobytes()
        return change


class Single(Host):
    """One process, its lives, and the checks on everything that it answers."""

    def __init__(self, world: "World", number: int, *, fresh: bool = False) -> None:
        super().__init__(world, number, fresh=fresh)
        self._process = Party(world.clock, f"shard {number}")
        self._boot = 0
        self._shard: Shard
        self._acts: Shard | Logged
        self._waiting: list[Arrival] = []
        self._rows = np.empty(0, RECORD)  # of former lives
        self._savings: list[Saving] = []
        self._be_born()

    def _be_born(self) -> None:
        """The first life, with what an operator installs."""
        self._live()
        if not self._fresh:
            self._operate(*self.blank())

    def begin(self) -> None:
        self._process.every(self._world.setting.lease_s / 4, self._tick)
        if self._world.lossy:
            self._process.every(SAVE_S, self._save)

    @property
    def shard(self) -> Shard:
        return self._shard

    def party(self, role: str) -> Party | None:
        return self._process if role == "shard" else None

    def route(self, life: End) -> tuple[str, Deliver]:
        def deliver(header: bytes, frames: Sequence[Any]) -> None:
            self._process.at(self._take, life.address, header, frames)

        return self._process.name, deliver

    # --- answering --------------------------------------------------------------------------------

    def _take(self, sender: bytes, header: bytes, frames: Sequence[Any]) -> None:
        try:
            message = codec.decode_request(header)
        except DownpourError as error:
            self.answer(self._process, [self.shard.refuse(sender, 0, error)])
            return
        self._pulls.asked(sender, message)
        if not self._waiting:
            self._process.after(self._world.setting.busy_s, self._take_turn)
        self._waiting.append(Arrival(sender, message, codec.wrap(frames)))

    def _take_turn(self) -> None:
        """As the server loop does: whatever came while it was busy is dealt with together."""
        arrivals, self._waiting = self._waiting, []
        self._act(lambda: self._acts.handle_together(arrivals, self._process.now))

    def _tick(self) -> None:
        silent = self._shard.ledger.silent(self._process.now)
        if silent:
            self._world.calm = False
            check_silent(self._world, self, silent)
        self._act(lambda: self._acts.tick(self._process.now))

    def _act(self, turn: Callable[[], Sequence[Outgoing]]) -> None:
        """Have the shard take a turn, and send what it answers."""
        self._look(turn())

    def _look(self, answers: Sequence[Outgoing]) -> None:
        """Hold every answer against the promises, then let it travel."""
        self._pulls.check(self._shard, answers)
        self._pulls.check_open(self._shard)
        self.answer(self._process, answers)

    def check_applied(self, worker: str, seq: int) -> None:
        if not self._world.durable:
            return
        entry = self._shard.ledger.entries.get(worker)
        held = 0 if entry is None else entry.seq
        if held < seq and seq not in self._forgotten.get(worker, ()):
            raise Violation(
                Promise.EXACTLY_ONCE,
                f"{worker} was told of push {seq}, shard {self.number} has applied {held}",
            )

    # --- dying ------------------------------------------------------------------------------------

    def restart(self, lost_s: float, *, told: bool) -> None:
        """Die, and come back with all that was held, or rolled back to what was saved `lost_s` ago.

        But not where a job has moved to: such shards are in memory alone.
        """
        if self._fresh:
            return
        self._rows = self.records()
        self._save()
        wanted = self._world.clock.now - lost_s
        self._savings = [s for s in self._savings if s[0] <= wanted] or self._savings[:1]
        _, slots, frames = self._savings[-1]
        self._world.calm = False
        self._world.note(f"shard {self.number} restarts")
        self._waiting.clear()
        again = self._shard.part.rolled_back  # who has not come back since may miss more
        self._live()
        if told and (lost_s or again):
            self._shard.restore(*self._shard.held.read(slots, frames))
            self._shard.roll_back(self._process.now)
        else:
            self._pulls.whole &= not lost_s
            self._operate(Install(3, self._world.job, self._world.table.name, slots), frames)
        self._forget()

    def struck(self) -> None:
        self.restart(0.0, told=True)

    def _forget(self) -> None:
        """What it lacks now is lost, but for what a worker has not been told of, and repeats."""
        lost = self._rows["apply_version"] > self._shard.version
        for worker, seq in self._rows[lost][["worker", "seq"]].tolist():
            self._forgotten.setdefault(worker.decode(), set()).add(seq)
        self._rows = self._rows[~lost]
        self._pulls.exact &= not lost.any()

    def _live(self) -> None:
        """A process begins, with nothing."""
        self._boot += 1
        self._shard = self._acts = Shard(self._world.spec(self.number, self.map), self._boot)
        self._shard.part.serving._views = WatchedViews(self._shard, self.views)

    def _save(self) -> None:
        answer = self._operate(Export(2, self._world.job, self._world.table.name))
        assert isinstance(answer.message, State)
        frames = [bytes(frame) for frame in answer.frames]
        self._savings.append((self._world.clock.now, answer.message.slots, frames))

    def _operate(self, message: Install | Export, frames: Sequence[bytes] = ()) -> Outgoing:
        (answer,) = self._shard.handle(b"operator", message, frames, self._process.now)
        return answer

    def records(self) -> NDArray[np.void]:
        """The records so far, of all lives."""
        return np.concatenate([self._rows, self._shard.journal.since(0)[1]])

    # --- the end ----------------------------------------------------------------------------------

    def drained(self) -> bool:
        return not self._waiting

    def finish(self) -> None:
        if self._shard.held._weights is None:
            assert not self._world.durable, "it was given some"
            return
        self.check_held(self._shard, self.records(), f"shard {self.number}")
        if self._world.durable:
            self.check_whole()
