"""The statistics of experiments: intervals for paired runs and for records, and times to a target.

*Paired.* Two settings are run with the same seeds, so they see the same batches and step times. The
interval of the mean difference is a percentile bootstrap over the seeds, widened for their small
number (Hesterberg 2015, arXiv 1411.5279, section 4.4): plain percentiles of ten values cover 90 %
where they promise 95. Fewer than eight values have no such percentiles, and get Student's interval
with the bootstrap's standard error.

*Records.* Neighbouring updates are not independent, so whole blocks of them are drawn.

*Times.* A run that misses the target, or diverges, is censored: its time is infinite. A median over
seeds holds as long as less than half of them are censored; slopes are of levels at which at most
one run in ten is.
"""

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 10_000
_FEWEST = 8  # values, enough for percentiles that reach far

Numbers = NDArray[np.float64]


class Interval(NamedTuple):
    """An estimate and its interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        mean, low, high = (
            f"{figure:.3g}" if abs(figure) < 1000 else f"{figure:.0f}" for figure in self
        )
        return f"{mean} [{low}, {high}]"


def mean_interval(
    values: ArrayLike, *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """The mean of independent values, one a seed or differences of pairs, and its interval."""
    array = np.asarray(values, np.float64)
    low, high = bootstrap_means(array[None], level=level, resamples=resamples, seed=seed)
    return Interval(float(array.mean()), float(low[0]), float(high[0]))


def interval_of_pairs(first: ArrayLike, second: ArrayLike, *, level: float = 0.95) -> Interval:
    """The mean of `first - second`, two lists for the same seeds, and its interval."""
    return mean_interval(np.subtract(first, second), level=level)


def bootstrap_means(
    sets: Numbers, *, level: float, resamples: int, seed: int
) -> tuple[Numbers, Numbers]:
    """The ends of the intervals of the means of several sets, an array of shape (sets, n)."""
    count, n = sets.shape
    if n < 2:
        return sets[:, 0], sets[:, 0]
    drawn = np.random.default_rng(seed).integers(n, size=(resamples, n))
    tail = (1 - level) / 2
    student = math.sqrt(n / (n - 1)) * student_quantile(1 - tail, n - 1)
    widened = NormalDist().cdf(-student)
    # One draw serves all sets: as counts, resampling is one product of matrices.
    weights = np.zeros((resamples, n))
    np.add.at(weights, (np.arange(resamples)[:, None], drawn), 1 / n)
    ends = np.empty((2, count))
    for start in range(0, count, 256):
        means = sets[start : start + 256] @ weights.T
        if n < _FEWEST:
            half = student * means.std(1)
            centre = sets[start : start + 256].mean(1)
            ends[:, start : start + 256] = centre - half, centre + half
        else:
            ends[:, start : start + 256] = np.quantile(means, (widened, 1 - widened), axis=1)
    return ends[0], ends[1]


@cache
def student_quantile(share: float, freedom: int) -> float:
    """The quantile of Student's t distribution, for a share above 1/2."""
    low, high = 0.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student(middle, freedom) < share else (low, middle)
    return middle


def _student(t: float, freedom: int) -> float:
    """The distribution function of Student's t, by the integral over the angle atan(t/sqrt(f))."""
    end = math.atan(t / math.sqrt(freedom))
    nodes, weights = np.polynomial.legendre.leggauss(64)
    angles = end / 2 * (nodes + 1)
    part = end / 2 * float(weights @ np.cos(angles) ** (freedom - 1))
    norm = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return 0.5 + norm * part


def equivalent(first: ArrayLike, second: ArrayLike, margin: float) -> tuple[bool, Interval]:
    """True if two one-sided tests at 5 % show a mean difference within the margin; and the 90 %
    interval that says so."""
    interval = interval_of_pairs(first, second, level=0.9)
    return -margin < interval.low and interval.high < margin, interval


def median_interval(values: ArrayLike, *, level: float = 0.95) -> Interval:
    """The median of independent values, some of which may be infinite, and its interval.

    The ends are order statistics, by the binomial law of the number of values below the median
    (David and Nagaraja 2003, section 7.1). Fewer than six values have none at 95 %: then the ends
    are infinite.
    """
    ordered = np.sort(np.asarray(values, np.float64))
    n = len(ordered)
    below, ends = 0.0, 0
    while below + math.comb(n, ends) / 2**n <= (1 - level) / 2:
        below += math.comb(n, ends) / 2**n
        ends += 1
    low, high = (ordered[ends - 1], ordered[n - ends]) if ends else (-math.inf, math.inf)
    return Interval(float(ordered[n // 2]), float(low), float(high))


def subtract_pairs(first: ArrayLike, second: ArrayLike) -> Numbers:
    """`first - second`; two equal infinite values are a tie, 0."""
    one, other = np.asarray(first, np.float64), np.asarray(second, np.float64)
    with np.errstate(invalid="ignore"):
        return np.where(one == other, 0.0, one - other)


def draw_medians(
    values: Sequence[Sequence[float]], *, resamples: int = RESAMPLES, seed: int = 0
) -> Numbers:
    """The median of each level in each bootstrap draw of the seeds, of shape (levels, resamples).

    `values` has a list for each level, one value a seed. All levels see the same draws.
    """
    sets = np.asarray(values, np.float64)
    n = sets.shape[1]
    drawn = np.random.default_rng(seed).integers(n, size=(resamples, n))
    # The upper middle one, as in TargetTimes: the mean of two would be infinite with one of them.
    return np.array([np.partition(level[drawn], n // 2, axis=1)[:, n // 2] for level in sets])


def best_probability(
    values: Sequence[Sequence[float]], among: Sequence[int], *, gain: float = 1.0
) -> float:
    """The bootstrap probability that the level of the least median is among these.

    The median of the first level must also be at least `gain` times as large as the least. Equally
    good levels share a draw. A draw without a finite median has no best level.
    """
    medians = draw_medians(values)
    least = medians.min(0)
    best = medians == least
    shares = best[list(among)].sum(0) / best.sum(0)
    return float((shares * (np.isfinite(least) & (medians[0] >= gain * least))).mean())


NEAR = 1.1  # times the least median


def near_best(values: Sequence[Sequence[float]]) -> list[float]:
    """The bootstrap probability of each level that its median is at most NEAR times the least."""
    medians = draw_medians(values)
    least = medians.min(0)
    return (np.isfinite(least) & (medians <= NEAR * least)).mean(1).tolist()  # type: ignore[no-any-return]


class TargetTimes(NamedTuple):
    """Times to a target, one a seed; infinite where a run missed it."""

    values: tuple[float, ...]

    @property
    def misses(self) -> int:
        return sum(map(math.isinf, self.values))

    @property
    def comparable(self) -> bool:
        """True if at most one run in ten is censored."""
        return 10 * self.misses <= len(self.values)

    @property
    def median(self) -> float:
        """Infinite if half of the runs or more missed the target."""
        ordered = sorted(self.values)
        return ordered[len(ordered) // 2]

    def __str__(self) -> str:
        text = f"{self.median:.4g}"
        return f"{text} ({self.misses} of {len(self.values)} censored)" if self.misses else text

    def show_interval(self) -> str:
        """The median with its interval, where there are values enough, and the number of misses."""
        interval = median_interval(self.values)
        missed = f" ({self.misses} missed)" if self.misses else ""
        return f"{f'{self.median:.3g}' if interval.low == -math.inf else interval}{missed}"


def slope(levels: Sequence[float], values: Sequence[Sequence[float]]) -> Interval:
    """The slope of a straight line through `values`, a list for each level, one value a seed.

    Each seed gives one slope over all levels; the interval is that of their mean.
    """
    at = np.asarray(levels, np.float64)
    at = at - at.mean()
    by_seed = np.asarray(values, np.float64).T
    by_seed = by_seed - by_seed[:, :1]  # so that equal values have a slope of 0, and not of 1e-17
    return mean_interval(by_seed @ at / (at @ at))


class TimeSlope(NamedTuple):
    """The slope of the logarithm of times in their level: over which levels, and by seed."""

    levels: list[float]
    by_seed: list[float]

    @property
    def known(self) -> bool:
        """False if too many runs are censored to compare two levels."""
        return len(self.levels) > 1

    @property
    def interval(self) -> Interval:
        """The median of the seeds' slopes, and its interval."""
        if not self.known:
            return Interval(math.nan, -math.inf, math.inf)
        return median_interval(self.by_seed)

    def __str__(self) -> str:
        if not self.known:
            return "unknown, as more than one run in ten is censored"
        return f"{self.interval} over {self.levels[0]:g} to {self.levels[-1]:g}"


def slope_of_times(levels: Sequence[float], times: Sequence[TargetTimes]) -> TimeSlope:
    """The slope of log T in the level, over the levels with at most one censored run in ten.

    T counts updates; a run at the target from the start has 1.
    """
    used = [at for at, level in enumerate(times) if level.comparable]
    at = np.asarray([levels[index] for index in used], np.float64)
    if len(at) < 2:
        return TimeSlope(at.tolist(), [])
    at = (at - at.mean()) / ((at - at.mean()) ** 2).sum()
    logs = np.log(np.maximum([times[index].values for index in used], 1))
    logs = logs - np.where(np.isfinite(logs[0]), logs[0], 0)
    # A level in the middle has no weight, whatever its time; a run that is censored at both ends
    # has no slope, and counts as 0.
    weighted = np.where(at[:, None] == 0, 0.0, logs * at[:, None])
    with np.errstate(invalid="ignore"):
        slopes = np.nan_to_num(weighted.sum(0), nan=0.0, posinf=math.inf, neginf=-math.inf)
    return TimeSlope([levels[index] for index in used], slopes.tolist())
