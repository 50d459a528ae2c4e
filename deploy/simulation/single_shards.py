"""A shard in one process, which is restarted with a state that it has saved."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deploy.simulation.clock import SimulatedProcess
from deploy.simulation.invariants import Promise, Violation
from deploy.simulation.leases import check_silent
from deploy.simulation.network import Deliver
from deploy.simulation.shard_hosts import End, ShardHost
from ps.wal.writer import LoggedShard
from shards import wire_format
from shards.delta_pulls import Change, DeltaViews
from shards.envelopes import Arrival, Outgoing
from shards.errors import DownpourError
from shards.messages import Export, Install, State
from shards.shard import Shard
from shards.update_records import RECORD

if TYPE_CHECKING:
    from deploy.simulation.simulation import Simulation

SAVE_S = 1.0  # seconds between the saved states to which a lossy restart may roll back

Saving = tuple[float, list[str], list[bytes]]
"""A saved state: its time, the names of its slots, and the frames of an Install."""


class WatchedViews(DeltaViews):
    """Records each view that a worker receives from a shard, by boot and number."""

    def __init__(self, shard: Shard, seen: dict[tuple[int, int], bytes]) -> None:
        super().__init__(shard.spec.map.ranges[shard.spec.shard])
        self._boot, self._seen = shard.boot, seen

    def serve(self, worker: str, *arguments: Any) -> Change:
        change = super().serve(worker, *arguments)
        self._seen[self._boot, change.number] = self._views[worker].weights.tobytes()
        return change


class SingleShardHost(ShardHost):
    """One process across its restarts, and the checks on all its answers."""

    def __init__(self, world: "Simulation", number: int, *, fresh: bool = False) -> None:
        super().__init__(world, number, fresh=fresh)
        self._process = SimulatedProcess(world.clock, f"shard {number}")
        self._boot = 0
        self._shard: Shard
        self._acts: Shard | LoggedShard
        self._waiting: list[Arrival] = []
        self._rows = np.empty(0, RECORD)  # from before the last restart
        self._savings: list[Saving] = []
        self._first_start()

    def _first_start(self) -> None:
        """Start the process, and install the first state unless an operator will do so."""
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

    def process(self, role: str) -> SimulatedProcess | None:
        return self._process if role == "shard" else None

    def route(self, life: End) -> tuple[str, Deliver]:
        def deliver(header: bytes, frames: Sequence[Any]) -> None:
            self._process.at(self._take, life.address, header, frames)

        return self._process.name, deliver

    # --- answering --------------------------------------------------------------------------------

    def _take(self, sender: bytes, header: bytes, frames: Sequence[Any]) -> None:
        try:
            message = wire_format.decode_request(header)
        except DownpourError as error:
            self.answer(self._process, [self.shard.refuse(sender, 0, error)])
            return
        self._pulls.asked(sender, message)
        if not self._waiting:
            self._process.after(self._world.setting.busy_s, self._take_turn)
        self._waiting.append(Arrival(sender, message, wire_format.wrap(frames)))

    def _take_turn(self) -> None:
        """Process all requests that arrived while the shard was busy, as the server loop does."""
        arrivals, self._waiting = self._waiting, []
        self._act(lambda: self._acts.handle_together(arrivals, self._process.now))

    def _tick(self) -> None:
        silent = self._shard.ledger.silent(self._process.now)
        if silent:
            self._world.calm = False
            check_silent(self._world, self, silent)
        self._act(lambda: self._acts.tick(self._process.now))

    def _act(self, turn: Callable[[], Sequence[Outgoing]]) -> None:
        """Let the shard take a turn, and send its answers."""
        self._check_and_send(turn())

    def _check_and_send(self, answers: Sequence[Outgoing]) -> None:
        """Check every answer against the promises, then send it."""
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
                f"{worker} has an ack of push {seq}, shard {self.number} has applied {held}",
            )

    # --- dying ------------------------------------------------------------------------------------

    def restart(self, lost_s: float, *, reported: bool) -> None:
        """Die and restart with the present state, or with the one saved `lost_s` seconds ago.

        Shards that a resharding created ignore it: they are in memory only.
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
        # Workers that have not returned since an earlier rollback may lack even more pushes.
        again = self._shard.part.rolled_back
        self._live()
        if reported and (lost_s or again):
            self._shard.restore(*self._shard.held.read(slots, frames))
            self._shard.roll_back(self._process.now)
        else:
            self._pulls.whole &= not lost_s
            self._operate(Install(3, self._world.job, self._world.table.name, slots), frames)
        self._forget()

    def kill_serving(self) -> None:
        self.restart(0.0, reported=True)

    def _forget(self) -> None:
        """Note the pushes that are lost now, except those that their workers will repeat."""
        lost = self._rows["apply_version"] > self._shard.version
        for worker, seq in self._rows[lost][["worker", "seq"]].tolist():
            self._forgotten.setdefault(worker.decode(), set()).add(seq)
        self._rows = self._rows[~lost]
        self._pulls.exact &= not lost.any()

    def _live(self) -> None:
        """Start a process without any state."""
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
        """All records so far, including those from before restarts."""
        return np.concatenate([self._rows, self._shard.journal.since(0)[1]])

    # --- the end ----------------------------------------------------------------------------------

    def drained(self) -> bool:
        return not self._waiting

    def finish(self) -> None:
        if self._shard.held._weights is None:
            assert not self._world.durable, "its weights were installed"
            return
        self.check_held(self._shard, self.records(), f"shard {self.number}")
        if self._world.durable:
            self.check_whole()
