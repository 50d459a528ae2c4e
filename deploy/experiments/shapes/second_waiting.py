"""Second registrations of shapes 2, 3 and 9: reads through a cache, stragglers as published."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from msgspec import structs

from deploy.experiments.cluster import ClusterModel, Law, StepTimes
from deploy.experiments.shapes.base import (
    Bench,
    Check,
    Origin,
    judge_rule,
    list_figures,
    positive,
    state_premise,
    times_to,
)
from deploy.experiments.shapes.waiting import judge_reached, mean_waits, staleness_slope
from deploy.experiments.statistics import (
    TargetTimes,
    best_probability,
    median_interval,
    slope_of_times,
    subtract_pairs,
)
from deploy.experiments.trials import Trial, TrialResult
from deploy.experiments.tuning import Tuned

SEEDS = range(1000, 1010)
_BOUNDS = [0, 1, 2, 4, 8, 16]
_FIXED = StepTimes(mean_s=1.0, law=Law.FIXED)
_LOOKS = 160


def bounds(bench: Bench, control: bool) -> list[Check]:
    """Eight workers, one step in 20 takes 6 times as long; reads through a cache, and fresh ones.

    Batch 16, 16,000 gradients, rates tuned for each bound, ten seeds. The target is 1.3 times the
    error at bound 0 on the tuning seeds; premise: there every run reaches it. The control has no
    slow steps. Accept, with the cache: waits fall as the bound rises; updates to the target rise
    with it (the slope of their logarithm is above 0); seconds are least at a bound of 1 to 8, and
    at least 1.2 times less than at 0 (bootstrap probability of .95). Own: with fresh reads the
    updates at 16 are within 10 % of those at 0.
    """
    times = _FIXED if control else StepTimes(cv=0.1, slow_share=0.05, slow_factor=6.0)
    base = Trial(batch=16, gradients=16_000, cluster=ClusterModel(workers=8, times=times))
    cached, rates = _tune_bounds(bench, structs.replace(base, strategy="cached_ssp"))
    fresh, _ = _tune_bounds(bench, structs.replace(base, strategy="ssp"))
    target = 1.3 * rates[0].error
    premise = _premise_reached(bench, [*cached, *fresh], target)
    if bench.ends_at([premise], control):
        return [premise]
    results = bench.run([*cached, *fresh], len(SEEDS))
    by_bound, plain = results[: len(_BOUNDS)], results[len(_BOUNDS) :]
    waits = mean_waits(by_bound)
    falls = all(later < former for former, later in pairwise(waits))
    ends = [times_to(plain[at], target, updates=True).median for at in (0, -1)]
    return [
        premise,
        Check(
            "waits fall with s",
            "waits fall",
            list_figures(_BOUNDS, waits, ".1%"),
            judge_rule(falls),
        ),
        *_judge_times(by_bound, target, [1, 2, 3, 4], gain=1.2),
        Check(
            "fresh reads: updates to the target at s = 16 within 10 % of those at 0",
            "none: staleness saturates at W - 1",
            f"{ends[1]:.0f} for {ends[0]:.0f}",
            judge_rule(bool(abs(ends[1] / ends[0] - 1) <= 0.1)),
            Origin.OWN,
        ),
    ]


def idling(bench: Bench, control: bool) -> list[Check]:
    """Sixteen workers that wait half of the time at bound 0; sparse logistic regression, cache.

    Batch 1,024, 8,000 gradients, rates tuned for each bound, ten seeds; the target is 1.1 times the
    error at bound 0 on the tuning seeds. Premise: half of the rate takes 1.5 times as many updates,
    as curvature and not noise limits it. The control has fixed step times. Accept: waits of 50 % at
    bound 0 within 2 points, and of at most 5 % at 16; the slope of the logarithm of the updates is
    above 0; seconds are least at a bound of 4 to 16 (bootstrap probability of .95).
    """
    times = _FIXED if control else StepTimes(cv=0.45)
    base = Trial(
        workload="l1",
        batch=1024,
        rule="proximal",
        strategy="cached_ssp",
        gradients=8000,
        cluster=ClusterModel(workers=16, times=times),
    )
    levels, rates = _tune_bounds(bench, base)
    target = 1.1 * rates[0].error
    half = structs.replace(levels[0], rate=levels[0].rate / 2)
    whole_times, half_times = (
        times_to(results, target, updates=True).median for results in bench.probe([levels[0], half])
    )
    premise = state_premise(
        "half of the rate takes 1.5 times as many updates",
        f"{half_times:.0f} for {whole_times:.0f}",
        bool(np.isfinite(whole_times) and half_times >= 1.5 * whole_times),
    )
    if bench.ends_at([premise], control):
        return [premise]
    by_bound = bench.run(levels, len(SEEDS))
    waits = mean_waits(by_bound)
    return [
        premise,
        Check(
            "waits of 50 % at s = 0, at most 5 % at 16",
            "50 % and 1.7 %",
            list_figures(_BOUNDS, waits, ".1%"),
            judge_rule(abs(waits[0] - 0.5) <= 0.02 and waits[-1] <= 0.05),
        ),
        *_judge_times(by_bound, target, [3, 4, 5]),
    ]


def _tune_bounds(bench: Bench, base: Trial) -> tuple[list[Trial], list[Tuned]]:
    levels = [structs.replace(base, staleness=bound) for bound in _BOUNDS]
    rates = bench.tune(levels)
    looks = base.gradients // _LOOKS
    return [
        structs.replace(level, rate=rate.best, look_every=looks)
        for level, rate in zip(levels, rates, strict=True)
    ], rates


def _premise_reached(bench: Bench, levels: Sequence[Trial], target: float) -> Check:
    reached = [times_to(results, target).misses == 0 for results in bench.probe(levels)]
    measured = f"in {sum(reached)} of {len(reached)} levels"
    return state_premise(f"every run reaches {target:.1f} %", measured, all(reached))


def _judge_times(
    by_bound: Sequence[Sequence[TrialResult]], target: float, among: list[int], gain: float = 1.0
) -> list[Check]:
    """The checks of updates that rise with the bound, and of the best bound in seconds."""
    updates = [times_to(results, target, updates=True) for results in by_bound]
    seconds = [times_to(results, target) for results in by_bound]
    trend = slope_of_times(_BOUNDS, updates)
    share = best_probability([times.values for times in seconds], among, gain=gain)
    medians = [times.median for times in seconds]
    faster = f", {gain:g} times faster than s = 0" if gain > 1 else ""
    return [
        Check(
            f"updates to {target:.1f} % error rise with s",
            "more updates at a larger s",
            f"{list_figures(_BOUNDS, [times.median for times in updates], '.0f')}; slope of their"
            f" logarithm {trend}",
            positive(trend.interval),
        ),
        Check(
            f"seconds to it: best s in {_BOUNDS[among[0]]}..{_BOUNDS[among[-1]]}{faster}",
            "a bound above 0 is best",
            f"{list_figures(_BOUNDS, medians, '.0f')}; bootstrap probability {share:.2f}",
            judge_reached(medians, share),
        ),
    ]


def backups(bench: Bench, control: bool) -> list[Check]:
    """Staleness 0 to 32; and 100 workers with batch 1, momentum .9, 1.3 % of steps 3 times as long.

    1,500 rounds, rates tuned for each level, ten seeds; the target is 1.1 times the error without
    backups on the tuning seeds. Premises: the 98th of 100 workers is done in under 2 s in 80 % of
    the rounds, the 100th in 30 %, within 10 points; rounds times workers to the target are the same
    within 25 % with 50 and with 100. The control has neither staleness nor slow steps. Accept: the
    error rises with the staleness; seconds are least with 2 to 8 backups, and less than with none
    (bootstrap probability of .95); with 4 they are less than asynchronously (median of pairs).
    """
    times = _FIXED if control else StepTimes(cv=0.1, slow_share=0.013, slow_factor=3.0)
    known = [0, 1, 2, 4, 8, 16]
    base = Trial(
        batch=1,
        rule="momentum:momentum=0.9",
        gradients=150_000,
        cluster=ClusterModel(workers=100, times=times),
    )
    half = structs.replace(base, cluster=ClusterModel(workers=50, times=times), strategy="bsp")
    levels = [
        structs.replace(base, strategy=name) for name in [*(f"bsp:b={b}" for b in known), "asp"]
    ]
    rates = bench.tune([half, *levels])
    half, *levels = (
        structs.replace(level, rate=rate.best, look_every=level.gradients // 150)
        for level, rate in zip([half, *levels], rates, strict=True)
    )
    target = 1.1 * rates[1].error
    premises = [_premise_quantiles(times), _premise_noise(bench, half, levels[0], target)]
    if bench.ends_at(premises, control):
        return premises
    seconds = [times_to(results, target) for results in bench.run(levels, len(SEEDS))]
    medians = [level.median for level in seconds]
    share = best_probability([level.values for level in seconds[:-1]], [2, 3, 4])
    ahead = median_interval(subtract_pairs(seconds[-1].values, seconds[3].values))
    listed = list_figures([*known, "asp"], medians, ".0f")
    return [
        *premises,
        staleness_slope(bench, control, len(SEEDS)),
        Check(
            f"seconds to {target:.1f} % error: best with 2 to 8 backups of 100",
            "96 + 4 of 100",
            f"{listed}; bootstrap probability {share:.2f}",
            judge_reached(medians[:-1], share),
        ),
        Check(
            "4 backups reach it before asynchronous training",
            "they do",
            f"seconds later: {ahead}",
            positive(ahead),
        ),
    ]


def _premise_quantiles(times: StepTimes) -> Check:
    """Judged by 20,000 rounds of step times of 100 workers, without any training."""
    draws = [times.draws(0, worker) for worker in range(100)]
    rounds = np.sort([[next(draw) for draw in draws] for _ in range(20_000)], axis=1)
    shares = [float((rounds[:, at] < 2).mean()) for at in (97, 99)]
    return state_premise(
        "of 100 workers 98 are done in under 2 s in 80 % of the rounds, all in 30 %",
        f"{shares[0]:.1%} and {shares[1]:.1%}",
        abs(shares[0] - 0.8) <= 0.1 and abs(shares[1] - 0.3) <= 0.1,
    )


def _premise_noise(bench: Bench, half: Trial, whole: Trial, target: float) -> Check:
    counts: list[TargetTimes] = [
        times_to(results, target, updates=True) for results in bench.probe([half, whole])
    ]
    work = [50 * counts[0].median, 100 * counts[1].median]
    ratio = work[0] / work[1] if np.isfinite(work).all() else float("nan")
    return state_premise(
        "rounds times workers are the same with 50 and with 100, within 25 %",
        f"ratio {ratio:.2f}",
        bool(0.75 <= ratio <= 1.25),
    )
