"""A shard in one process, which is restarted with a state that it has saved."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from deploy.simulation.clock import SimulatedProcess
from deploy.simulation.invariants import Promise, Violation
from deploy.simulation.leases import check_silent
from deploy.simulation.network import Deliver
from deploy.simulation.shard_hosts import Client, ShardHost, ShardProcess, applied_seq
from ps.wal.writer import LoggedShard
from shards.delta_pulls import Change, DeltaViews
from shards.envelopes import Arrival, Outgoing
from shards.messages import Export, Install, State
from shards.shard import Shard

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

    _log_or_shard: Shard | LoggedShard

    def __init__(self, world: "Simulation", number: int, *, fresh: bool = False) -> None:
        super().__init__(world, number, fresh=fresh)
        self._process = ShardProcess(world.clock, f"shard {number}")
        self._boot = 0
        self._waiting: list[Arrival] = []
        self._savings: list[Saving] = []
        self._start()
        if not fresh:
            self._operate(*self.blank())

    def begin(self) -> None:
        self._process.every(self._world.setting.lease_s / 4, self._tick)
        if self._world.lossy:
            self._process.every(SAVE_S, self._save)

    @property
    def serving(self) -> Sequence[ShardProcess]:
        return [self._process]

    def process(self, role: str) -> SimulatedProcess | None:
        return self._process if role == "shard" else None

    def _start(self) -> None:
        """Start the process without any state."""
        self._boot += 1
        shard = Shard(self._world.spec(self.number, self.map), self._boot)
        shard.part.serving._views = WatchedViews(shard, self.views)
        self._process.shard = self._log_or_shard = shard

    # --- answering --------------------------------------------------------------------------------

    def route(self, client: Client) -> tuple[str, Deliver]:
        def deliver(header: bytes, frames: Sequence[Any]) -> None:
            self._process.at(self._take, self._process, client.address, header, frames)

        return self._process.name, deliver

    def handle(self, process: ShardProcess, arrival: Arrival) -> None:
        """Process the request with all others that arrive while the shard is busy."""
        if not self._waiting:
            process.after(self._world.setting.busy_s, self._take_turn)
        self._waiting.append(arrival)

    def _take_turn(self) -> None:
        arrivals, self._waiting = self._waiting, []
        self._act(lambda: self._log_or_shard.handle_together(arrivals, self._process.now))

    def _tick(self) -> None:
        silent = self.shard.ledger.silent(self._process.now)
        if silent:
            self._world.calm = False
            check_silent(self._world, self, silent)
        self._act(lambda: self._log_or_shard.tick(self._process.now))

    def _act(self, turn: Callable[[], Sequence[Outgoing]]) -> None:
        """Let the shard take a turn, check its answers against the promises, and send them."""
        answers = turn()
        self._pulls.check(self.shard, answers)
        self._pulls.check_open(self.shard)
        self.answer(self._process, answers)

    def check_applied(self, worker: str, seq: int) -> None:
        held, forgotten = applied_seq(self.shard, worker), self._forgotten.get(worker, ())
        if self._world.durable and held < seq and seq not in forgotten:
            raise Violation(
                Promise.EXACTLY_ONCE,
                f"{worker} has an ack of push {seq}, shard {self.number} has applied {held}",
            )

    def drained(self) -> bool:
        return self._process.alive and not self._waiting

    # --- dying ------------------------------------------------------------------------------------

    def restart(self, lost_s: float, *, reported: bool) -> None:
        """Die and restart with the present state, or with the one saved `lost_s` seconds ago.

        Shards that a resharding created ignore it: they are in memory only.
        """
        if self._fresh:
            return
        self._process.former = self._process.records()
        self._save()
        wanted = self._world.clock.now - lost_s
        self._savings = [s for s in self._savings if s[0] <= wanted] or self._savings[:1]
        _, slots, frames = self._savings[-1]
        self._world.calm = False
        self._world.note(f"shard {self.number} restarts")
        self._waiting.clear()
        # Workers that have not returned since an earlier rollback may lack even more pushes.
        again = self.shard.part.rolled_back
        self._start()
        if reported and (lost_s or again):
            self.shard.restore(*self.shard.held.read(slots, frames))
            self.shard.roll_back(self._process.now)
        else:
            self._pulls.whole &= not lost_s
            self._operate(Install(3, self._world.job, self._world.table.name, slots), frames)
        self._forget()

    def kill_serving(self) -> None:
        self.restart(0.0, reported=True)

    def _forget(self) -> None:
        """Note the pushes that are lost now, except those that their workers will repeat."""
        rows = self._process.former
        lost = rows["apply_version"] > self.shard.version
        for worker, seq in rows[lost][["worker", "seq"]].tolist():
            self._forgotten.setdefault(worker.decode(), set()).add(seq)
        self._process.former = rows[~lost]
        self._pulls.exact &= not lost.any()

    def _save(self) -> None:
        answer = self._operate(Export(2, self._world.job, self._world.table.name))
        assert isinstance(answer.message, State)
        frames = [bytes(frame) for frame in answer.frames]
        self._savings.append((self._world.clock.now, answer.message.slots, frames))

    def _operate(self, message: Install | Export, frames: Sequence[bytes] = ()) -> Outgoing:
        arrival = Arrival(b"operator", message, frames)
        (answer,) = self._log_or_shard.handle_together([arrival], self._process.now)
        return answer
