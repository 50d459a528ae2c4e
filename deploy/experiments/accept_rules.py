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

from deploy.experiments.statistics import Interval, mean_interval, paired
from deploy.experiments.trials import TrialResult
from shards.errors import BadInput

Numbers = NDArray[np.float64]

FIGURES: dict[str, Callable[[TrialResult], float]] = {
    "error": lambda one: one.error,
    "loss": lambda one: one.curve[-1].loss,
    "staleness": lambda one: one.mean_staleness,
    "compute_share": lambda one: one.compute_share,
    "wait_share": lambda one: one.wait_share,
    "seconds": lambda one: one.seconds,
    "updates": lambda one: float(one.updates),
}
"""What a rule may be about: a figure of a trial at its end."""


class ExpectationKind(StrEnum):
    """What a rule says about the figure."""

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
    """What a rule came to."""

    HELD = "held"
    NOT_HELD = "not held"
    INCONCLUSIVE = "inconclusive"


class Judged(NamedTuple):
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
        for name, wanted in (("where", self.where), ("of", self.of)):
            if wanted is not None and not any(_chosen(one, wanted) for one in points):
                raise BadInput(name, expected="values of a point of this sweep", got=wanted)
        if self.over is not None:
            levels = {
                one[self.over] for one in points if self.over in one and _chosen(one, self.where)
            }
            if len(levels) < 2:
                raise BadInput(
                    "over", expected="a key with two values or more in where", got=f"{self.over!r}"
                )
            if self.kind is ExpectationKind.SLOPE_IN and not all(
                isinstance(one, int | float) for one in levels
            ):
                raise BadInput(
                    "over", expected="a key with numbers as values", got=f"{self.over!r}"
                )

    def judge(self, points: Sequence[PointResults]) -> Judged:
        """Judge the rule; it is inconclusive if a trial of its points is missing."""
        rule = " ".join(f"{key} {value}" for key, value in self._given().items())
        chosen = [one for one in points if _chosen(one.values, self.where)]
        others = [one for one in points if self.of is not None and _chosen(one.values, self.of)]
        seeds = {len(one.results) for one in (*chosen, *others)}
        if len(seeds) != 1 or 0 in seeds:
            return Judged(rule, ExpectationVerdict.INCONCLUSIVE, "trials are missing")
        finite = np.isfinite([self._figures(one) for one in (*chosen, *others)]).all()
        if not finite and self.kind is not ExpectationKind.DIVERGES:
            return Judged(rule, ExpectationVerdict.INCONCLUSIVE, "a figure is not finite")
        return Judged(rule, *self._judged(chosen, others))

    def _given(self) -> dict[str, Any]:
        names = ("kind", "value", "where", *_NEEDS[self.kind])
        return {name: getattr(self, name) for name in names}

    def _figures(self, one: PointResults) -> list[float]:
        return [FIGURES[self.value](result) for result in one.results]

    def _by_seed(self, points: Sequence[PointResults]) -> Numbers:
        """The mean over points, one value a seed."""
        means: Numbers = np.mean([self._figures(one) for one in points], axis=0)
        return means

    def _judged(
        self, chosen: Sequence[PointResults], others: Sequence[PointResults]
    ) -> tuple[ExpectationVerdict, str]:
        match self.kind:
            case ExpectationKind.ORDERING:
                apart = paired(self._by_seed(chosen), self._by_seed(others))
                return _inside(apart, -np.inf, -np.finfo(np.float64).tiny), f"difference {apart}"
            case ExpectationKind.WITHIN:
                assert self.by is not None
                apart = paired(self._by_seed(chosen), self._by_seed(others), level=0.9)
                return _inside(apart, -self.by, self.by), f"difference {apart} at 90 %"
            case ExpectationKind.RATIO_IN:
                assert self.range is not None
                ratio = mean_interval(self._by_seed(chosen) / self._by_seed(others))
                return _inside(ratio, *self.range), f"ratio {ratio}"
            case ExpectationKind.DIVERGES:
                ended = [one.diverged_at is not None for part in chosen for one in part.results]
                return _held(all(ended)), f"{sum(ended)} of {len(ended)} diverged"
            case ExpectationKind.DISTRIBUTION:
                assert self.by is not None
                apart_at_most = staleness_distance(_results(chosen), _results(others))
                return _held(apart_at_most <= self.by), f"distance {apart_at_most:.3f}"
        return self._over_levels(chosen)

    def _over_levels(self, chosen: Sequence[PointResults]) -> tuple[ExpectationVerdict, str]:
        """Judge a rule about the values of the key `over`."""
        assert self.over is not None
        levels: dict[Any, list[PointResults]] = {}
        for one in chosen:
            levels.setdefault(one.values[self.over], []).append(one)
        by_level = [self._by_seed(points) for points in levels.values()]
        means = [float(one.mean()) for one in by_level]
        shown = ", ".join(f"{at}: {mean:.4g}" for at, mean in zip(levels, means, strict=True))
        match self.kind:
            case ExpectationKind.MONOTONE:
                steps = np.diff(means) * (1 if self.rising else -1)
                return _held(bool((steps >= 0).all())), shown
            case ExpectationKind.ARGMIN_IN:
                assert self.among is not None
                return _held(list(levels)[int(np.argmin(means))] in self.among), shown
        assert self.range is not None
        at = np.array(list(levels), np.float64)
        at = at - at.mean()
        slopes = mean_interval(np.array(by_level).T @ at / (at @ at))
        return _inside(slopes, *self.range), f"slope {slopes}; {shown}"


def _chosen(values: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(key in values and values[key] == value for key, value in wanted.items())


def _held(holds: bool) -> ExpectationVerdict:
    return ExpectationVerdict.HELD if holds else ExpectationVerdict.NOT_HELD


def _inside(found: Interval, low: float, high: float) -> ExpectationVerdict:
    if low <= found.low and found.high <= high:
        return ExpectationVerdict.HELD
    outside = found.high < low or found.low > high
    return ExpectationVerdict.NOT_HELD if outside else ExpectationVerdict.INCONCLUSIVE


def _results(points: Sequence[PointResults]) -> list[TrialResult]:
    return [result for point in points for result in point.results]


def staleness_distance(first: Sequence[TrialResult], second: Sequence[TrialResult]) -> float:
    """The Kolmogorov distance of the staleness of some trials' updates from that of others."""
    length = max(len(one.staleness) for one in (*first, *second))
    shares = [_cumulated(results, length) for results in (first, second)]
    return float(np.abs(shares[0] - shares[1]).max(initial=0.0))


def _cumulated(results: Sequence[TrialResult], length: int) -> Numbers:
    """The share of updates with at most each staleness from 0."""
    total = np.zeros(length)
    for one in results:
        total[: len(one.staleness)] += one.staleness
    shares: Numbers = np.cumsum(total) / max(1.0, total.sum())
    return shares
