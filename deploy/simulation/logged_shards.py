"""A shard with a log on a disk, at the levels `process` and `logged`, which dies and recovers.

Its log is the real one (ps/wal/writer.py) on a simulated disk (disk.py). After each death, the
state recovered from the disk must equal the shard's state bit for bit. After a death between two
turns, that is the state at that moment. After a death during the writing of a turn, it may be the
state before or after that turn, because no request of it has been answered.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from deploy.simulation import invariants
from deploy.simulation.disk import DeferredTask, Died, SimulatedDisk
from deploy.simulation.invariants import Promise, Violation
from deploy.simulation.shard_hosts import ShardProcess
from deploy.simulation.single_shards import SingleShardHost
from ps.wal.recovery import looked_at
from ps.wal.writer import BackgroundTask, LoggedShard, WriteAheadLog
from shards.envelopes import Outgoing
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
        # The newest log and its number of valid bytes, if the disk surely holds them.
        self._settled: tuple[str, int] | None = None
        super().__init__(world, number, fresh=fresh)

    def _start(self) -> None:
        """Start a process that recovers its state from the disk."""
        setting = self._world.setting
        self._boot += 1
        shard = Shard(self._world.spec(self.number, self.map), self._boot)
        self._log = WriteAheadLog(self._disk, setting.durability, setting.log_bytes, self._aside)
        self._log.recover(shard, self._process.now)
        self._process.shard, self._log_or_shard = shard, LoggedShard(shard, self._log)

    def _aside(self, work: Callable[[], None]) -> BackgroundTask:
        errand = DeferredTask(work)
        when_s = self._world.clock.random.random() * LONGEST_DEFERRAL_S
        self._process.after(when_s, self._guarded, errand.join)
        return errand

    # --- dying ------------------------------------------------------------------------------------

    def _act(self, turn: Callable[[], Sequence[Outgoing]]) -> None:
        endangered = self._disk.fuse is not None or self._disk.full or self._log._failure
        before = [invariants.image(self.shard)] if endangered else []
        answers: list[Outgoing] = []
        if self._guarded(lambda: answers.extend(turn()), before):
            for answer in answers:
                if type(answer.message) is Ack:
                    worker = self._world.life_at(answer.to).name
                    self.note_acknowledged(worker, answer.message.seq)
            super()._act(lambda: answers)

    def _guarded(self, action: Callable[[], None], before: Sequence[Image] = ()) -> bool:
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
        self._settled = (self._log.name, self._log.filled) if between_turns else None
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
            found = self._check_disk() if self._world.durable else None
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
            self._expected = [found] if found is not None else self._expected
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
        self.check_durable(shard, "back from its disk")
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
