"""The ranking of a sweep's points by the time to a target, and its sentence."""

from typing import Any

import pytest
from msgspec import structs

from deploy.experiments.accept_rules import PointResults
from deploy.experiments.target_times import rank_points
from deploy.experiments.training_simulation import CurvePoint
from deploy.experiments.trials import Trial, TrialResult

SEEDS = 8


def results(
    end: float, after_s: float, trial: Trial | None = None, seeds: int = SEEDS
) -> list[TrialResult]:
    """Runs that fall from 90 % to `end` in the middle of three looks, each seed a bit later."""
    trial = trial or Trial()
    return [
        TrialResult(
            trial=structs.replace(trial, seed=seed),
            curve=[
                CurvePoint(0, 0, 0.0, 1.0, 90.0),
                CurvePoint(50, 50, after_s + seed / 100, 1.0, end),
                CurvePoint(100, 100, 2 * after_s, 1.0, end),
            ],
        )
        for seed in range(seeds)
    ]


def point(values: dict[str, Any], *args: Any, **kwargs: Any) -> PointResults:
    return PointResults(values, results(*args, **kwargs))


def test_the_fastest_point_is_named_with_its_interval_and_its_probability() -> None:
    """Of the points that reach the target, the median of 8 seeds is the fifth; one within a tenth
    is as near, and one that misses it comes last."""
    (ranking,) = rank_points(
        [
            point({"rate": 0.1}, 5.0, 20.0),
            point({"rate": 0.2}, 5.0, 10.5),
            point({"rate": 0.4}, 5.0, 10.0),
            point({"rate": 0.8}, 40.0, 1.0),
        ]
    )
    assert ranking.target == pytest.approx(6.0)
    assert [entry.label for entry in ranking.points] == [
        "rate 0.4",
        "rate 0.2",
        "rate 0.1",
        "rate 0.8",
    ]
    assert [entry.near for entry in ranking.points] == [1.0, 1.0, 0.0, 0.0]
    assert [entry.figures.misses for entry in ranking.points] == [0, 0, 0, SEEDS]
    assert ranking.verdict == (
        "rate 0.4 is the fastest to 6 % error, after 10 [10, 10.1] virtual seconds: within a tenth"
        " of the least in 100 % of the bootstrap draws; as near: rate 0.2."
    )


def test_points_that_the_seeds_do_not_separate_have_no_winner() -> None:
    """Either is three times as fast in half of the seeds."""
    fast, slow = results(5.0, 10.0), results(5.0, 30.0)
    mixed = [(fast if seed % 2 else slow)[seed] for seed in range(SEEDS)]
    others = [(slow if seed % 2 else fast)[seed] for seed in range(SEEDS)]
    (ranking,) = rank_points([PointResults({"n": 1}, mixed), PointResults({"n": 2}, others)])
    assert ranking.verdict.startswith("these seeds do not separate the least seconds to 6 % error")
    assert "n 1" in ranking.verdict
    assert "n 2" in ranking.verdict


def test_points_are_compared_on_one_cluster() -> None:
    """A slow link is a condition, not a bad choice; the target is that of all of them."""
    link = "rtt=1s"
    slow = Trial(cluster=structs.replace(Trial().cluster, link=link))
    points = [
        point({"kind": "a", "cluster.link": ""}, 5.0, 10.0),
        point({"kind": "b", "cluster.link": ""}, 5.0, 20.0),
        point({"kind": "a", "cluster.link": link}, 5.0, 90.0, slow),
        point({"kind": "b", "cluster.link": link}, 5.0, 50.0, slow),
    ]
    verdicts = [ranking.verdict for ranking in rank_points(points)]
    assert [text.partition(" is")[0] for text in verdicts] == [
        "With cluster.link none: kind a",
        "With cluster.link rtt=1s: kind b",
    ]
    (ranking,) = rank_points(points[::2])
    assert ranking.verdict.startswith("kind a, cluster.link none is the fastest")
    assert rank_points(points[:1]) == []


def test_the_target_is_until_error_or_that_of_the_user() -> None:
    """An error at which all runs end early needs no other choice."""
    early = Trial(until_error=8.0)
    points = [point({"n": 1}, 7.0, 10.0, early), point({"n": 2}, 5.0, 20.0, early)]
    assert rank_points(points)[0].target == 8.0
    (ranking,) = rank_points(points, target=4.0)
    assert ranking.verdict == "no point reaches 4 % error in half of its runs."


def test_few_seeds_have_no_interval() -> None:
    points = [point({"n": n}, 5.0, 10.0 * n, seeds=3) for n in (1, 2)]
    (ranking,) = rank_points(points)
    assert ranking.verdict == (
        "n 1 is the fastest to 6 % error, after 10 virtual seconds, by the median of 3 seeds; an"
        " interval needs 6."
    )


def test_runs_without_looks_are_ranked_by_their_error() -> None:
    """Their only time is that of the whole run."""
    ends = [
        PointResults(
            {"n": n},
            [structs.replace(r, curve=[r.curve[0], r.curve[-1]]) for r in results(5.0 * n, 10.0)],
        )
        for n in (2, 1)
    ]
    (ranking,) = rank_points(ends)
    assert ranking.verdict.startswith("n 1 has the least error at the end, 5 [5, 5] %: within")
    assert ranking.points[0].updates is None
