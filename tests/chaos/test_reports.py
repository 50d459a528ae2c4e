"""The judge of reports names what is wrong with a merge, and with a report that is in none."""

import numpy as np
import pytest
from numpy.typing import NDArray

from ps.job_spec import shard_specs
from shards.ledger import Ledger
from shards.rules import SGD
from shards.schedules import Fixed
from shards.shard_state import WEIGHTS, SavedProgress, ShardState, array_name
from shards.spec import TableSpec
from tests.chaos.journal import Event, Judged, Ready, Reports
from tests.chaos.oracle import Death
from tests.chaos.record import TABLE, two_tables
from tests.chaos.reports import (
    exchanges_to_merge,
    judge_reports,
    pieces_of,
    reports_in,
    server_half,
    unit_of,
)

WORKERS = 3
UNIT = unit_of(WORKERS)
SPECS = shard_specs(
    [TableSpec(one, SGD(), Fixed(base_rate=1.0)) for one in two_tables(WORKERS, 2048)],
    workers=WORKERS,
    merge=server_half(2, WORKERS),
)
PIECES = pieces_of(SPECS[0].layout, SPECS[0].map, WORKERS)


def reports(*fates: int | None) -> list[Event]:
    """A learner's reports on the first table, for rounds 0, 1 ...; None is one without answer."""
    events: list[Event] = [Ready(0.0, 0, 0, 1)]
    for index, dropped in enumerate(fates):
        events.append(Reports(index + 1.0, index + 1, TABLE, {0: index}))
        if dropped is not None:
            events.append(Judged(index + 1.5, index + 1, dropped))
    return events


JOURNALS = {"w0": reports(0, 0, 1), "w1": reports(0, 1), "w2": reports(1, None, 0)}


def merged_cells() -> NDArray[np.float32]:
    """The merges of these reports: weights are 1, 2 and 1."""
    cells = np.zeros((PIECES[0].rounds, WORKERS), np.float32)
    cells[0] = UNIT / 3, 2 * UNIT / 3, 0
    cells[1] = UNIT / 2, 0, UNIT / 2
    cells[2] = 0, 0, UNIT
    return cells


def faults(
    cells: NDArray[np.float32], deaths: tuple[Death, ...] = (), rollback_s: float | None = None
) -> list[str]:
    """What the judge finds in these cells."""
    arrays = {array_name(table.name, WEIGHTS): table.empty() for table in two_tables(WORKERS, 2048)}
    arrays[array_name(TABLE, WEIGHTS)][: cells.size] = cells.ravel()
    saved = SavedProgress(version=3, steps=0, samples=0, ledger=Ledger())
    verdicts = judge_reports([ShardState(saved, arrays)], PIECES, JOURNALS, deaths, rollback_s)
    assert all(verdict.kept != bool(verdict.rows) for verdict in verdicts)
    return [text for verdict in verdicts for text in verdict.rows]


def test_a_report_may_be_merged_without_an_answer() -> None:
    """Everything is in order; w2 did not hear of its second report, which was merged right."""
    assert faults(merged_cells()) == []


@pytest.mark.parametrize(
    ("cell", "value", "text"),
    [
        ((1, 0), UNIT, f"round 1: {UNIT}, expected {UNIT // 2}"),
        ((2, 0), UNIT / 2, "set, and all of 1 reports were dropped"),
        ((2, 2), 0.0, "report 3 was acknowledged and is not in it"),
    ],
)
def test_what_a_merge_may_not_hold(cell: tuple[int, int], value: float, text: str) -> None:
    """A share that counts twice, a report that was dropped, none where one was acknowledged."""
    cells = merged_cells()
    cells[cell] = value
    assert any(text in fault for fault in faults(cells)), faults(cells)


def test_a_round_is_not_left_out() -> None:
    """A later merge in the cells of a round that is yet to come shows as a gap."""
    cells = merged_cells()
    cells[[2, 3]] = cells[[3, 2]]
    assert any("round 2 is left out" in fault for fault in faults(cells))


def test_a_death_may_take_back_what_it_had_just_acknowledged() -> None:
    """Where shards roll back, a report may be gone with a death soon after its acknowledgement."""
    cells = merged_cells()
    cells[2] = 0
    assert faults(cells, (Death(0, 3.6, 3.7),), rollback_s=2.0) == []
    late = faults(cells, (Death(0, 99.0, 99.1),), rollback_s=2.0)
    assert late == ["chaos, shard 0, round 2: report 3 was acknowledged and is not in it"]


def test_a_number_may_be_used_again() -> None:
    """A life died with a report that no shard had received: the next life's has its number."""
    lost, again = Reports(1.0, 1, TABLE, {0: 0}), Reports(2.0, 1, TABLE, {0: 1})
    fates = [sent.dropped for sent in reports_in([lost, again, Judged(2.5, 1, 0)])]
    assert fates == [None, 0]


def test_the_exchanges_of_a_joiner() -> None:
    """The first merged report counts, in exchanges of its fragment."""
    assert [*exchanges_to_merge(JOURNALS["w0"])] == [1]
    assert [*exchanges_to_merge(reports(1, 2, 0))] == [3]
    assert [*exchanges_to_merge([*reports(1), *reports(1, 1)])] == []
    other = Reports(9.0, 9, "more", {0: 0}), Judged(9.5, 9, 0)
    assert [*exchanges_to_merge([*reports(1, 1), *other])] == [1]
    late = Reports(9.0, 9, "more", {0: 0}), Judged(9.5, 9, 1)
    assert [*exchanges_to_merge([*reports(1, 1), *late])] == [2]
