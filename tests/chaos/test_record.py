"""What weights prove: loss, doubling, tearing and a push in another's place are all seen."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ps import ShardState
from shards.ledger import Ledger, LedgerEntry
from shards.shard_state import SavedProgress
from shards.tables import Layout, cut_evenly
from tests.chaos.journal import Journal, Ready
from tests.chaos.record import (
    LifeStart,
    Record,
    Verdict,
    gradient,
    judge,
    mark,
    marks_to,
    table_for,
)

NAMES = ("w0", "w1")
TABLE = table_for(2, 1024)
MAP = cut_evenly(Layout((TABLE,)), 2)


def shard_after(
    applied: dict[str, list[int]], counted: dict[str, int], later: Mapping[int, int] = {}
) -> ShardState:
    """Shard 1 after these pushes were applied, with a ledger that numbers so many.

    They are of each worker's first life, but for those that `later` names, with their lives.
    """
    weights = np.zeros(TABLE.size, np.float32)
    push = TABLE.empty()
    for name, seqs in applied.items():
        for seq in seqs:
            gradient(push, NAMES.index(name), len(NAMES), seq, later.get(seq, 1))
            weights -= push
    ledger = Ledger({name: LedgerEntry(1, seq=seq) for name, seq in counted.items()})
    own = MAP.cut(weights, 1).copy()
    return ShardState(SavedProgress(0, 0, 0, ledger), {f"{TABLE.name}/weights": own})


def verdicts(
    folder: Path, state: ShardState, lacking: Mapping[tuple[int, int], tuple[int, int]] = {}
) -> list[Verdict]:
    return judge(state, 1, MAP, NAMES, folder, lacking)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """w0 sent 5 and was acknowledged 4; w1 has done nothing."""
    record = Record(tmp_path, "w0")
    for seq in range(1, 6):
        record.sends(seq)
    record.hears(2, 10.0)
    record.hears(4, 11.0)
    for name in NAMES:
        journal = Journal(tmp_path, name)
        journal.write(Ready(9.0, 0, 0, 1))
        journal.close()
    return tmp_path


@pytest.mark.parametrize("last", [4, 5])
def test_what_was_acknowledged_is_there(folder: Path, last: int) -> None:
    """All that was acknowledged, and perhaps what was sent beyond: the promise is kept."""
    state = shard_after({"w0": [*range(1, last + 1)]}, {"w0": last})
    own, idle = verdicts(folder, state)
    assert (own.acknowledged, own.applied, own.sent, own.lost, own.doubled) == (4, last, 5, 0, 0)
    assert (own.kept, idle.kept, idle.applied) == (True, True, 0)


@pytest.mark.parametrize(
    ("seqs", "counted", "lost", "doubled"),
    [
        pytest.param([1, 2, 3], 3, 1, 0, id="the shard forgot one"),
        pytest.param([1, 2, 3], 4, 1, 0, id="the weights lack one"),
        pytest.param([1, 2, 3, 4, 4], 4, 0, 1, id="one twice"),
        pytest.param([1, 2, 2, 4], 4, 0, 0, id="one twice in place of another"),
        pytest.param([1, 2, 3, 4, 5, 6], 6, 0, 0, id="one that nobody sent"),
    ],
)
def test_what_is_wrong_is_seen(
    folder: Path, seqs: list[int], counted: int, lost: int, doubled: int
) -> None:
    """Each way to be wrong breaks the promise, and is counted as what it is."""
    own, _ = verdicts(folder, shard_after({"w0": seqs}, {"w0": counted}))
    assert (own.kept, own.lost, own.doubled) == (False, lost, doubled)


def test_what_a_death_took_back_is_counted_as_applied(folder: Path) -> None:
    """A shard that lacks push 2 for good, and numbers on from 4, has kept its promise."""
    state = shard_after({"w0": [1, 3, 4]}, {"w0": 4})
    assert not verdicts(folder, state)[0].kept
    assert verdicts(folder, state, {(1, 0): (1, mark(2, 1))})[0].kept


def test_a_torn_update_is_seen(folder: Path) -> None:
    """One weight that lacks what its neighbours have."""
    state = shard_after({"w0": [1, 2, 3, 4]}, {"w0": 4})
    state.arrays[f"{TABLE.name}/weights"][400] -= 1.0
    assert not verdicts(folder, state)[0].kept


@pytest.mark.parametrize(("begins_after", "kept"), [(3, True), (4, False), (2, False)])
def test_a_push_of_another_life_is_seen(folder: Path, begins_after: int, kept: bool) -> None:
    """Half a push of one life is not completed by another life's push of the same number.

    Push 4 of the shard is that of life 2, which is right only if that life begins after push 3.
    """
    journal = Journal(folder, "w0")
    journal.write(Ready(10.5, begins_after, 0, 2))
    journal.close()
    state = shard_after({"w0": [1, 2, 3, 4]}, {"w0": 4}, later={4: 2})
    assert verdicts(folder, state)[0].kept == kept


def test_marks_tell_neighbours_apart() -> None:
    """A push in its neighbour's place shows, and one of another life; the sum is that of the
    marks."""
    marks = [mark(seq, 1) for seq in range(1, 1001)]
    assert set(marks) == set(range(8))
    assert all(a != b for a, b in pairwise(marks))
    assert len({mark(5, life) for life in range(1, 9)}) == 8
    first = [LifeStart(0, 1)]
    assert [marks_to(last, first) for last in (0, 1, 1000)] == [0, mark(1, 1), sum(marks)]


def test_each_push_is_of_the_last_life_that_begins_before_it() -> None:
    """A life begins after the last push of the one before, or earlier where shards lost pushes."""
    lives = [LifeStart(0, 1), LifeStart(600, 3), LifeStart(590, 4)]
    for last in (589, 590, 600, 601, 1300):
        made = [mark(seq, 1 if seq <= 590 else 4) for seq in range(1, last + 1)]
        assert marks_to(last, lives) == sum(made)
    assert marks_to(610, lives[:2]) == sum(
        mark(seq, 1 if seq <= 600 else 3) for seq in range(1, 611)
    )


def test_a_record_outlives_its_writer(folder: Path) -> None:
    """Another process finds the last acknowledgement, and the highest push that was ever begun."""
    record = Record(folder, "w0")
    record.sends(3)
    assert (record.sent, record.acknowledged, record.last) == (5, 4, (11.0, 4))


def test_the_times_around_a_fault(tmp_path: Path) -> None:
    """From the healing to the acknowledgement that counts; and the longest time without one."""
    record = Record(tmp_path, "w0")
    for seq, at in enumerate((1.0, 2.0, 2.5, 7.0, 7.25), start=1):
        record.hears(seq, at)
    assert record.around(2.25, 6.0, 1) == (1.0, 4.5)
    assert record.around(2.25, 6.0, 2) == (1.25, 4.5)
    assert (record.has_after(6.0, 2), record.has_after(7.0, 2)) == (True, False)
