"""The intervals cover what they promise, and censored runs count as long ones."""

import math

import numpy as np
import pytest

from deploy.experiments import statistics
from deploy.experiments.statistics import TargetTimes


@pytest.mark.parametrize("n", [3, 5, 10])
def test_paired_intervals_cover_the_truth(n: int) -> None:
    """Nominal 95 %: 93 to 97 of 100 intervals hold the true mean, over 2,000 synthetic sets."""
    sets = np.random.default_rng(n).normal(1.5, 1.0, (2000, n))
    low, high = statistics.bootstrap_means(sets, level=0.95, resamples=2000, seed=1)
    assert 0.93 <= ((low <= 1.5) & (high >= 1.5)).mean() <= 0.97


@pytest.mark.parametrize(
    ("share", "freedom", "expected"), [(0.975, 4, 2.7764), (0.975, 9, 2.2622), (0.95, 1, 6.3138)]
)
def test_student_quantiles_are_those_of_the_tables(
    share: float, freedom: int, expected: float
) -> None:
    assert statistics.student_quantile(share, freedom) == pytest.approx(expected, abs=2e-4)


def test_a_censored_run_is_longer_than_any_other() -> None:
    assert TargetTimes((1.0, math.inf, 3.0)).median == 3.0
    assert TargetTimes((1.0, math.inf, math.inf)).median == math.inf
    assert "1 of 3 censored" in str(TargetTimes((1.0, math.inf, 3.0)))


def test_equivalence_needs_the_whole_interval_within_the_margin() -> None:
    first = [1.0, 1.1, 0.9, 1.05, 0.95]
    assert statistics.equivalent(first, [1.0] * 5, 0.3)[0]
    assert not statistics.equivalent(first, [1.0] * 5, 0.01)[0]
    assert not statistics.equivalent(first, [2.0] * 5, 0.3)[0]


def test_a_slope_has_the_sign_of_the_trend() -> None:
    found = statistics.slope([0, 1, 2], [[1, 2], [3, 4.1], [5, 6]])
    assert found.low > 0
    assert found.mean == pytest.approx(2.0)
