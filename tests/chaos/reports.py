"""Learners in a chaos run, and what the weights prove of their reports on fragments.

Learners exchange two tables by the step machine of `decoupled_diloco`, and the shards merge reports
by a quorum, under plain SGD at rate 1. The machine decides when to report and when to take a
fragment; what a report holds is ours, so that the weights are a list of all merges:

- Each shard's piece of a fragment is a sequence of rounds, in each of which every learner has one
  cell. A report sets its learner's cell of the round that its weights await, to `unit`.
- A merge of the learners S therefore adds unit * w / (sum of w over S) to the cells of its round.
  Weights w are 1 and 2, and `unit` is a multiple of every sum of them: float32 is exact.

So each round names who was merged in it, and with which weights. A report that counts twice, or in
a later round, makes a cell too large. Every learner writes down what it reports before it sends it,
and whether the acknowledgement named it as dropped:

    acknowledged as merged  =>  its cells are set
    acknowledged as dropped =>  its cells are not set, unless by another report of the same round
    a cell is set           =>  somebody reported it

Where a shard may roll back, a report that it acknowledged shortly before its death may be gone, and
learners may report on a round that is yet to come.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import lcm
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ps import ShardState
from ps.client import Client
from ps.session.events import Pushed
from shards.aggregation import Average, ServerHalf
from shards.rules import SGD
from shards.schedules import Fixed
from shards.shard_state import WEIGHTS, array_name
from shards.tables import Layout, ShardMap
from tests.chaos.journal import Event, Journal, Judged, Ready, Reports
from tests.chaos.oracle import GRACE_S, Death
from tests.chaos.record import Record, Verdict
from worker.strategies.decoupled_diloco import DecoupledDiLoCo
from worker.training import step_machine as machine
from worker.training.fragment_machine import build_machine
from worker.training.step_machine import Plan
from worker.training.training_loop import ClientDriver

Floats = NDArray[np.float32]

_STEPS = 2**31
_H, _OVERLAP = 6, 2


def strategy(quorum: int) -> DecoupledDiLoCo:
    """The learners' strategy."""
    return DecoupledDiLoCo(h=_H, overlap=_OVERLAP, k=quorum, average=Average.MEAN)


def server_half(quorum: int, workers: int) -> ServerHalf:
    """The shards' half: merged reports are applied as they are."""
    half = strategy(quorum).server(workers)
    return msgspec.structs.replace(half, rule=SGD(), rate=1.0)


def weight_of(worker: int) -> int:
    """The weight of a learner's reports: 1 or 2."""
    return 1 + worker % 2


def unit_of(workers: int) -> int:
    """A multiple of every sum of the weights of some learners."""
    return lcm(*range(1, 1 + sum(map(weight_of, range(workers)))))


class Piece(NamedTuple):
    """One shard's part of a fragment: it begins at float `start` of the table."""

    table: str
    shard: int
    start: int
    rounds: int
    workers: int

    def cells(self, weights: Floats) -> Floats:
        """Its cells in the weights of its table, of shape (rounds, workers)."""
        stop = self.start + self.rounds * self.workers
        return weights[self.start : stop].reshape(self.rounds, self.workers)

    def merges(self, weights: Floats) -> int:
        """The number of merges that these weights hold."""
        total = float(self.cells(weights).sum(dtype=np.float64)) / unit_of(self.workers)
        assert total == int(total), f"{self}: {total} merges"
        return int(total)


def pieces_of(layout: Layout, shard_map: ShardMap, workers: int) -> list[Piece]:
    """The parts of all fragments."""
    pieces = []
    for table in layout.tables:
        section = layout.section(table.name)
        for shard, keys in enumerate(shard_map.ranges):
            start = max(section.start, keys.start)
            stop = min(section.start + table.tensors[0].size, keys.stop)
            rounds = (stop - start) // workers
            if rounds > 0:
                pieces.append(Piece(table.name, shard, start - section.start, rounds, workers))
    return pieces


class Learner(ClientDriver):
    """One learner's life; its steps take `step_s`."""

    def __init__(
        self,
        client: Client,
        number: int,
        workers: int,
        quorum: int,
        step_s: float,
        record: Record,
        journal: Journal,
    ) -> None:
        plan = Plan(
            steps=_STEPS,
            seed=1,
            strategy=strategy(quorum),
            schedule=Fixed(base_rate=1.0),
            workers=workers,
        )
        self.machine = build_machine(
            plan,
            client.layout,
            worker=client.worker,
            clock=client.clock,
            step=client.step,
            optimizer=self._take_no_step,
        )
        super().__init__(client, self.machine)
        self._number, self._pause_s = number, step_s
        self._record, self._journal = record, journal
        self._pieces = pieces_of(client.layout, client.cluster.map, workers)
        self._anchors: dict[str, Floats] = {}
        self._dropped: dict[int, int] = {}
        client.on_pushed = self._note_pushed

    def carry_out(self, want: machine.Want, *, ends: bool = False) -> machine.Answer:
        """Carry out one want; with `ends` the data is at its end."""
        match want:
            case machine.ReadBatches():
                time.sleep(self._pause_s)
                return machine.BatchesRead(0 if ends else 1)
            case machine.ComputeGradient():
                nothing = np.zeros_like(want.weights)
                return machine.GradientComputed(nothing, 1.0, self._pause_s)
            case machine.PushReport():
                self._exchange(want)
                return None
        answer = super().carry_out(want)
        match want, answer:
            case machine.PullWeights(), machine.WeightsPulled(weights=weights):
                for name in self.client.layout.names:
                    keys = self.client.layout.section(name)
                    self._anchors[name] = weights[keys.start : keys.stop]
            case machine.TakeFragment(table=name), machine.FragmentTaken(weights=weights):
                self._anchors[name] = weights
        return answer

    def _take_no_step(self) -> Floats:
        """Leave the weights as they are; a real step would load numba in each life."""
        assert self.machine.local is not None
        return self.machine.local.weights

    def _exchange(self, want: machine.PushReport) -> None:
        """Send our own report in place of the machine's, and wait for its acknowledgement."""
        seq, rounds = self.client.seq + 1, dict[int, int]()
        reports = {name: self._fill(name, rounds) for name in want.reports}
        tokens = weight_of(self._number)  # tokens^2 / window = tokens
        self._record.sends(seq)
        table = next(iter(reports), "")
        self._journal.write(Reports(time.monotonic(), seq, table, rounds))
        super().carry_out(want._replace(reports=reports, tokens=tokens, window=tokens))
        self.client.flush()
        at = time.monotonic()
        self._journal.write(Judged(at, seq, self._dropped.pop(seq)))
        self._record.hears(seq, at)

    def _fill(self, name: str, rounds: dict[int, int]) -> Floats:
        """A report on a fragment; notes the round of each shard's piece."""
        anchor = self._anchors[name]
        report = np.zeros_like(anchor)
        for piece in self._pieces:
            if piece.table == name:
                rounds[piece.shard] = piece.merges(anchor)
                assert rounds[piece.shard] < piece.rounds, "no round is left: --floats"
                piece.cells(report)[rounds[piece.shard], self._number] = -unit_of(piece.workers)
        return report

    def _note_pushed(self, event: Pushed) -> None:
        self._dropped[event.seq] = event.dropped


class Sent(NamedTuple):
    """A report of a learner, and its fate: the shards that dropped it; None if it did not hear."""

    report: Reports
    heard_at: float
    dropped: int | None

    @property
    def is_unsure(self) -> bool:
        """Return whether a shard may have merged it: it did not answer, or another dropped it."""
        return self.dropped is None or 0 < self.dropped < len(self.report.rounds)


def reports_in(events: Sequence[Event]) -> list[Sent]:
    """The reports in a learner's journal."""
    judged = {event.seq: event for event in events if isinstance(event, Judged)}
    reports = [event for event in events if isinstance(event, Reports)]
    # A next life uses the number of a report that no shard had received before the death again.
    last = {report.seq: report for report in reports}
    sent = []
    for report in reports:
        fate = judged.get(report.seq) if last[report.seq] is report else None
        if report.table:
            heard = (0.0, None) if fate is None else (fate.at, fate.dropped)
            sent.append(Sent(report, *heard))
    return sent


def exchanges_to_merge(events: Sequence[Event]) -> Iterator[int]:
    """For each life, the exchange of a fragment, counted from 1, in which a report is first merged.

    Lives that ended before are left out, unless all fragments had been exchanged by then.
    """
    lives: list[list[Event]] = []
    for event in events:
        if isinstance(event, Ready):
            lives.append([])
        elif lives:
            lives[-1].append(event)
    for life in lives:
        exchanges: Counter[str] = Counter()
        for sent in reports_in(life):
            if sent.dropped is not None:
                exchanges[sent.report.table] += 1
            if sent.dropped == 0:
                yield exchanges[sent.report.table]
                break
        else:
            if len(exchanges) > 1:
                yield 1 + min(exchanges.values())


def judge_reports(
    states: Sequence[ShardState],
    pieces: Sequence[Piece],
    journals: Mapping[str, Sequence[Event]],
    deaths: Sequence[Death],
    rollback_s: float | None,
) -> list[Verdict]:
    """What the weights prove, for each learner and shard."""
    sent = [reports_in(events) for events in journals.values()]
    verdicts = []
    for shard, state in enumerate(states):
        faults: list[list[str]] = [[] for _ in journals]
        counts = np.zeros((3, len(journals)), int)  # acknowledged, applied, sent
        for piece in pieces:
            if piece.shard != shard:
                continue
            # A shard holds its part of a table alone.
            weights = state.arrays[array_name(piece.table, WEIGHTS)]
            cells = piece._replace(start=0).cells(weights)
            if rollback_s is None:
                _judge_rounds(piece, cells, faults)
            for number, reports in enumerate(sent):
                mine = [one for one in reports if one.report.table == piece.table]
                back = [death for death in deaths if death.shard == shard]
                judge = _CellJudge(piece, cells[:, number], mine, back, rollback_s)
                faults[number] += judge.faults()
                counts[:, number] += judge.counts
        for number, name in enumerate(journals):
            acknowledged, applied, total = map(int, counts[:, number])
            verdicts.append(
                Verdict(
                    name,
                    shard,
                    acknowledged,
                    applied,
                    total,
                    applied,
                    0,
                    0,
                    torn=False,
                    rows=tuple(faults[number]),
                )
            )
    return verdicts


def _judge_rounds(piece: Piece, cells: Floats, faults: list[list[str]]) -> None:
    """Each round has its merge's shares, and no round is left out."""
    unit, merged = unit_of(piece.workers), cells != 0
    last = int(merged.any(axis=1).sum())
    for index, row in enumerate(cells):
        names = np.flatnonzero(row).tolist()
        if not names:
            if index < last:
                faults[0].append(f"{piece.table}, shard {piece.shard}: round {index} is left out")
            continue
        total = sum(weight_of(number) for number in names)
        for number in names:
            share = unit * weight_of(number) / total
            if row[number] != share:
                text = f"round {index}: {row[number]:g}, expected {share:g}"
                faults[number].append(f"{piece.table}, shard {piece.shard}: {text}")


class _CellJudge:
    """Compares one learner's cells of a piece with its reports."""

    def __init__(
        self,
        piece: Piece,
        cells: Floats,
        reports: Sequence[Sent],
        deaths: Sequence[Death],
        rollback_s: float | None,
    ) -> None:
        self._cells, self._reports = cells, reports
        self._deaths, self._rollback_s = deaths, rollback_s
        self._where = f"{piece.table}, shard {piece.shard}"
        self._shard = piece.shard
        kept = {self._round(one) for one in reports if one.dropped == 0 and not self._is_back(one)}
        applied = int(np.count_nonzero(cells))
        self.counts = len(kept), applied, len({self._round(one) for one in reports})

    def faults(self) -> Iterator[str]:
        for index in range(len(self._cells)):
            reports = [one for one in self._reports if self._round(one) == index]
            accepted = [one for one in reports if one.dropped == 0]
            unsure = [one for one in reports if one.is_unsure]
            where = f"{self._where}, round {index}"
            if self._cells[index] and not accepted and not unsure:
                yield f"{where}: set, and all of {len(reports)} reports were dropped"
            lost = [one for one in accepted if not self._is_back(one)]
            if not self._cells[index] and lost:
                yield f"{where}: report {lost[0].report.seq} was acknowledged and is not in it"
            if len(accepted) > 1 and not self._deaths_roll_back:
                yield f"{where}: {len(accepted)} reports were acknowledged as merged"

    @property
    def _deaths_roll_back(self) -> bool:
        return self._rollback_s is not None and bool(self._deaths)

    def _round(self, sent: Sent) -> int:
        return sent.report.rounds[self._shard]

    def _is_back(self, sent: Sent) -> bool:
        """Return whether a death may have taken the report back."""
        if self._rollback_s is None:
            return False
        longest_s = self._rollback_s + GRACE_S
        return any(0 <= death.after - sent.heard_at <= longest_s for death in self._deaths)
