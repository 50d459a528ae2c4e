"""The ranking of a sweep's points by the time to a target, and the sentence that it comes to.

Points are compared where workload and cluster are the same; where these are all that a sweep
varies, its points are compared with each other. A point is named as the best if it is within a
tenth of the fastest in 95 % of the bootstrap draws of the seeds. Fewer than six seeds have no
interval, and name the fastest by its median alone.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deploy.experiments.accept_rules import PointResults
from deploy.experiments.combinations import values_label
from deploy.experiments.shapes.base import times_to
from deploy.experiments.statistics import TargetTimes, near_best
from deploy.experiments.trials import TrialResult

SURE = 0.95
FEWEST = 6
"""Fewer seeds have no interval of a median at 95 %."""
_REACH = 1.2  # times the least error
_RANKED = 50  # the fastest points of a ranking; the draws of thousands would take gigabytes


class RankedPoint(NamedTuple):
    """A point with the virtual seconds and the updates of its runs to the target.

    Where runs are measured at their end alone, `figures` are the errors there, and there are no
    `updates`. `near` is the bootstrap probability that the median of the figures is within a tenth
    of the least.
    """

    label: str
    figures: TargetTimes
    updates: TargetTimes | None
    near: float


class PointRanking(NamedTuple):
    """The points of one condition, the best first: by the time to an error of `target` percent.

    Without a target they are ranked by the error at the end.
    """

    condition: str
    target: float | None
    points: list[RankedPoint]

    @property
    def figure(self) -> str:
        """The name and unit of the figures."""
        if self.target is None:
            return "error % at the end"
        return f"seconds to {self.target:.3g} % error"

    @property
    def verdict(self) -> str:
        """The best point in one sentence, or that these runs do not separate the best ones."""
        start = f"With {self.condition}: " if self.condition else ""
        return f"{start}{self._judge()}."

    def _judge(self) -> str:
        first, seeds = self.points[0], len(self.points[0].figures.values)
        if self.target is not None and math.isinf(first.figures.median):
            return f"no point reaches {self.target:.3g} % error in half of its runs"
        if seeds < FEWEST:
            few = f"by the median of {seeds} seeds; an interval needs {FEWEST}"
            return f"{self._claim(first)}, {few}"
        sure = [point for point in self.points if point.near >= SURE]
        if not sure:
            names = [point.label for point in self.points if point.near > 1 - SURE]
            return f"these seeds do not separate the least {self.figure}: {'; '.join(names)}"
        others = "; ".join(point.label for point in sure[1:])
        draws = f"within a tenth of the least in {100 * sure[0].near:.0f} % of the bootstrap draws"
        return f"{self._claim(sure[0])}: {draws}{f'; as near: {others}' if others else ''}"

    def _claim(self, point: RankedPoint) -> str:
        figure = point.figures.show_interval()
        if self.target is None:
            return f"{point.label} has the least error at the end, {figure} %"
        goal = f"{self.target:.3g} % error"
        return f"{point.label} is the fastest to {goal}, after {figure} virtual seconds"


def usual_target(levels: Sequence[Sequence[TrialResult]]) -> float:
    """The error in percent that points are timed to: 1.2 times the least median at the end."""
    return _REACH * min(
        float(np.median([result.error for result in results])) for results in levels
    )


def rank_points(points: Sequence[PointResults], target: float | None = None) -> list[PointRanking]:
    """Rank points with the results of all their seeds, for each condition with two or more.

    Without a `target`, it is the error that ends the trials early, or else the usual one of their
    workload.
    """
    by_workload: dict[str, list[PointResults]] = {}
    for point in points:
        by_workload.setdefault(point.results[0].trial.workload, []).append(point)
    groups: list[tuple[list[PointResults], float]] = []
    for members in by_workload.values():
        goal = _choose_target(members) if target is None else target
        groups += [(group, goal) for group in _split_by_cluster(members)]
    groups = [(group, goal) for group, goal in groups if len(group) > 1]
    keys = _find_conditions([group for group, _ in groups])
    return [_rank(group, goal, keys) for group, goal in groups]


def _choose_target(points: Sequence[PointResults]) -> float:
    ends = {result.trial.until_error for point in points for result in point.results}
    if len(ends) == 1 and min(ends) >= 0:
        return ends.pop()
    return usual_target([point.results for point in points])


def _split_by_cluster(points: Sequence[PointResults]) -> list[list[PointResults]]:
    """Groups of points with one cluster; a single group if that leaves none to compare."""
    groups: dict[str, list[PointResults]] = {}
    for point in points:
        groups.setdefault(repr(point.results[0].trial.cluster), []).append(point)
    if all(len(group) == 1 for group in groups.values()):
        return [list(points)]
    return list(groups.values())


def _find_conditions(groups: Sequence[Sequence[PointResults]]) -> list[str]:
    """The keys that distinguish the groups: with one value in each, and several in all."""

    def values(group: Sequence[PointResults], key: str) -> set[str]:
        return {repr(point.values.get(key)) for point in group}

    keys = dict.fromkeys(key for group in groups for point in group for key in point.values)
    return [
        key
        for key in keys
        if all(len(values(group, key)) == 1 for group in groups)
        and len(set.union(*(values(group, key) for group in groups))) > 1
    ]


def _rank(points: Sequence[PointResults], target: float, keys: Sequence[str]) -> PointRanking:
    """Rank the points of one condition, which has a value for each of the keys."""
    courses = any(len(result.curve) > 2 for point in points for result in point.results)
    ranked = [
        RankedPoint(
            values_label({key: at for key, at in point.values.items() if key not in keys}),
            times_to(point.results, target)
            if courses
            else TargetTimes(tuple(result.error for result in point.results)),
            times_to(point.results, target, updates=True) if courses else None,
            0.0,
        )
        for point in points
    ]
    ranked = sorted(ranked, key=lambda point: point.figures.median)[:_RANKED]
    near = near_best([point.figures.values for point in ranked])
    first = points[0].values
    condition = {key: first[key] for key in keys if key in first}
    return PointRanking(
        values_label(condition) if condition else "",
        target if courses else None,
        [point._replace(near=share) for point, share in zip(ranked, near, strict=True)],
    )
