"""A shard in one process, restarted with a state that it has saved, or recovered from its log."""

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from deploy.simulation import invariants
from deploy.simulation.disk import DeferredTask, Died, SimulatedDisk
from deploy.simulation.invariants import Promise, Violation
from deploy.simulation.lease_checks import check_silent
from deploy.simulation.network import Deliver
from deploy.simulation.process import SimulatedProcess
from deploy.simulation.shard_hosts import ShardHost, ShardProcess, select_rows
from ps.wal.recovery import replay_read_only
from ps.wal.writer import BackgroundTask, LoggedShard, WriteAheadLog
from shards import shard_state, wire_format
from shards.delta_pulls import Change, DeltaViews
from shards.dense_part import DensePart
from shards.errors import DownpourError, GiveUp
from shards.messages import AskPiece, Export, Install, State
from shards.shard import Shard
from shards.state_pieces import GatheredState
from shards.transition_io import Arrival, Outgoing

if TYPE_CHECKING:
    from deploy.simulation.shard_hosts import Client
    from deploy.simulation.simulation import Simulation

PIECE_S = 0.05  # seconds between the pieces of an export
SAVE_S = 1.0  # seconds between the saved states to which a lossy restart may roll back
BACK_S = 0.3  # until a killed process is restarted, and between attempts on a full disk
LONGEST_DEFERRAL_S = 0.5  # the longest time until a base is written

Image = tuple[object, ...]
Saving = tuple[float, list[bytes]]
"""A saved state: its time, and the frames of an Install."""


class WatchedViews(DeltaViews):
    """Records each view of a table that a worker receives from a shard, by boot and number."""

    def __init__(self, boot: int, table: str, seen: dict[tuple[str, int, int], bytes]) -> None:
        super().__init__()
        self._key, self._seen = (table, boot), seen

    def serve(self, worker: str, *arguments: Any) -> Change:
        change = super().serve(worker, *arguments)
        self._seen[*self._key, change.number] = self._views[worker].weights.tobytes()
        return change


class SingleShardHost(ShardHost):
    """One process across its restarts, and the checks on all its answers."""

    _log_or_shard: Shard | LoggedShard

    def __init__(self, world: "Simulation", number: int, *, fresh: bool = False) -> None:
        super().__init__(world, number, fresh=fresh)
        self._process = ShardProcess(world.clock, f"shard {number}")
        self._boot = 0
        self._tick_at = 0.0  # the end of a grace, for which a tick is planned
        self._waiting: list[Arrival] = []
        self._savings: list[Saving] = []
        self._requests = itertools.count(2)  # a repeated one reopens its export
        self._start()
        if not fresh:
            self._operate(*self.blank())

    def begin(self) -> None:
        # A tick ends leases, and the grace of a quorum, however long the leases are.
        self._process.every(min(self._world.setting.lease_s / 4, 1.0), self._tick)
        if self._world.lossy:
            self._process.every(SAVE_S, self._begin_export)

    @property
    def serving(self) -> Sequence[ShardProcess]:
        return [self._process]

    def process(self, role: str) -> SimulatedProcess | None:
        return self._process if role == "shard" else None

    def _start(self) -> None:
        """Start the process without any state."""
        self._boot += 1
        shard = Shard(self._world.spec(self.number, self.map), self._boot)
        for table, part in shard.parameters.parts.items():
            if isinstance(part, DensePart):
                part._views = WatchedViews(shard.boot, table, self.views)
        self._process.shard = self._log_or_shard = shard

    def route(self, client: "Client") -> tuple[str, Deliver]:
        def deliver(header: bytes, frames: Sequence[Any]) -> None:
            # A message reaches the next process if this one dies meanwhile.
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
        self.note_reports(self.shard, arrivals, self._process.now)
        self._plan_tick()

    def _tick(self) -> None:
        silent = self.shard.ledger.silent(self._process.now)
        if silent:
            self._world.calm = False
            check_silent(self._world, self, silent)
        before = self.open_reports(self.shard)
        self._act(lambda: self._log_or_shard.tick(self._process.now))
        self.check_not_early(self.shard, before, self._process.now)
        self.check_merged(self.shard, self._process.now)
        self._plan_tick()

    def _plan_tick(self) -> None:
        """Tick when the first grace of open reports ends, as a server does."""
        now, end = self._process.now, self.shard.next_merge(self._process.now)
        if end is not None and end > now and end != self._tick_at:
            self._tick_at = end
            self._process.after(end - now, self._tick)

    def _act(self, turn: Callable[[], Sequence[Outgoing]]) -> None:
        """Let the shard take a turn, and send its answers."""
        self.reply(self._process, turn())

    def is_drained(self) -> bool:
        return self._process.alive and not self._waiting

    def restart(self, lost_s: float, *, reported: bool) -> None:
        """Die and restart with the present state, or with the one saved `lost_s` seconds ago.

        Shards that a resharding created ignore it: they are in memory only.
        """
        if self._fresh:
            return
        self._process.former = self._process.records()
        self._save()
        until = self._world.clock.now - lost_s
        self._savings = [s for s in self._savings if s[0] <= until] or self._savings[:1]
        _, frames = self._savings[-1]
        self._world.calm = False
        self._world.note(f"shard {self.number} restarts")
        self._waiting.clear()
        # Workers that have not returned since an earlier rollback may lack even more pushes.
        again = self.shard.part.rolled_back
        self._start()
        if reported and (lost_s or again):
            self.shard.restore(shard_state.decode(frames)[0])
            self.shard.roll_back(self._process.now)
        else:
            self._pulls.whole &= not lost_s
            self._operate(Install(3, self._world.job), frames)
        self._forget()
        if lost_s:
            self.followed.forget(self.shard)

    def kill_serving(self) -> None:
        self.restart(0.0, reported=True)

    def _forget(self) -> None:
        """Note the pushes that are lost now, except those that their workers will repeat."""
        rows = self._process.former
        lost = ~select_rows(rows, self.shard.ledger.cut)
        for worker, seq in rows[lost][["worker", "seq"]].tolist():
            self._forgotten.setdefault(worker.decode(), set()).add(seq)
        self._process.former = rows[~lost]
        self._pulls.exact &= not lost.any()

    def _save(self) -> None:
        frames = [bytes(frame) for frame in shard_state.encode(self.shard.copy())]
        self._savings.append((self._world.clock.now, frames))

    def _begin_export(self) -> None:
        """Export the state as an operator does, in pieces while workers push."""
        began, boot = self._process.now, self._boot
        message = Export(next(self._requests), self._world.job, self._world.setting.piece_bytes)
        (answer,) = self.shard.handle(b"operator", message, (), began)
        assert isinstance(answer.message, State)
        if answer.message.piece is None:
            self._savings.append((began, [bytes(frame) for frame in answer.frames]))
            return
        gathered = GatheredState(answer.message.piece.of)

        def take(answer: Outgoing) -> None:
            if isinstance(answer.message, State) and answer.message.piece is not None:
                gathered.take(answer.message.piece, wire_format.wrap(answer.frames))
                if gathered.complete:
                    self._savings.append((began, [bytes(frame) for frame in gathered.frames()]))
                else:
                    self._process.after(PIECE_S, ask)

        def ask() -> None:
            number = gathered.missing[0]
            message = AskPiece(next(self._requests), self._world.job, boot, gathered.of, number)
            (answer,) = self.shard.handle(b"operator", message, (), self._process.now)
            take(answer)

        take(answer)

    def _operate(self, message: Install, frames: Sequence[bytes]) -> None:
        arrival = Arrival(b"operator", message, frames)
        self._log_or_shard.handle_together([arrival], self._process.now)


class LoggedShardHost(SingleShardHost):
    """One process across its restarts, with a log at the level `process` or `logged`.

    The log is the real one (ps/wal/writer.py) on a simulated disk (disk.py). After each death, the
    state recovered from the disk must equal the shard's state bit for bit. After a death between
    two turns, that is the state at that moment. After a death during the writing of a turn, it may
    be the state before or after that turn, because no request of it has been answered.
    """

    def __init__(self, world: "Simulation", number: int, *, fresh: bool = False) -> None:
        self._disk = SimulatedDisk(f"disk {number}", world.clock.random)
        self._power = False  # whether the fuse ends in a power failure
        self._back_s = BACK_S
        self._expected: list[Image] = []
        # The newest log and its number of valid bytes, if the disk surely holds them.
        self._settled: tuple[str, int] | None = None
        super().__init__(world, number, fresh=fresh)

    def _start(self) -> None:
        """Start a process that recovers its state from the disk."""
        setting = self._world.setting
        self._boot += 1
        shard = Shard(self._world.spec(self.number, self.map), self._boot)
        self._log = WriteAheadLog(
            self._disk, setting.durability, setting.log_bytes, self._run_in_background
        )
        self._log.recover(shard, self._process.now)
        self._process.shard, self._log_or_shard = shard, LoggedShard(shard, self._log)

    def _run_in_background(self, work: Callable[[], None]) -> BackgroundTask:
        task = DeferredTask(work)
        when_s = self._world.clock.random.random() * LONGEST_DEFERRAL_S
        self._process.after(when_s, self._run_guarded, task.join)
        return task

    def _act(self, turn: Callable[[], Sequence[Outgoing]]) -> None:
        endangered = self._disk.fuse is not None or self._disk.full or self._log._failure
        before = [invariants.image(self.shard)] if endangered else []
        answers: list[Outgoing] = []
        if self._run_guarded(lambda: answers.extend(turn()), before):
            self.reply(self._process, answers)

    def _run_guarded(self, action: Callable[[], None], before: Sequence[Image] = ()) -> bool:
        """Run the action; False if the process dies during it."""
        try:
            action()
        except Died:
            self._die([*before, invariants.image(self.shard)], self._back_s, power=self._power)
        except GiveUp as error:
            if not self._disk.full and self._log._failure is None:
                raise
            self._world.note(str(error))
            self._die([*before, invariants.image(self.shard)], BACK_S, power=False)
        else:
            return True
        return False

    def restart(self, lost_s: float, *, reported: bool) -> None:
        """Be killed and restarted."""
        self.die(BACK_S, power=False, operations=0)

    def die(self, back_s: float, *, power: bool, operations: int) -> None:
        if operations:
            self._disk.fuse, self._power, self._back_s = operations - 1, power, back_s
        elif self._process.alive:
            self._die([invariants.image(self.shard)], back_s, power=power)
        elif power:
            self._disk.fail()
            self._settled = None  # the mark is never flushed, so a power failure may lose it

    def fill(self, for_s: float) -> None:
        self._disk.full = True
        self._world.clock.after(for_s, setattr, self._disk, "full", False)

    def _die(self, expected: list[Image], back_s: float, *, power: bool) -> None:
        """End the process; `expected` are the states that the disk may hold now."""
        self._expected = expected
        between_turns = len(expected) == 1 and not power
        self._settled = (self._log.name, self._log.record_bytes) if between_turns else None
        self._process.alive = False
        self._waiting.clear()
        self._disk.fuse = None
        if power:
            self._disk.fail()
        self._world.calm = False
        self._world.counted.deaths += 1
        how = "loses its power" if power else "dies"
        self._world.note(f"shard {self.number} {how} at version {self.shard.version}")
        self._world.clock.after(back_s, self._again)

    def _again(self) -> None:
        """Restart the process, or try again later."""
        former = self._process
        self._process = ShardProcess(self._world.clock, former.name)
        self._process.shard, self._process.former = former.shard, former.records()
        try:
            image = self._check_disk() if self._world.durable else None
            self._start()
        except Died:
            self._fail_again(power=self._power)
        except GiveUp as error:
            if self._disk.full:
                self._fail_again(power=False)
            elif self._world.durable:
                raise Violation(Promise.DURABLE, f"shard {self.number}: {error}") from error
            else:
                self._process.alive = False  # beyond the fault budget, the loss is detected
        else:
            # Only now: the power may fail during recovery, and lose what is not flushed.
            self._expected = [image] if image is not None else self._expected
            # A push that the death has lost may never come again: its worker's next life begins
            # after it.
            rows = self._process.former
            self._process.former = rows[select_rows(rows, self.shard.ledger.cut)]
            self._world.note(f"shard {self.number} is back at version {self.shard.version}")
            self.begin()

    def _fail_again(self, *, power: bool) -> None:
        self._process.alive = False
        if power:
            self._disk.fail()
        self._world.clock.after(BACK_S, self._again)

    def _check_disk(self) -> Image:
        """Check that the disk holds an expected state, with every acknowledged push."""
        try:
            shard = replay_read_only(self._disk, self._world.spec(self.number, self.map))
        except DownpourError as error:
            raise Violation(Promise.RECOVERY, f"shard {self.number}: {error}") from error
        actual = invariants.image(shard)
        if actual not in self._expected:
            raise Violation(
                Promise.RECOVERY,
                f"shard {self.number} comes back at version {actual[0]}, expected one of"
                f" {[image[0] for image in self._expected]}, bit for bit",
            )
        self.check_acknowledged(shard, "back from its disk")
        self._check_loss_shows()
        return actual

    def _check_loss_shows(self) -> None:
        """Check that the shard would refuse to recover from a truncated newest log."""
        if self._settled is None:
            return
        # Only once: a process that dies during its start may leave a partly written mark.
        (name, filled), self._settled = self._settled, None
        for size in (0, filled - 1):
            try:
                replay_read_only(
                    self._disk.copy_truncated(name, size), self._world.spec(self.number, self.map)
                )
            except DownpourError:
                continue
            raise Violation(
                Promise.RECOVERY,
                f"shard {self.number} comes back from {name} cut from {filled} to {size} bytes,"
                " expected an error",
            )
