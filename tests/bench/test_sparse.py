"""The benchmark of sparse tables measures what it says."""

import numpy as np
import pytest

from tests.bench.bench_sparse import Sizes, ZipfBatches, list_goals, measure_kernels, measure_path

SMALL = Sizes(rows=3000, seconds=0.02, rounds=1)


def test_every_figure_is_measured() -> None:
    """Each kernel, each kind of step and the reshard take time, and every goal has its figure."""
    pytest.importorskip("numba")
    kernels, path = measure_kernels(SMALL), measure_path(SMALL)
    assert min(kernels.values()) > 0
    assert min(cost.wall_us for cost in path["costs"].values()) > 0
    goals = list(list_goals(kernels, path, {}))
    assert len({goal.name for goal in goals}) == len(goals)
    assert all(np.isfinite(goal.measured) for goal in goals)


def test_a_batch_has_its_number_of_distinct_ids() -> None:
    """A batch ends with the id that completes its number; frequent ids come more often."""
    for batch in ZipfBatches(1000).draw(100, count=5):
        assert len(np.unique(batch)) == 100
        assert (batch != batch[-1])[:-1].all()
        assert len(batch) > 100
