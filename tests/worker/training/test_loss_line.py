"""Caffe's `display` and `average_loss`: when a line is due, and which losses it averages."""

import numpy as np
import pytest

from tests.support.run_records import records, status
from worker.training.figures import RecentLoss
from worker.training.loss_line import LossLine, Milestones


def test_the_loss_is_the_mean_of_the_last_updates() -> None:
    """The mean is over all records of shard 0; updates without a loss are ignored."""
    recent = RecentLoss(3)
    assert recent.mean is None
    recent.add([records(2, loss=[9.0, 1.0]), records(2, loss=50.0)])
    recent.add([])
    recent.add([records(3, loss=[2.0, np.nan, 3.0])])
    assert recent.mean == 2.0


@pytest.mark.parametrize(
    ("every", "iterations", "reached"),
    [
        (10, [0, 9, 10, 19, 35, 39, 40], [10, 35, 40]),
        (10, [7, 10], [10]),
        (0, [0, 5, 9], []),
    ],
)
def test_milestones(every: int, iterations: list[int], reached: list[int]) -> None:
    """Each multiple counts once, at the first look at or behind it."""
    milestones = Milestones(every)
    assert [n for n in iterations if milestones.passes(n)] == reached


def test_a_line_every_so_many_iterations() -> None:
    """An iteration is a step of every worker, and so is what `average_loss` counts."""
    lines = LossLine(every=10, average=2, workers=2)
    got = [
        lines.line([status(steps=steps, rate=0.05)], [records(5, loss=[9, 1, 2, 3, 4])])
        for steps in (0, 19, 21, 30, 45)
    ]
    line = "loss 2.5, learning rate 0.05"
    assert got == [None, None, f"iteration 10: {line}", None, f"iteration 22: {line}"]
