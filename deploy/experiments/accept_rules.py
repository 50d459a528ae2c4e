"""The accept rules of a sweep: what its author expects, judged when all trials are done.

Each `[[expect]]` table is one rule. It selects points of the sweep by their values: `where`, and
`of` where a rule compares two selections. Seeds are paired, and a rule with an interval is judged
by the interval: held, not held, or inconclusive if the interval holds the limit.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from deploy.experiments.statistics import Interval, interval_of_pairs, mean_interval
from deploy.experiments.trials import TrialResult
from shards.errors import BadInput

Numbers = NDArray[np.float64]

FIGURES: dict[str, Callable[[TrialResult], float]] = {
    "error": lambda result: result.error,
    "loss": lambda result: result.curve[-1].loss,
    "staleness": lambda result: result.mean_staleness,
    "compute_share": lambda result: result.compute_share,
    "wait_share": lambda result: result.wait_share,
    "seconds": lambda result: result.seconds,
    "updates": lambda result: float(result.updates),
}
"""What a rule may be about: a figure of a trial at its end."""


class ExpectationKind(StrEnum):
    """The statement of a rule about the figure."""

    ORDERING = "ordering"
    WITHIN = "within"
    RATIO_IN = "ratio_in"
    MONOTONE = "monotone"
    SLOPE_IN = "slope_in"
    ARGMIN_IN = "argmin_in"
    DIVERGES = "diverges"
    DISTRIBUTION = "distribution"


_NEEDS: dict[ExpectationKind, tuple[str, ...]] = {
    ExpectationKind.ORDERING: ("of",),
    ExpectationKind.WITHIN: ("of", "by"),
    ExpectationKind.RATIO_IN: ("of", "range"),
    ExpectationKind.MONOTONE: ("over",),
    ExpectationKind.SLOPE_IN: ("over", "range"),
    ExpectationKind.ARGMIN_IN: ("over", "among"),
    ExpectationKind.DIVERGES: (),
    ExpectationKind.DISTRIBUTION: ("of", "by"),
}


class ExpectationVerdict(StrEnum):
    """The verdict on a rule."""

    HELD = "held"
    NOT_HELD = "not held"
    INCONCLUSIVE = "inconclusive"


class Judgement(NamedTuple):
    """A rule after the runs."""

    rule: str
    verdict: ExpectationVerdict
    measured: str

    def __str__(self) -> str:
        return f"{self.verdict:12} {self.rule}: {self.measured}"


class PointResults(NamedTuple):
    """A point's values, and its results, one a seed."""

    values: Mapping[str, Any]
    results: Sequence[TrialResult]


class Expectation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule.

    ordering      the figure of `where` is less than that of `of`
    within        both differ by at most `by`, shown by two one-sided tests at 5 %
    ratio_in      the figure of `where` over that of `of` is in `range`
    monotone      the mean rises along the values of the key `over`, or falls
    slope_in      the slope of the figure in the values of `over` is in `range`
    argmin_in     the mean is least at one of the values `among` those of `over`
    diverges      every trial of `where` diverges
    distribution  the staleness of both differs by a distance of at most `by` (Kolmogorov)
    """

    kind: ExpectationKind
    value: str = "error"
    where: dict[str, Any] = {}
    of: dict[str, Any] | None = None
    over: str | None = None
    by: float | None = None
    range: tuple[float, float] | None = None
    among: list[Any] | None = None
    rising: bool = True

    def __post_init__(self) -> None:
        if self.value not in FIGURES:
            raise BadInput("value", expected=f"one of {', '.join(FIGURES)}", got=f"{self.value!r}")
        for name in _NEEDS[self.kind]:
            if getattr(self, name) is None:
                raise BadInput(name, expected=f"it with kind {self.kind}", got="none")
        for name in ("of", "over", "by", "range", "among"):
            if getattr(self, name) is not None and name not in _NEEDS[self.kind]:
                needs = ", ".join(_NEEDS[self.kind]) or "none of these"
                raise BadInput(name, expected=f"{needs} with kind {self.kind}", got=name)

    def check(self, points: Sequence[Mapping[str, Any]]) -> None:
        """Raise BadInput for a selection without points, before anything runs."""
        for name, selection in (("where", self.where), ("of", self.of)):
            if selection is not None and not any(
                _is_selected(point, selection) for point in points
            ):
                raise BadInput(name, expected="values of a point of this sweep", got=selection)
        if self.over is not None:
            levels = {
                point[self.over]
                for point in points
                if self.over in point and _is_selected(point, self.where)
            }
            if len(levels) < 2:
                raise BadInput(
                    "over", expected="a key with two values or more in where", got=f"{self.over!r}"
                )
            if self.kind is ExpectationKind.SLOPE_IN and not all(
                isinstance(level, int | float) for level in levels
            ):
                raise BadInput(
                    "over", expected="a key with numbers as values", got=f"{self.over!r}"
                )

    def judge(self, points: Sequence[PointResults]) -> Judgement:
        """Judge the rule; it is inconclusive if a trial of its points is missing."""
        rule = " ".join(f"{key} {value}" for key, value in self._rule_fields().items())
        chosen = [point for point in points if _is_selected(point.values, self.where)]
        others = [
            point for point in points if self.of is not None and _is_selected(point.values, self.of)
        ]
        seeds = {len(point.results) for point in (*chosen, *others)}
        if len(seeds) != 1 or 0 in seeds:
            return Judgement(rule, ExpectationVerdict.INCONCLUSIVE, "trials are missing")
        finite = np.isfinite([self._figures(point) for point in (*chosen, *others)]).all()
        if not finite and self.kind is not ExpectationKind.DIVERGES:
            return Judgement(rule, ExpectationVerdict.INCONCLUSIVE, "a figure is not finite")
        return Judgement(rule, *self._judge_kind(chosen, others))

    def _rule_fields(self) -> dict[str, Any]:
        names = ("kind", "value", "where", *_NEEDS[self.kind])
        return {name: getattr(self, name) for name in names}

    def _figures(self, point: PointResults) -> list[float]:
        return [FIGURES[self.value](result) for result in point.results]

    def _by_seed(self, points: Sequence[PointResults]) -> Numbers:
        """The mean over points, one value a seed."""
        means: Numbers = np.mean([self._figures(point) for point in points], axis=0)
        return means

    def _judge_kind(
        self, chosen: Sequence[PointResults], others: Sequence[PointResults]
    ) -> tuple[ExpectationVerdict, str]:
        match self.kind:
            case ExpectationKind.ORDERING:
                apart = interval_of_pairs(self._by_seed(chosen), self._by_seed(others))
                return _inside(apart, -np.inf, -np.finfo(np.float64).tiny), f"difference {apart}"
            case ExpectationKind.WITHIN:
                assert self.by is not None
                apart = interval_of_pairs(self._by_seed(chosen), self._by_seed(others), level=0.9)
                return _inside(apart, -self.by, self.by), f"difference {apart} at 90 %"
            case ExpectationKind.RATIO_IN:
                assert self.range is not None
                ratio = mean_interval(self._by_seed(chosen) / self._by_seed(others))
                return _inside(ratio, *self.range), f"ratio {ratio}"
            case ExpectationKind.DIVERGES:
                ended = [
                    result.diverged_at is not None for part in chosen for result in part.results
                ]
                return _verdict_of(all(ended)), f"{sum(ended)} of {len(ended)} diverged"
            case ExpectationKind.DISTRIBUTION:
                assert self.by is not None
                apart_at_most = staleness_distance(_results(chosen), _results(others))
                return _verdict_of(apart_at_most <= self.by), f"distance {apart_at_most:.3f}"
        return self._over_levels(chosen)

    def _over_levels(self, chosen: Sequence[PointResults]) -> tuple[ExpectationVerdict, str]:
        """Judge a rule about the values of the key `over`."""
        assert self.over is not None
        levels: dict[Any, list[PointResults]] = {}
        for point in chosen:
            levels.setdefault(point.values[self.over], []).append(point)
        by_level = [self._by_seed(points) for points in levels.values()]
        means = [float(values.mean()) for values in by_level]
        shown = ", ".join(f"{at}: {mean:.4g}" for at, mean in zip(levels, means, strict=True))
        match self.kind:
            case ExpectationKind.MONOTONE:
                steps = np.diff(means) * (1 if self.rising else -1)
                return _verdict_of(bool((steps >= 0).all())), shown
            case ExpectationKind.ARGMIN_IN:
                assert self.among is not None
                return _verdict_of(list(levels)[int(np.argmin(means))] in self.among), shown
        assert self.range is not None
        at = np.array(list(levels), np.float64)
        at = at - at.mean()
        slopes = mean_interval(np.array(by_level).T @ at / (at @ at))
        return _inside(slopes, *self.range), f"slope {slopes}; {shown}"


def _is_selected(values: Mapping[str, Any], selection: Mapping[str, Any]) -> bool:
    return all(key in values and values[key] == value for key, value in selection.items())


def _verdict_of(holds: bool) -> ExpectationVerdict:
    return ExpectationVerdict.HELD if holds else ExpectationVerdict.NOT_HELD


def _inside(interval: Interval, low: float, high: float) -> ExpectationVerdict:
    if low <= interval.low and interval.high <= high:
        return ExpectationVerdict.HELD
    outside = interval.high < low or interval.low > high
    return ExpectationVerdict.NOT_HELD if outside else ExpectationVerdict.INCONCLUSIVE


def _results(points: Sequence[PointResults]) -> list[TrialResult]:
    return [result for point in points for result in point.results]


def staleness_distance(first: Sequence[TrialResult], second: Sequence[TrialResult]) -> float:
    """The Kolmogorov distance of the staleness of some trials' updates from that of others."""
    length = max(len(result.staleness) for result in (*first, *second))
    shares = [_cumulate(results, length) for results in (first, second)]
    return float(np.abs(shares[0] - shares[1]).max(initial=0.0))


def _cumulate(results: Sequence[TrialResult], length: int) -> Numbers:
    """The share of updates with at most each staleness from 0."""
    total = np.zeros(length)
    for result in results:
        total[: len(result.staleness)] += result.staleness
    shares: Numbers = np.cumsum(total) / max(1.0, total.sum())
    return shares
