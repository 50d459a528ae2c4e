"""A shard as the simulation sees it: its processes, their messages, and the checks on both.

Subclasses: single_shards.py (one process, perhaps with a log) and replicated_shards.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deploy.simulation import invariants, row_model
from deploy.simulation.config import LONGEST_S
from deploy.simulation.invariants import BLOCK, EXACT_PUSHES, Promise, PullWatch, Violation, exact
from deploy.simulation.live_checks import FollowedSettings
from deploy.simulation.network import Deliver
from deploy.simulation.process import SimulatedProcess
from deploy.simulation.read_checks import Reads
from deploy.simulation.reference_model import (
    Beginning,
    check_limit,
    check_state,
    check_versions,
    limit_factor,
    measure_staleness,
)
from deploy.simulation.row_model import RowPush
from deploy.virtual_clock import Clock
from shards import shard_state, wire_format
from shards.aggregation import EACH, ROUND, Quorum
from shards.errors import DownpourError
from shards.ledger import Ledger
from shards.messages import Ack, Install, Joined, LiveSettings, Push, SettingsInForce, Weights
from shards.shard import Shard
from shards.shard_state import WEIGHTS, SavedProgress, ShardState, array_name
from shards.transition_io import Arrival, Outgoing
from shards.update_records import RECORD

if TYPE_CHECKING:
    from deploy.simulation.faults import Ambush
    from deploy.simulation.operator import Operator
    from deploy.simulation.simulation import Simulation
    from deploy.simulation.workers import SimulatedWorker

    Client: TypeAlias = SimulatedWorker | Operator


_BUFFERED = 0  # in place of the version of a push that was handed over in a buffer


class ShardProcess(SimulatedProcess):
    """One process that holds the state of a shard; `former` are records of earlier processes."""

    shard: Shard

    def __init__(self, clock: Clock, name: str) -> None:
        super().__init__(clock, name)
        self.former = np.empty(0, RECORD)

    def records(self) -> NDArray[np.void]:
        """The records of all pushes in its state.

        If both have records of a version, its own replace the `former` ones.
        """
        recent, former = self.shard.metrics.since(0)[1], self.former
        if self.shard.spec.merge in (EACH, ROUND) and self.shard.spec.stale is None:
            version = recent["apply_version"][0] - 1 if len(recent) else self.shard.version
            return np.concatenate([former[former["apply_version"] <= version], recent])
        # An update may hold pushes of several processes, and a push may be in no update: a buffer
        # has yet to apply it, or it was dropped.
        first = {worker.decode(): seq for worker, seq in recent[["worker", "seq"]].tolist()[::-1]}
        ends = self.shard.ledger.cut | {worker: seq - 1 for worker, seq in first.items()}
        return np.concatenate([former[select_rows(former, ends)], recent])


class Graces:
    """Until when others are waited for, by table and the version that opened its round."""

    def __init__(self, shard: Shard | None) -> None:
        """They are of reports that this `shard` has received itself."""
        self.shard = shard
        self.ends: dict[tuple[str, int], float] = {}
        self.seen: set[tuple[str, str, int, int]] = set()


class ShardHost:
    """One shard of a simulated cluster, in one process or several."""

    def __init__(self, world: "Simulation", number: int, *, fresh: bool = False) -> None:
        """`fresh`: the shard receives its state from an operator that reshards the job."""
        self.number = number
        self.map = world.map
        keys = self.map.ranges[number]
        self.blocks = list(range(keys.start // BLOCK, keys.stop // BLOCK))
        buckets = self.map.buckets[number]
        self.row_ids = row_model.ids_within(buckets) if world.setting.rows else []
        self.views: dict[tuple[str, int, int], bytes] = {}
        self.ambushes: list[Ambush] = []
        self._world = world
        self._fresh = fresh
        self._quorate: dict[tuple[str, int], float] = {}  # since when, by a tick
        self._graces = Graces(None)
        self._acknowledged: dict[str, int] = {}  # the last acknowledged push of each worker
        self._handed_over: int | None = None
        self._handed_down: dict[str, int] = {}  # the last push of each worker in its first state
        self._began = 0  # the version of its first state
        self._counts: dict[str, int] = {}  # the updates of each table in its first state
        self._begun_before: list[Beginning] = []  # those of the shards that held the job earlier
        # For each block, the records of its pushes at the shards that held it earlier.
        self._before = dict.fromkeys(self.blocks, np.empty(0, RECORD))
        # The same for each id of a row.
        self._rows_before = dict.fromkeys(self.row_ids, np.empty(0, RECORD))
        # For each block, the pushes by worker that may be missing: those that a resharding cut off.
        self._excused: dict[int, dict[str, set[int]]] = {}
        # The pushes by worker that may be missing because the shard was rolled back.
        self._forgotten: dict[str, set[int]] = {}
        # The pushes by worker that never came: their incarnation died, and the next began later.
        self.absent: dict[str, set[int]] = {}
        first = LiveSettings(world.setting.bound)
        self.followed = FollowedSettings(first, world.proposed)
        served, follows = Reads(world, self).check_read, self._follows if fresh else None
        self._pulls = PullWatch(number, world.setting, served, follows, self._absent)

    def _follows(self, address: bytes) -> bool:
        """True if the worker at this address has trained with the shards that the job left."""
        began_with = self._world.worker_at(address).began_with
        return bool(began_with) and self not in began_with

    def _absent(self) -> list[set[int]]:
        """For each worker, the numbers of pushes that this shard never had."""
        names = (f"w{number}" for number in range(self._world.setting.workers))
        return [set(self.absent.get(name, ())) for name in names]

    # --- what a subclass provides -----------------------------------------------------------------

    @property
    def serving(self) -> "Sequence[ShardProcess]":
        """The processes that hold the authoritative state; more than one if they must agree."""
        raise NotImplementedError

    @property
    def promotable(self) -> "Sequence[ShardProcess]":
        """The processes with a state to check at the end."""
        return self.serving

    def begin(self) -> None:
        """Start its processes."""
        raise NotImplementedError

    def process(self, role: str) -> SimulatedProcess | None:
        """The process in the role `shard`, `primary` or `backup`; None if there is none."""
        raise NotImplementedError

    def route(self, client: "Client") -> tuple[str, Deliver] | None:
        """The process to which this client sends now, and the function that delivers to it."""
        raise NotImplementedError

    def handle(self, process: ShardProcess, arrival: Arrival) -> None:
        """Process a valid request that has arrived."""
        raise NotImplementedError

    def is_drained(self) -> bool:
        """Return whether every request has been processed."""
        raise NotImplementedError

    def is_finished(self) -> bool:
        """Return whether nothing remains to do: no request, and no buffer that no worker can fill.

        If the last lease ran out while the shard was quiesced, its buffer is applied afterwards.
        """
        return self.is_drained() and not self.shard.updates.has_orphaned_buffer

    # --- faults; a kind of shard ignores those that it does not know ------------------------------

    def kill_serving(self) -> None:
        """Kill the serving process during a resharding, if the fault budget allows it."""

    def restart(self, lost_s: float, *, reported: bool) -> None:
        """Return with the state of `lost_s` seconds ago; `reported`: workers learn of it."""

    def die(self, back_s: float, *, power: bool, operations: int) -> None:
        """Lose the process, or the power, after `operations` further disk operations."""

    def fill(self, for_s: float) -> None:
        """Have a full disk for `for_s` seconds."""

    def crash(self, role: str, back_s: float, *, reckless: bool, reported: bool) -> bool:
        """Kill a copy; False if the fault budget forbids it now."""
        return True

    def lose_connection(self, role: str) -> None:
        """Break the coordinator's connection to a copy that is alive."""

    # --- requests and answers ---------------------------------------------------------------------

    def _take(
        self, process: ShardProcess, sender: bytes, header: bytes, frames: Sequence[Any]
    ) -> None:
        try:
            message = wire_format.decode_request(header)
        except DownpourError as error:
            self.reply(process, [process.shard.refuse(sender, 0, error)])
            return
        self._pulls.note_request(sender, message)
        self.handle(process, Arrival(sender, message, wire_format.wrap(frames)))

    def reply(self, process: ShardProcess, answers: Sequence[Outgoing]) -> None:
        """Check answers against the promises, and send them."""
        for answer in answers:
            if type(answer.message) is Ack:
                self._note_ack(self._world.worker_at(answer.to).name, answer.message.seq)
            elif type(answer.message) is Joined:
                self._note_absent(process, self._world.worker_at(answer.to).name)
            elif isinstance(answer.message, SettingsInForce) and not answer.message.busy_s:
                self.followed.note_answer(process.shard, answer.message.settings)
            if isinstance(answer.message, Ack | Weights) and self._world.durable:
                self.followed.check(process.shard)
            bound = self.followed.loosest_bound(process.shard)
            self._pulls.check_answer(process.shard, answer, bound)
        self._pulls.check_gap(process.shard, self.followed.most)
        self._pulls.check_open(process.shard)
        for answer in answers:
            client = self._world.end_at(answer.to)
            deliver = partial(client.at, client.receive, self)
            header = wire_format.encode(answer.message)
            self._world.network.carry(process.name, client.name, header, answer.frames, deliver)

    def blank(self) -> tuple[Install, list[bytes]]:
        """The first state that an operator installs: no pushes, and zeros everywhere."""
        arrays = {
            array_name(section.table, WEIGHTS): np.zeros(len(section.keys), np.float32)
            for section in self._world.layout.sections(self.map.ranges[self.number])
        }
        arrays |= shard_state.empty_tables(self._world.layout)
        state = ShardState(SavedProgress(0, 0, 0, Ledger()), arrays)
        return Install(1, self._world.job), [bytes(frame) for frame in shard_state.encode(state)]

    def note_reports(self, shard: Shard, arrivals: Sequence[Arrival], now: float) -> None:
        """Note, after requests, until when the reports among them let others be waited for."""
        merge = shard.spec.merge
        if not isinstance(merge, Quorum):
            return
        known = self._graces
        if known.shard is not shard:  # it has no times of reports that an earlier process received
            self._graces = known = Graces(shard)
        for message in (arrival.message for arrival in arrivals):
            if not (isinstance(message, Push) and message.parts):
                continue
            table = message.parts[0].table
            reports = shard.updates.reports.by_table.get(table)
            report = table, message.worker, message.incarnation, message.seq
            if reports is None or message.worker not in reports.workers or report in known.seen:
                continue
            known.seen.add(report)
            end = now + merge.grace * merge.overlap * message.compute_s / max(1, message.steps)
            key = table, reports.changed
            known.ends[key] = min(end, known.ends.get(key, end))

    def check_not_early(
        self, shard: Shard, before: Mapping[str, tuple[int, set[str]]], now: float
    ) -> None:
        """Check, after a tick, that what it merged had waited for its grace; see `open_reports`."""
        active = set(shard.ledger.active)
        for table, (changed, reporters) in before.items():
            merged = shard.updates.reports.by_table[table].changed != changed
            end = self._graces.ends.get((table, changed), now)
            if self._graces.shard is shard and merged and end > now and active - reporters:
                text = f"the reports on {table} are merged {end - now:g} s before their grace ends"
                raise Violation(Promise.GRACE, text)

    def open_reports(self, shard: Shard) -> dict[str, tuple[int, set[str]]]:
        """Of each table, the version that opened its round, and the workers it does not await."""
        return {
            table: (reports.changed, {*reports.workers, *reports.sitting})
            for table, reports in shard.updates.reports.by_table.items()
        }

    def check_merged(self, shard: Shard, now: float) -> None:
        """Check, after a tick, that no reports wait longer than any grace allows."""
        merge = shard.spec.merge
        if not isinstance(merge, Quorum):
            return
        quorate = {
            (table, reports.changed)
            for table, reports in shard.updates.reports.by_table.items()
            if len(reports.workers) >= (merge.size or inf) and not shard.moving(now)
        }
        since = {reports: self._quorate.get(reports, now) for reports in quorate}
        self._quorate = since
        longest_s = merge.grace * merge.overlap * LONGEST_S
        late = [table for (table, _), began in since.items() if now - began > longest_s]
        if late:
            raise Violation(
                Promise.PROGRESS, f"the reports on {late[0]} wait longer than their grace"
            )

    # --- the state --------------------------------------------------------------------------------

    @property
    def shard(self) -> Shard:
        """The authoritative state."""
        return self.serving[0].shard

    @property
    def new_address(self) -> bytes | None:
        """The address to which all its serving processes redirect workers, or None."""
        addresses = {process.shard.progress.moved_to for process in self.serving}
        return addresses.pop() if len(addresses) == 1 else None

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
            self.followed.hand_over(successor.followed)
            successor._begun_before = [*self._begun_before, (self._began, self._counts)]
            for table, count in saved.updates.items():
                successor._counts[table] = max(count, successor._counts.get(table, 0))
            for worker, seq in saved.ledger.cut.items():
                last = max(seq, successor._handed_down.get(worker, 0))
                successor._handed_down[worker] = last
            for worker, seq in self._acknowledged.items():
                successor._note_ack(worker, seq)
            successor.check_durable("it receives the state of its predecessors")
        rows = self.serving[0].records()
        rows = rows[select_rows(rows, saved.ledger.cut)].copy()
        rows["apply_version"][rows["apply_version"] > saved.version] = _BUFFERED
        for number in self.row_ids:
            successor = next(host for host in to if number in host.row_ids)
            successor._rows_before[number] = np.concatenate([self._rows_before[number], rows])
        for block in self.blocks:
            successor = next(host for host in to if block in host.blocks)
            known = self._excused.get(block, {})
            successor._before[block] = np.concatenate([self._earlier(block), rows])
            excused = {
                worker: known.get(worker, set()) | seqs | self.absent.get(worker, set())
                for worker, seqs in short.items()
            }
            successor._excused[block] = excused
            successor._pulls.exact &= not any(excused.values())

    def _earlier(self, block: int) -> NDArray[np.void]:
        """The records of a block's pushes at the shards that held it earlier.

        Pushes that came in a buffer are part of this shard's first update.
        """
        rows = self._before[block].copy()
        rows["apply_version"][rows["apply_version"] == _BUFFERED] = self._began + 1
        return rows

    # --- promises ---------------------------------------------------------------------------------

    def check_handed_over(self) -> None:
        """Check that nothing was applied after the state was handed over: it would be lost."""
        if self._handed_over is not None and self.shard.version > self._handed_over:
            raise Violation(
                Promise.EXACTLY_ONCE,
                f"shard {self.number} was handed over at version {self._handed_over} and is at"
                f" {self.shard.version}",
            )

    def _note_ack(self, worker: str, seq: int) -> None:
        self._acknowledged[worker] = max(seq, self._acknowledged.get(worker, 0))

    def _note_absent(self, process: ShardProcess, worker: str) -> None:
        """Note the pushes that count as this worker's although the shard never had them.

        It registers an incarnation that begins after them. None of them was acknowledged here.
        """
        rows = process.records()
        seqs = rows["seq"][rows["worker"] == worker.encode()].tolist()
        first = max([*seqs, self._handed_down.get(worker, 0)]) + 1
        absent = set(range(first, last_applied_seq(process.shard, worker) + 1))
        absent -= self._forgotten.get(worker, set())
        if absent and min(absent) <= self._acknowledged.get(worker, 0):
            raise Violation(
                Promise.EXACTLY_ONCE,
                f"shard {self.number} has acknowledged push {min(absent)} of {worker}, and"
                " registers it without that push",
            )
        self.absent[worker] = self.absent.get(worker, set()) | absent

    def check_applied(self, worker: str, seq: int) -> None:
        """Check that push `seq` of `worker` is applied, because the worker has an Ack of it."""
        sent = self._acknowledged.get(worker, 0)
        last_seq = last_applied_seq(self.shard, worker) if self._world.durable else sent
        if seq in self._forgotten.get(worker, ()):
            return
        if min(sent, last_seq) < seq or seq in self.absent.get(worker, ()):
            raise Violation(
                Promise.EXACTLY_ONCE,
                f"{worker} has an ack of push {seq}, shard {self.number} has acknowledged {sent}"
                f" and applied {last_seq}",
            )

    def drops(self, worker: str, seq: int) -> bool:
        """Return whether push `seq` of `worker` is in the records as dropped."""
        setting = self._world.setting
        if not (setting.merge == "quorum" or setting.backups or setting.stale_drop):
            return False
        rows = np.concatenate([*map(self._earlier, self.blocks), self.serving[0].records()])
        pushes = rows[(rows["worker"] == worker.encode()) & (rows["seq"] == seq)]
        return bool(pushes["dropped"].any())

    def check_durable(self, when: str) -> None:
        """Check that each process that may be promoted holds every acknowledged push."""
        for process in self.promotable:
            self.check_acknowledged(process.shard, f"{process.name}, when {when}")

    def check_acknowledged(self, shard: Shard, where: str) -> None:
        """Check that a state of this shard holds every acknowledged push."""
        for worker, seq in self._acknowledged.items():
            last_seq = last_applied_seq(shard, worker)
            if last_seq < seq:
                raise Violation(
                    Promise.DURABLE,
                    f"shard {self.number}, {where}: {last_seq} pushes of {worker} are held,"
                    f" {seq} are acknowledged",
                )

    def finish(self) -> None:
        """Check the promises at the end of a run."""
        for process in self.promotable:
            if process.shard.parameters._weights is not None:
                self._check_held(process)
        if self._world.durable:
            self._check_whole()

    def pushes(self) -> Iterator[NDArray[np.void]]:
        """The records of each block's pushes, here and at the shards that held it earlier."""
        rows = [process.records() for process in self.serving[:1]]
        for block in self.blocks:
            yield np.concatenate([self._earlier(block), *rows])

    def _check_held(self, process: ShardProcess) -> None:
        """Check that a process holds exactly the pushes in its records, none of them torn."""
        setting, shard, where = self._world.setting, process.shard, process.name
        rows = process.records()
        if self._world.durable:
            self.followed.check_rates(rows, where)
        if setting.slots:
            check_versions(rows, self._began, shard)
            if setting.stale is not None:
                check_limit(rows, setting.stale, where)
            for block in self.blocks:
                before = self._earlier(block)
                begun = [*self._begun_before, (self._began, self._counts)]
                check_state(np.concatenate([before, rows]), shard, setting, block, begun, where)
        if setting.rows:
            pushes = {number: self._row_pushes(number, rows) for number in self.row_ids}
            row_model.check_rows(shard, setting, pushes, where)
        if not self._world.durable:
            invariants.check_begun(rows, self.absent, self._forgotten, where)
            if exact(setting, "none"):
                missing = self._missing(rows)
                invariants.check_prefix(shard.parameters.weights(), missing, where)

    def _row_pushes(self, number: int, rows: NDArray[np.void]) -> list[RowPush]:
        """The pushes that were applied to the row of an id, here and where it was earlier."""
        history = np.concatenate([self._rows_before[number], rows])
        applied, limit = history[history["dropped"] == 0], self._world.setting.stale
        names = ["apply_version", "worker", "seq", "incarnation", "rate"]
        records = zip(applied[names].tolist(), measure_staleness(applied), strict=True)
        return [
            RowPush(version, int(worker[1:]), seq, incarnation, rate * limit_factor(stale, limit))
            for (version, worker, seq, incarnation, rate), stale in records
        ]

    def _missing(self, rows: NDArray[np.void]) -> list[set[int]]:
        """For each worker, the pushes that may be missing from the state with these records.

        A push that the shard lost is in it again if its worker repeated it. A worker that died
        meanwhile does not, because its next life begins after the push.
        """
        held = set(rows[["worker", "seq"]].tolist())
        absent = self._absent()
        for number, seqs in enumerate(absent):
            name = f"w{number}"
            lost = self._forgotten.get(name, set())
            seqs |= {seq for seq in lost if (name.encode(), seq) not in held}
        return absent

    def _check_whole(self) -> None:
        """Check that the weights have each push of each worker once, or its share of a round."""
        shard, workers, setting = self.shard, self._world.workers, self._world.setting
        invariants.check_drained(shard, self.number)
        names = [worker.name for worker in workers.values()]
        rows, weights = self.serving[0].records(), shard.parameters.weights()
        for name in names:
            last_seq = last_applied_seq(shard, name)
            if last_seq != setting.steps and not self._forgotten.get(name):
                raise Violation(Promise.EXACTLY_ONCE, f"the ledger has {last_seq} pushes of {name}")
        for index, block in enumerate(self.blocks):
            all_rows = np.concatenate([self._earlier(block), rows])
            excused = self._excused.get(block, {})
            missing = excused, self.absent, self._forgotten
            invariants.check_records(all_rows, setting.steps, names, *missing)
            if setting.slots:
                continue  # `_check_held` has compared its floats with its records
            values = weights[BLOCK * index : BLOCK * (index + 1)]
            if setting.push in EXACT_PUSHES:
                invariants.check_place(values, block, len(set(all_rows["apply_version"].tolist())))
            for number, worker in workers.items():
                short = excused.get(worker.name) or self._forgotten.get(worker.name)
                if short and setting.push != "none":
                    continue  # the residual of the missing pushes is unknown
                remainder = invariants.residual(worker.session, block)
                invariants.check_sums(all_rows, values, number, remainder)


def select_rows(rows: NDArray[np.void], cut: Mapping[str, int]) -> NDArray[np.bool_]:
    """Which of a shard's records are of pushes up to `cut`, each worker's last one.

    The versions do not show that: a push that its round has dropped makes none.
    """
    pushes = rows[["worker", "seq"]].tolist()
    return np.array([seq <= cut.get(worker.decode(), 0) for worker, seq in pushes], bool)


def last_applied_seq(shard: Shard, worker: str) -> int:
    """The number of a worker's last push that the ledger of a shard holds; 0 without one."""
    entry = shard.ledger.entries.get(worker)
    return 0 if entry is None else entry.seq
