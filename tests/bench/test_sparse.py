"""The benchmark of sparse tables measures what it says."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.bench.bench_sparse import OURS, RIVALS, list_goals, measure_kernels, measure_path
from tests.bench.loops import UpdateCost
from tests.bench.sparse_conditions import RTT_MS, measure_conditions
from tests.bench.sparse_jobs import Costs, Sizes, ZipfBatches
from tests.bench.sparse_rivals import open_rivals

SMALL = Sizes(rows=3000, seconds=0.02, rounds=1)


def use_wall_time(costs: Costs) -> Costs:
    """Costs whose CPU time is the time that passed, which is more than 0."""
    assert min(cost.wall_us for cost in costs.values()) > 0
    return {name: UpdateCost(cost.wall_us, cost.wall_us) for name, cost in costs.items()}


def test_every_figure_is_measured(tmp_path: Path) -> None:
    """Each kernel, each kind of step and the reshard take time, and every goal has its figure."""
    pytest.importorskip("numba")
    kernels, path = measure_kernels(SMALL), measure_path(SMALL)
    assert min(kernels.values()) > 0
    conditions = measure_conditions(SMALL, tmp_path)
    # The clock of a process's CPU time may not advance in so short a turn.
    path["costs"] = use_wall_time(path["costs"])
    conditions = conditions._replace(
        costs=use_wall_time(conditions.costs), link_ms={0: 1.0, RTT_MS: 2.0}
    )
    rivals = dict.fromkeys([OURS, *RIVALS], UpdateCost(1.0, 1.0))
    goals = list(list_goals(kernels, path, conditions, rivals))
    assert len({goal.name for goal in goals}) == len(goals)
    assert not any(np.isnan(goal.measured) for goal in goals)


def test_a_library_that_is_missing_is_left_out_with_the_reason() -> None:
    """Each of the three libraries is either measured or named with why it is not."""
    with ExitStack() as stack:
        rivals = open_rivals(ZipfBatches(SMALL.rows), SMALL, stack)
        assert set(rivals.turns) <= set(RIVALS)
        assert set(rivals.missing) <= {"PyTorch", "FBGEMM", "Redis"}
        assert all(turn().wall_us > 0 for turn in rivals.turns.values())
        families = {name.split()[0].lower() for name in rivals.turns}
        assert len(families) + len(rivals.missing) == 3


def test_a_batch_has_its_number_of_distinct_ids() -> None:
    """A batch ends with the id that completes its number; frequent ids come more often."""
    for batch in ZipfBatches(1000).draw(100, count=5):
        assert len(np.unique(batch)) == 100
        assert (batch != batch[-1])[:-1].all()
        assert len(batch) > 100


def test_positions_stand_for_the_ids() -> None:
    """Equal ids have equal positions of the vocabulary, others have others."""
    stream = ZipfBatches(1000)
    (batch,) = stream.draw(100, count=1)
    (positions,) = stream.find_positions([batch])
    assert (np.sort(stream.ids)[positions] == batch).all()
