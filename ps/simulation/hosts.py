"""What stands behind a shard's number, whatever kind of cluster it is in."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ps.simulation import invariants
from ps.simulation.clock import Action, Party
from ps.simulation.invariants import (
    BLOCK,
    EXACT_PUSHES,
    Promise,
    PullWatch,
    Violation,
    exact,
)
from ps.simulation.network import Deliver
from ps.simulation.reads import Reads
from ps.simulation.serial import check_state, check_versions
from shards import codec
from shards.ledger import Ledger
from shards.messages import Install, Refusal
from shards.records import RECORD
from shards.shard import Shard
from shards.state import Saved
from shards.transitions import Outgoing

if TYPE_CHECKING:
    from ps.simulation.faults import Ambush
    from ps.simulation.world import World


class End(Protocol):
    """Whoever asks: a life of a worker, or an operator."""

    name: str
    address: bytes

    def at(self, action: Action, *arguments: Any) -> None:
        """Do it there, if it lives."""
        ...

    def receive(self, host: "Host", header: bytes, frames: Sequence[Any]) -> None:
        """An answer has come."""
        ...


class Host:
    """One shard as the world sees it; single.py and groups.py say what it is made of."""

    def __init__(self, world: "World", number: int, *, fresh: bool = False) -> None:
        """A `fresh` one is given its state by an operator who moves the job there."""
        setting = world.setting
        self.number = number
        self.map = world.map
        ranges = self.map.ranges[number]
        self.blocks = [n for keys in ranges for n in range(keys.start // BLOCK, keys.stop // BLOCK)]
        self.views: dict[tuple[int, int], bytes] = {}
        self.ambushes: list[Ambush] = []
        self._world = world
        self._fresh = fresh
        self._handed_over: int | None = None
        self._began = 0  # the version that it was given first
        # For each block, the records of its pushes at shards that held it before this one.
        self._before = dict.fromkeys(self.blocks, np.empty(0, RECORD))
        # For each block, what it need not hold of whom: pushes that were cut off by a move.
        self._excused: dict[int, dict[str, set[int]]] = {}
        # What it need not hold any more of whom, for it was rolled back behind it.
        self._forgotten: dict[str, set[int]] = {}
        self._pulls = PullWatch(
            number,
            setting.workers,
            setting.bound,
            setting.burst,
            Reads(world, self).served,
            exact=exact(setting, setting.pull),
            follows=self._follows if fresh else None,
        )

    def _follows(self, address: bytes) -> bool:
        """Whether the life at this address has trained with the shards that the job left."""
        began_with = self._world.life_at(address).began_with
        return bool(began_with) and self not in began_with

    def begin(self) -> None:
        """Let its processes live."""
        raise NotImplementedError

    @property
    def shard(self) -> Shard:
        """The state that counts."""
        raise NotImplementedError

    def party(self, role: str) -> Party | None:
        """The process that plays a role: shard, primary or backup."""
        raise NotImplementedError

    @property
    def moved_to(self) -> bytes | None:
        """Where it sends its workers, if it does."""
        return self.shard.stance.moved_to

    def records(self) -> NDArray[np.void]:
        """Of all that this shard has applied to the state that counts, in all its lives."""
        raise NotImplementedError

    def hand_over(self, to: Sequence["Host"], saved: Saved, short: Mapping[str, set[int]]) -> None:
        """Others are given what this one holds, which lacks pushes that others have."""
        self._handed_over = saved.version
        for heir in to:
            heir._began = max(heir._began, saved.version)
        rows = self.records()
        rows = rows[rows["apply_version"] <= saved.version]
        for block in self.blocks:
            heir, known = heir_of(block, to), self._excused.get(block, {})
            heir._before[block] = np.concatenate([self._before[block], rows])
            heir._excused[block] = {w: known.get(w, set()) | seqs for w, seqs in short.items()}
            heir._pulls.exact &= not any(heir._excused[block].values())

    def check_handed_over(self) -> None:
        """Its workers were sent on: what it has applied since is nowhere else."""
        if self._handed_over is not None and self.shard.version > self._handed_over:
            raise Violation(
                Promise.EXACTLY_ONCE,
                f"shard {self.number} was moved at version {self._handed_over} and is at"
                f" {self.shard.version}",
            )

    def check_held(self, shard: Shard, rows: NDArray[np.void], where: str) -> None:
        """Whatever `shard` has lost, it holds what `rows`, its records, tell, and no half of it."""
        setting = self._world.setting
        if setting.slots:
            check_versions(rows, self._began, shard)
            for place, block in enumerate(self.blocks):
                before = self._before[block]
                check_state(np.concatenate([before, rows]), shard, place, block, where)
        if not self._world.durable:
            invariants.check_begun(rows, where)
            if exact(setting, "none"):
                invariants.check_prefix(shard.held.weights(), setting.workers, where)

    def check_whole(self) -> None:
        """Every push of every worker is in it once, or a share of a round's mean is."""
        shard, lives, setting = self.shard, self._world.lives, self._world.setting
        invariants.check_drained(shard, self.number)
        names = [life.name for life in lives.values()]
        rows, weights = self.records(), shard.held.weights()
        for place, block in enumerate(self.blocks):
            all_rows = np.concatenate([self._before[block], rows])
            excused = self._excused.get(block, {})
            invariants.check_records(all_rows, setting.steps, names, excused, self._forgotten)
            if setting.slots:
                continue  # its floats were held against its records
            own = weights[BLOCK * place : BLOCK * (place + 1)]
            if setting.push in EXACT_PUSHES:
                invariants.check_place(own, block, len(set(all_rows["apply_version"].tolist())))
            for number, life in lives.items():
                short = excused.get(life.name) or self._forgotten.get(life.name)
                if short and setting.push != "none":
                    continue  # how much of it was kept back nobody knows
                kept = invariants.residual(life.session, block)
                invariants.check_sums(all_rows, own, number, kept)

    def struck(self) -> None:
        """Lose the process that serves, at a moment that a move has chosen, if that may be."""
        raise NotImplementedError

    def route(self, life: End) -> tuple[str, Deliver] | None:
        """The end that this worker now sends to, and what takes a message there."""
        raise NotImplementedError

    def check_applied(self, worker: str, seq: int) -> None:
        """`worker` was told that push `seq` is applied."""
        raise NotImplementedError

    def restart(self, lost_s: float, *, told: bool) -> None:
        """Die and come back with a saved state, `told` if it is old; a group's copy never does."""

    def die(self, back_s: float, *, power: bool, operations: int) -> None:
        """Lose process or power, at once or when the disk has done so many more operations."""

    def fill(self, for_s: float) -> None:
        """Have no room left on the disk for a while."""

    def crash(self, role: str, back_s: float, *, reckless: bool, told: bool) -> bool:
        """Lose a copy; False if that may not be now. A single process is not lost."""
        return True

    def lose_connection(self, role: str) -> None:
        """Have the coordinator miss a copy that lives."""

    def elsewhere(self, reply: Refusal) -> bool:
        """Whether an operator is told so by who does not serve, and is to ask another."""
        return False

    def drained(self) -> bool:
        """Whether everything that was asked has been dealt with."""
        return True

    def finish(self) -> None:
        """Hold what is left against the promises."""
        raise NotImplementedError

    def blank(self) -> tuple[Install, tuple[bytes, bytes]]:
        """What an operator installs at first: nothing pushed, zeros everywhere."""
        saved = codec.encode_state(Saved(0, 0, 0, Ledger()))
        return Install(1, self._world.job, self._world.table.name, []), (
            saved,
            bytes(4 * BLOCK * len(self.blocks)),
        )

    def answer(self, party: Party, answers: Sequence[Outgoing]) -> None:
        """Send answers on their way."""
        for answer in answers:
            life = self._world.end_at(answer.to)
            self._world.network.carry(
                party.name, life.name, codec.encode(answer.message), answer.frames, _to(life, self)
            )


def heir_of(block: int, hosts: Sequence[Host]) -> Host:
    """Who of these has a block of floats."""
    return next(host for host in hosts if block in host.blocks)


def _to(life: End, host: Host) -> Deliver:
    def deliver(header: bytes, frames: Sequence[Any]) -> None:
        life.at(life.receive, host, header, frames)

    return deliver
