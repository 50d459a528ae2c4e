"""Charts of a report: axes, lines and bands."""

import itertools
import re

import pytest
from msgspec import structs

from deploy.experiments import charts, report
from deploy.experiments.sweeps import Point
from deploy.experiments.training_simulation import CurvePoint
from deploy.experiments.trials import Trial, TrialResult


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 86.7, [0.0, 20.0, 40.0, 60.0, 80.0]),
        (0.0, 4000.0, [0.0, 1000.0, 2000.0, 3000.0, 4000.0]),
        (0.12, 0.31, [0.15, 0.2, 0.25, 0.3]),
        (-1.0, 1.0, [-1.0, -0.5, 0.0, 0.5, 1.0]),
    ],
)
def test_axes_have_round_values(low: float, high: float, expected: list[float]) -> None:
    assert charts.ticks(low, high) == expected


def test_the_ends_of_lines_are_apart() -> None:
    """Lines that fall from 90 to a few percent end at different heights."""
    falling = [[(0.0, 90.0), (1.0, 30.0), (2.0, 6.0), (3.0, end)] for end in (1.6, 2.4, 5.0)]
    chart = charts.lines([charts.Series("a", line) for line in falling], "gradients", "error %")
    assert "error %, logarithmic" in chart.picture
    ends = [float(end) for end in re.findall(r',([\d.]+)" fill="none"', chart.picture)]
    heights = sorted(ends)
    assert all(above - below > 20 for below, above in itertools.pairwise(heights)), ends


def test_a_line_is_drawn_in_its_band() -> None:
    """The band goes along the upper ends and back along the lower ones; a point that is not finite
    is left out of both."""
    points = [(0.0, 4.0), (1.0, 3.0), (2.0, float("nan")), (3.0, 2.0)]
    band = [(2.0, 6.0), (2.0, 4.0), (1.0, 2.0), (1.0, 3.0)]
    picture = charts.lines([charts.Series("a", points, band)], "x", "y").picture
    (line,) = re.findall(r'<polyline points="([^"]*)"', picture)
    (outline,) = re.findall(r'<polygon points="([^"]*)"', picture)
    at, heights = zip(*(map(float, corner.split(",")) for corner in line.split()), strict=True)
    corners = [tuple(map(float, corner.split(","))) for corner in outline.split()]
    assert [x for x, _ in corners] == [*at, *at[::-1]]
    assert len(at) == 3
    for height, (_, high), (_, low) in zip(heights, corners[:3], corners[:2:-1], strict=True):
        assert high < height < low  # y grows downwards


def test_a_diverged_run_does_not_shorten_the_others() -> None:
    """It keeps the error of a guess; a run that ended early ends the line."""
    looks = [(0, 90.0), (10, 50.0), (20, 10.0)]
    curve = [CurvePoint(at, at, float(at), 1.0, error) for at, error in looks]
    runs = [TrialResult(trial=Trial(seed=seed), curve=curve) for seed in range(3)]
    diverged = structs.replace(
        runs[2], curve=[curve[0], CurvePoint(5, 5, 5.0, 1.0, 87.0)], diverged_at=5
    )
    point = Point({"n": 1}, [])
    series = report.draw_curve(report.Measured(point, [*runs[:2], diverged]), "gradients")
    assert series.points[-1] == (20.0, 10.0)
    assert series.band[-1] == (10.0, 87.0)
    short = structs.replace(runs[2], curve=curve[:2])
    series = report.draw_curve(report.Measured(point, [*runs[:2], short]), "gradients")
    assert series.points[-1] == (10.0, 50.0)
