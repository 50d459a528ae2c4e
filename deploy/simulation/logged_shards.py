"""A shard with a log on a disk, at the levels `process` and `logged`, which dies and recovers.

Its log is the real one (ps/wal/writer.py) on a simulated disk (disk.py). After each death, the
state recovered from the disk must equal the shard's state bit for bit. After a death between two
turns, that is the state at that moment. After a death during the writing of a turn, it may be the
state before or after that turn, because no request of it has been answered.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deploy.simulation import invariants
from deploy.simulation.clock import SimulatedProcess
from deploy.simulation.disk import Died, DeferredTask, SimulatedDisk
from deploy.simulation.invariants import Promise, Violation
from deploy.simulation.single_shards import SingleShardHost
from ps.wal.recovery import looked_at
from ps.wal.writer import BackgroundTask, LoggedShard, WriteAheadLog
from shards.envelopes import Arrival, Outgoing
from shards.errors import DownpourError, GiveUp
from shards.messages import Ack
from shards.shard import Shard

if TYPE_CHECKING:
    from deploy.simulation.simulation import Simulation

BACK_S = 0.3  # until a killed process is restarted, and between attempts on a full disk
LONGEST_DEFERRAL_S = 0.5  # the longest time until a base is written

Image = tuple[object, ...]


class LoggedShardHost(SingleShardHost):
    """One process across its restarts, and the disk that survives them."""

    def __init__(self, world: "Simulation", number: int, *, fresh: bool = False) -> None:
        self._disk = SimulatedDisk(f"disk {number}", world.clock.random)
        self._power = False  # whether the fuse ends in a power failure
        self._back_s = BACK_S
        self._expected: list[Image] = []
        self._settled: tuple[str, int] | None = (
            None  # the newest log, and its number of valid bytes
        )
        self._acknowledged: dict[str, int] = {}
        self._lost = False
        super().__init__(world, number, fresh=fresh)

    def _first_start(self) -> None:
        self._live()
        if self._fresh:
            return
        install, frames = self.blank()
        self._acts.handle_together([Arrival(b"operator", install, frames)], self._process.now)

    def _live(self) -> None:
        """Start a process that recovers its state from the disk."""
        setting = self._world.setting
        self._boot += 1
        shard = Shard(self._world.spec(self.number, self.map), self._boot)
        self._log = WriteAheadLog(self._disk, setting.durability, setting.log_bytes, self._aside)
        self._log.recover(shard, self._process.now)
        self._shard, self._acts = shard, LoggedShard(shard, self._log)

    def _aside(self, work: Callable[[], None]) -> BackgroundTask:
        errand = DeferredTask(work)
        when_s = self._world.clock.random.random() * LONGEST_DEFERRAL_S
        self._process.after(when_s, self._guarded, errand.join)
        return errand

    # --- dying ------------------------------------------------------------------------------------

    def _act(self, turn: Callable[[], Sequence[Outgoing]]) -> None:
        endangered = self._disk.fuse is not None or self._disk.full or self._log._failure
        before = [invariants.image(self._shard)] if endangered else []
        answers: Sequence[Outgoing] = ()

        def act() -> None:
            nonlocal answers
            answers = turn()

        if self._guarded(act, before):
            for answer in answers:
                if type(answer.message) is Ack:
                    worker = self._world.life_at(answer.to).name
                    known = self._acknowledged.get(worker, 0)
                    self._acknowledged[worker] = max(known, answer.message.seq)
            self._check_and_send(answers)

    def _guarded(self, action: Callable[[], None], before: Sequence[Image] = ()) -> bool:
        """Run the action; False if the process dies during it."""
        try:
            action()
        except Died:
            self._die([*before, invariants.image(self._shard)], self._back_s, power=self._power)
        except GiveUp as error:
            if not self._disk.full and self._log._failure is None:
                raise
            self._world.note(str(error))
            self._die([*before, invariants.image(self._shard)], BACK_S, power=False)
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
            self._die([invariants.image(self._shard)], back_s, power=power)
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
        self._settled = (self._log.name, self._log.filled) if between_turns else None
        self._rows = self.records()
        self._process.alive = False
        self._waiting.clear()
        self._disk.fuse = None
        if power:
            self._disk.fail()
        self._world.calm = False
        self._world.counted.deaths += 1
        how = "loses its power" if power else "dies"
        self._world.note(f"shard {self.number} {how} at version {self._shard.version}")
        self._world.clock.after(back_s, self._again)

    def _again(self) -> None:
        """Restart the process, or try again later."""
        self._process = SimulatedProcess(self._world.clock, self._process.name)
        try:
            found = self._check_disk() if self._world.durable else None
            self._live()
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
            self._expected = [found] if found is not None else self._expected
            self._world.note(f"shard {self.number} is back at version {self._shard.version}")
            self.begin()

    def _fail_again(self, *, power: bool) -> None:
        self._process.alive = False
        if power:
            self._disk.fail()
        self._world.clock.after(BACK_S, self._again)

    def _check_disk(self) -> Image:
        """Check that the disk holds an expected state, with every acknowledged push."""
        try:
            shard = looked_at(self._disk, self._world.spec(self.number, self.map))
        except DownpourError as error:
            raise Violation(Promise.RECOVERY, f"shard {self.number}: {error}") from error
        found = invariants.image(shard)
        if found not in self._expected:
            raise Violation(
                Promise.RECOVERY,
                f"shard {self.number} comes back at version {found[0]}, expected one of"
                f" {[image[0] for image in self._expected]}, bit for bit",
            )
        for worker, seq in self._acknowledged.items():
            entry = shard.ledger.entries.get(worker)
            held = 0 if entry is None else entry.seq
            if held < seq:
                raise Violation(
                    Promise.DURABLE,
                    f"shard {self.number} comes back with {held} pushes of {worker},"
                    f" {seq} are acknowledged",
                )
        self._check_loss_shows()
        return found

    def _check_loss_shows(self) -> None:
        """Check that the shard would refuse to recover from a truncated newest log."""
        if self._settled is None:
            return
        # Only once: a process that dies during its start may leave a partly written mark.
        (name, filled), self._settled = self._settled, None
        for size in (0, filled - 1):
            try:
                looked_at(self._disk.robbed(name, size), self._world.spec(self.number, self.map))
            except DownpourError:
                continue
            raise Violation(
                Promise.RECOVERY,
                f"shard {self.number} comes back from {name} cut from {filled} to {size} bytes,"
                " expected an error",
            )

    # --- the end ----------------------------------------------------------------------------------

    def records(self) -> NDArray[np.void]:
        """All records so far; those of replayed pushes replace the earlier ones."""
        first, rows = self._shard.journal.since(0)
        return np.concatenate([self._rows[:first], rows])

    def drained(self) -> bool:
        return self._process.alive and super().drained()
