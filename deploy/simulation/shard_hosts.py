"""The simulated implementation of a shard: the base class for all kinds of clusters."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from deploy.simulation import invariants
from deploy.simulation.clock import Action, SimulatedProcess
from deploy.simulation.invariants import BLOCK, EXACT_PUSHES, Promise, PullWatch, Violation, exact
from deploy.simulation.network import Deliver
from deploy.simulation.reads import Reads
from deploy.simulation.reference_model import check_state, check_versions
from shards import wire_format
from shards.envelopes import Outgoing
from shards.ledger import Ledger
from shards.messages import Install, Refusal
from shards.parameters import SavedProgress
from shards.shard import Shard
from shards.update_records import RECORD

if TYPE_CHECKING:
    from deploy.simulation.faults import Ambush
    from deploy.simulation.simulation import Simulation


class End(Protocol):
    """A client of shards: one incarnation of a worker, or an operator."""

    name: str
    address: bytes

    def at(self, action: Action, *arguments: Any) -> None:
        """Run the action in this process, if it is alive."""
        ...

    def receive(self, host: "ShardHost", header: bytes, frames: Sequence[Any]) -> None:
        """Process an answer that has arrived."""
        ...


class ShardHost:
    """One shard as the simulation sees it.

    Subclasses implement it: single_shards.py, logged_shards.py and replicated_shards.py.
    """

    def __init__(self, world: "Simulation", number: int, *, fresh: bool = False) -> None:
        """`fresh`: the shard receives its state from an operator that reshards the job."""
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
        self._began = 0  # the version of its first state
        # For each block, the records of its pushes at the shards that held it earlier.
        self._before = dict.fromkeys(self.blocks, np.empty(0, RECORD))
        # For each block, the pushes by worker that may be missing: those that a resharding cut off.
        self._excused: dict[int, dict[str, set[int]]] = {}
        # The pushes by worker that may be missing because the shard was rolled back.
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
        """Start its processes."""
        raise NotImplementedError

    @property
    def shard(self) -> Shard:
        """The authoritative state."""
        raise NotImplementedError

    def process(self, role: str) -> SimulatedProcess | None:
        """The process in the role `shard`, `primary` or `backup`; None if there is none."""
        raise NotImplementedError

    @property
    def moved_to(self) -> bytes | None:
        """The address to which it redirects its workers, or None."""
        return self.shard.progress.moved_to

    def records(self) -> NDArray[np.void]:
        """The records of all pushes applied to the authoritative state, across restarts."""
        raise NotImplementedError

    def hand_over(
        self, to: Sequence["ShardHost"], saved: SavedProgress, short: Mapping[str, set[int]]
    ) -> None:
        """Pass the records to the successors `to`.

        `saved` is the progress that was handed over; `short` are the pushes, by worker, that it
        lacks and other shards have.
        """
        self._handed_over = saved.version
        for successor in to:
            successor._began = max(successor._began, saved.version)
        rows = self.records()
        rows = rows[rows["apply_version"] <= saved.version]
        for block in self.blocks:
            successor, known = holder_of(block, to), self._excused.get(block, {})
            successor._before[block] = np.concatenate([self._before[block], rows])
            excused = {w: known.get(w, set()) | seqs for w, seqs in short.items()}
            successor._excused[block] = excused
            successor._pulls.exact &= not any(excused.values())

    def check_handed_over(self) -> None:
        """Check that nothing was applied after the state was handed over: it would be lost."""
        if self._handed_over is not None and self.shard.version > self._handed_over:
            raise Violation(
                Promise.EXACTLY_ONCE,
                f"shard {self.number} was moved at version {self._handed_over} and is at"
                f" {self.shard.version}",
            )

    def check_held(self, shard: Shard, rows: NDArray[np.void], where: str) -> None:
        """Check that `shard` holds exactly the pushes in its records `rows`, none of them torn."""
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
        """Check that every push of every worker is in it once, or its share of a round's mean."""
        shard, lives, setting = self.shard, self._world.lives, self._world.setting
        invariants.check_drained(shard, self.number)
        names = [life.name for life in lives.values()]
        rows, weights = self.records(), shard.held.weights()
        for place, block in enumerate(self.blocks):
            all_rows = np.concatenate([self._before[block], rows])
            excused = self._excused.get(block, {})
            invariants.check_records(all_rows, setting.steps, names, excused, self._forgotten)
            if setting.slots:
                continue  # `check_held` has compared its floats with its records
            own = weights[BLOCK * place : BLOCK * (place + 1)]
            if setting.push in EXACT_PUSHES:
                invariants.check_place(own, block, len(set(all_rows["apply_version"].tolist())))
            for number, life in lives.items():
                short = excused.get(life.name) or self._forgotten.get(life.name)
                if short and setting.push != "none":
                    continue  # the residual of the missing pushes is unknown
                kept = invariants.residual(life.session, block)
                invariants.check_sums(all_rows, own, number, kept)

    def kill_serving(self) -> None:
        """Kill the serving process during a resharding, if the fault budget allows it."""
        raise NotImplementedError

    def route(self, life: End) -> tuple[str, Deliver] | None:
        """The process to which this client sends now, and the function that delivers to it."""
        raise NotImplementedError

    def check_applied(self, worker: str, seq: int) -> None:
        """Check that push `seq` of `worker` is applied, because it was acknowledged."""
        raise NotImplementedError

    def restart(self, lost_s: float, *, reported: bool) -> None:
        """Die and return with the state of `lost_s` seconds ago; `reported`: workers learn of it.

        ReplicatedShardHost of a group are never restarted.
        """

    def die(self, back_s: float, *, power: bool, operations: int) -> None:
        """Lose the process, or the power, after `operations` further disk operations."""

    def fill(self, for_s: float) -> None:
        """Have a full disk for `for_s` seconds."""

    def crash(self, role: str, back_s: float, *, reckless: bool, reported: bool) -> bool:
        """Kill a copy; False if the fault budget forbids it now. SingleShardHost processes ignore it."""
        return True

    def lose_connection(self, role: str) -> None:
        """Break the coordinator's connection to a copy that is alive."""

    def elsewhere(self, reply: Refusal) -> bool:
        """Whether the refusal means that another copy serves, which the operator is to ask."""
        return False

    def drained(self) -> bool:
        """Whether every request has been processed."""
        return True

    def finish(self) -> None:
        """Check the promises at the end of a run."""
        raise NotImplementedError

    def blank(self) -> tuple[Install, tuple[bytes, bytes]]:
        """The first state that an operator installs: no pushes, and zeros everywhere."""
        saved = wire_format.encode_state(SavedProgress(0, 0, 0, Ledger()))
        return Install(1, self._world.job, self._world.table.name, []), (
            saved,
            bytes(4 * BLOCK * len(self.blocks)),
        )

    def answer(self, process: SimulatedProcess, answers: Sequence[Outgoing]) -> None:
        """Send answers over the network."""
        for answer in answers:
            life = self._world.end_at(answer.to)
            self._world.network.carry(
                process.name,
                life.name,
                wire_format.encode(answer.message),
                answer.frames,
                _to(life, self),
            )


def holder_of(block: int, hosts: Sequence[ShardHost]) -> ShardHost:
    """The shard that holds a block of floats."""
    return next(host for host in hosts if block in host.blocks)


def _to(life: End, host: ShardHost) -> Deliver:
    def deliver(header: bytes, frames: Sequence[Any]) -> None:
        life.at(life.receive, host, header, frames)

    return deliver
