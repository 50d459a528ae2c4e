"""Shapes 2, 3 and 9: how long to wait for slow workers."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from msgspec import structs

from deploy.experiments.cluster import ClusterModel, Law, StepTimes
from deploy.experiments.shapes.base import (
    Bench,
    Check,
    Shape,
    ShapeVerdict,
    errors,
    judge_probability,
    judge_rule,
    list_figures,
    positive,
    times_to,
)
from deploy.experiments.statistics import best_probability, slope, slope_of_times
from deploy.experiments.trials import Trial, TrialResult
from deploy.experiments.tuning import Tuned

_TARGET = 10.0  # the error in percent that a time to a target is counted to
_HALF_IDLE_CV = 0.45  # of lognormal times, at which 16 workers wait half of the time in rounds
_FIXED = StepTimes(mean_s=1.0, law=Law.FIXED)


def bounds(bench: Bench, control: bool) -> list[Check]:
    """Eight workers; one of 20 of their steps takes 6 times as long; bounds 0 to 16, rates tuned.

    The control has no slow steps. Accept: the share of time that workers wait falls as the bound
    rises; updates to an error of 10 % rise with it (the interval of the slope of their logarithm is
    above 0: the first rule, "not below 0", could not fail); seconds to it are least at a bound of 1
    to 8, and at least 1.2 times less than at 0 (bootstrap probability of .95).
    """
    known = [0, 1, 2, 4, 8, 16]
    times = _FIXED if control else StepTimes(mean_s=1.0, cv=0.1, slow_share=0.05, slow_factor=6.0)
    gradients = bench.pick(4000, 20_000)
    first = Trial(
        strategy="ssp",
        gradients=gradients,
        look_every=gradients // 80,
        tested=bench.pick(2000, 10_000),
        cluster=ClusterModel(workers=8, times=times),
    )
    by_bound, _ = _at_bounds(bench, first, known)
    waits = mean_waits(by_bound)
    falls = all(later < former for former, later in pairwise(waits))
    updates = [times_to(results, _TARGET, updates=True) for results in by_bound]
    seconds = [times_to(results, _TARGET) for results in by_bound]
    trend = slope_of_times(known, updates)
    medians = [times.median for times in seconds]
    gain = medians[0] / min(medians)
    share = best_probability([times.values for times in seconds], [1, 2, 3, 4], gain=1.2)
    return [
        Check(
            "waits fall with s", "waits fall", list_figures(known, waits, ".1%"), judge_rule(falls)
        ),
        Check(
            "updates to 10 % error rise with s",
            "more updates at a larger s",
            f"{list_figures(known, [times.median for times in updates], '.0f')}; slope of their"
            f" logarithm {trend}",
            positive(trend.interval),
        ),
        Check(
            "seconds to 10 % error: best s in 1..8, 1.2 times faster than s = 0",
            "a bound above 0 is best",
            f"{list_figures(known, medians, '.0f')}; {_name_best(known, medians)}, {gain:.2f}"
            f" times; bootstrap probability {share:.2f}",
            judge_reached(medians, share),
        ),
    ]


def idling(bench: Bench, control: bool) -> list[Check]:
    """Sixteen workers with step times so uneven that they wait half of the time at bound 0.

    Sparse logistic regression with the proximal rule, batch 16, bounds 0 to 16, rates tuned for
    each. The target is 1.1 times the error that bound 0 ends with on the seeds that choose rates.
    The control has fixed step times. Accept: the share of waits is 50 % within 2 points at bound 0,
    and at most 5 % at 16; seconds to the target are least at a bound of 4 to 16 (bootstrap
    probability of .95); updates to it rise with the bound (the interval of the slope of their
    logarithm is above 0).
    """
    known = [0, 1, 2, 4, 8, 16]
    times = _FIXED if control else StepTimes(mean_s=1.0, cv=_HALF_IDLE_CV)
    gradients = bench.pick(8000, 40_000)
    first = Trial(
        workload="l1",
        batch=16,
        rule="proximal",
        strategy="ssp",
        gradients=gradients,
        look_every=gradients // 80,
        tested=bench.pick(5000, 10_000),
        cluster=ClusterModel(workers=16, times=times),
    )
    by_bound, rates = _at_bounds(bench, first, known)
    target = 1.1 * rates[0].error
    waits = mean_waits(by_bound)
    seconds = [times_to(results, target) for results in by_bound]
    updates = [times_to(results, target, updates=True) for results in by_bound]
    trend = slope_of_times(known, updates)
    medians = [times.median for times in seconds]
    share = best_probability([times.values for times in seconds], [3, 4, 5])
    return [
        Check(
            "waits of 50 % at s = 0, at most 5 % at 16",
            "50 % and 1.7 %",
            list_figures(known, waits, ".1%"),
            judge_rule(abs(waits[0] - 0.5) <= 0.02 and waits[-1] <= 0.05),
        ),
        Check(
            f"seconds to {target:.1f} % error: best s in 4..16",
            "8 is best",
            f"{list_figures(known, medians, '.0f')}; {_name_best(known, medians)}; bootstrap"
            f" probability {share:.2f}",
            judge_reached(medians, share),
        ),
        Check(
            "the slope of the updates to the target in s > 0",
            "more updates at a larger s",
            f"{list_figures(known, [times.median for times in updates], '.0f')}; slope of their"
            f" logarithm {trend}",
            positive(trend.interval),
        ),
    ]


def judge_reached(medians: Sequence[float], share: float) -> ShapeVerdict:
    """The verdict on the best level, where one of them has reached the target."""
    return judge_probability(share) if np.isfinite(min(medians)) else ShapeVerdict.INCONCLUSIVE


def _name_best(levels: Sequence[object], medians: Sequence[float]) -> str:
    return f"best {levels[int(np.argmin(medians))]}" if np.isfinite(min(medians)) else "none best"


def _at_bounds(
    bench: Bench, first: Trial, bounds: Sequence[int]
) -> tuple[list[list[TrialResult]], list[Tuned]]:
    """The results of a trial at each bound, with the best rate for it, and these rates."""
    levels = [structs.replace(first, staleness=bound) for bound in bounds]
    rates = bench.tune([structs.replace(level, look_every=0) for level in levels])
    tuned = [
        structs.replace(level, rate=rate.best) for level, rate in zip(levels, rates, strict=True)
    ]
    return bench.run(tuned, 10), rates


def mean_waits(by_bound: Sequence[Sequence[TrialResult]]) -> list[float]:
    """The mean share of time that workers wait, for each bound."""
    return [float(np.mean([result.wait_share for result in results])) for results in by_bound]


def backups(bench: Bench, control: bool) -> list[Check]:
    """Staleness 0 to 32; and 100 workers with backups: 2 % of their steps take 10 times as long.

    The control has neither staleness nor slow steps. The target is 1.1 times the error that no
    backups end with on the seeds that choose rates: no seed of the first run reached the constant
    10 %. Accept: the slope of the error in the staleness is above 0; seconds to the target are
    least with 2 to 8 backup workers, asynchronous training included (bootstrap probability of .95).
    Rates are tuned for each level.
    """
    return [staleness_slope(bench, control, bench.pick(5, 10)), _best_backups(bench, control)]


def staleness_slope(bench: Bench, control: bool, seeds: int) -> Check:
    """The check that the error rises with the staleness, rates tuned for each."""
    known = bench.pick([0, 8, 32], [0, 4, 8, 16, 32])
    levels = [
        Trial(
            strategy="asp:scale=1",
            gradients=bench.pick(6000, 30_000),
            cluster=ClusterModel(workers=1 if control else staleness + 1, times=_FIXED),
        )
        for staleness in known
    ]
    rates = bench.tune(levels)
    tuned = [
        structs.replace(level, rate=rate.best) for level, rate in zip(levels, rates, strict=True)
    ]
    errors_by_level = [errors(results) for results in bench.run(tuned, seeds)]
    trend = slope(known, errors_by_level)
    means = list_figures(known, [float(np.mean(values)) for values in errors_by_level], ".2f")
    return Check(
        "the slope of the error in the staleness > 0",
        "the error rises with staleness",
        f"{trend} points per update; error by staleness {means} %",
        positive(trend),
    )


def _best_backups(bench: Bench, control: bool) -> Check:
    times = _FIXED if control else StepTimes(mean_s=1.0, cv=0.1, slow_share=0.02, slow_factor=10.0)
    known = bench.pick([0, 4, 16], [0, 1, 2, 4, 8, 16])
    names = [*(f"bsp:b={b}" for b in known), "asp"]
    gradients = bench.pick(20_000, 60_000)
    levels = [
        Trial(
            strategy=name,
            gradients=gradients,
            look_every=gradients // 60,
            tested=bench.pick(2000, 10_000),
            cluster=ClusterModel(workers=100, times=times),
        )
        for name in names
    ]
    rates = bench.tune([structs.replace(level, look_every=0) for level in levels])
    tuned = [
        structs.replace(level, rate=rate.best) for level, rate in zip(levels, rates, strict=True)
    ]
    target = 1.1 * rates[0].error
    by_level = bench.run(tuned, bench.pick(3, 10))
    times_by_level = [times_to(results, target) for results in by_level]
    seconds = [times.median for times in times_by_level]
    among = [at for at, backups in enumerate(known) if 2 <= backups <= 8]
    share = best_probability([times.values for times in times_by_level], among)
    return Check(
        f"seconds to {target:.1f} % error: best with 2 to 8 backups of 100, faster than 0 and ASP",
        "96 + 4 of 100",
        f"{list_figures([*known, 'asp'], seconds, '.0f')}; bootstrap probability {share:.2f}",
        judge_reached(seconds, share),
    )


BOUNDS = Shape(2, "a bound above 0 is best", "Ho et al. 2013, stale synchronous parallel", bounds)
IDLE = Shape(
    3, "a bound saves the waits of slow workers", "Li et al. 2014, OSDI, parameter server", idling
)
BACKUPS = Shape(
    9, "backup workers beat waiting and asynchrony", "Chen et al. 2016, arXiv 1604.00981", backups
)
