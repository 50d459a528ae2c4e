"""Shapes 1, 6, 11 and 13: what staleness does to the error, and what mends it."""

import numpy as np
from msgspec import structs

from deploy.experiments.cluster import ClusterModel, Law, StepTimes
from deploy.experiments.shapes.base import (
    Bench,
    Check,
    Origin,
    Shape,
    ShapeVerdict,
    errors,
    judge_rule,
    list_figures,
    positive,
)
from deploy.experiments.statistics import equivalent, interval_of_pairs, mean_interval
from deploy.experiments.trials import Trial, TrialResult

_MOMENTUM = "momentum:momentum=0.9"
_FIXED = StepTimes(mean_s=1.0, law=Law.FIXED)


def softsync(bench: Bench, control: bool) -> list[Check]:
    """n-softsync with 30 workers, momentum .9, 4 epochs; the control trains in synchronous rounds.

    The fixed rate is the greedy one of synchronous training. Accept: mean staleness (W-1)n/W within
    5 %; P(staleness > 2n) < 1e-4; at the fixed rate an error of at least 80 % at n = 15 and 30; at
    rate/n each n within 1 point of synchronous training.
    """
    workers, known = 30, [1, 2, 15, 30]
    base = Trial(
        strategy="bsp",
        rule=_MOMENTUM,
        gradients=60_000,
        cluster=ClusterModel(workers=workers),
    )
    (rates,) = bench.tune([base])
    # The strategy divides the rate by n itself; n times the rate keeps it fixed.
    names = ["bsp" if control else f"softsync:n={n}" for n in known]
    scaled = [structs.replace(base, strategy=name, rate=rates.greedy) for name in names]
    fixed = [
        structs.replace(trial, rate=rates.greedy * (1 if control else n))
        for trial, n in zip(scaled, known, strict=True)
    ]
    seeds = bench.pick(3, 10)
    sync, *others = bench.run([structs.replace(base, rate=rates.greedy), *scaled, *fixed], seeds)
    by_n, at_fixed = others[: len(known)], others[len(known) :]
    return [
        *staleness_checks(by_n, workers, known),
        _check_fixed_rate(at_fixed, known),
        _check_scaled_rate(by_n, sync, known),
    ]


def staleness_checks(by_n: list[list[TrialResult]], workers: int, known: list[int]) -> list[Check]:
    expected = [(workers - 1) * n / workers for n in known]
    means = [float(np.mean([result.mean_staleness for result in results])) for results in by_n]
    off = max(abs(is_ / was - 1) for is_, was in zip(means, expected, strict=True))
    tails = [
        sum(sum(result.staleness[2 * n + 1 :]) for result in results)
        / sum(sum(result.staleness) for result in results)
        for results, n in zip(by_n, known, strict=True)
    ]
    return [
        Check(
            "mean staleness by n",
            f"n; (W-1)n/W is {list_figures(known, expected)}",
            f"{list_figures(known, means)}; at most {off:.1%} off",
            judge_rule(off <= 0.05),
            Origin.OWN,
        ),
        Check(
            "P(staleness > 2n)",
            "< 1e-4",
            list_figures(known, tails, ".1e"),
            judge_rule(max(tails) < 1e-4),
            Origin.OWN,
        ),
    ]


def _check_fixed_rate(at_fixed: list[list[TrialResult]], known: list[int]) -> Check:
    means = [float(np.mean(errors(results))) for results in at_fixed]
    return Check(
        "error at the fixed rate, n = 15 and 30",
        "90 %",
        f"by n: {list_figures(known, means)} %",
        judge_rule(min(means[2:]) >= 80),
    )


def _check_scaled_rate(
    by_n: list[list[TrialResult]], sync: list[TrialResult], known: list[int]
) -> Check:
    apart = [interval_of_pairs(errors(results), errors(sync)) for results in by_n]
    worst = max(abs(interval.mean) for interval in apart)
    measured = f"error less that of BSP ({np.mean(errors(sync)):.1f} %) by n: "
    return Check(
        "error at rate/n, each n",
        "18 % for every n, as synchronous training",
        measured + list_figures(known, [interval.mean for interval in apart], "+.2f"),
        judge_rule(worst <= 1.0),
    )


def compensation(bench: Bench, control: bool) -> list[Check]:
    """DC-ASGD with 16 workers, at the rate tuned for one worker; the control has one worker.

    Batches of 128, as in the paper's runs of CIFAR-10: the compensation takes the square of the
    gradient for the curvature, and in batches of 4 that square is mostly noise.

    Accept: the error of ASGD less that of SGD is above 0; the adaptive compensation closes at least
    half of that gap.
    """
    workers = 1 if control else 16
    alone = Trial(
        strategy="asp:scale=1",
        batch=128,
        gradients=bench.pick(10_000, 60_000),
        cluster=ClusterModel(workers=1),
    )
    (rates,) = bench.tune([alone])
    alone = structs.replace(alone, rate=rates.best)
    many = structs.replace(alone, cluster=ClusterModel(workers=workers))
    mended = structs.replace(many, strategy="dc_asgd:adaptive=true,scale=1")
    sgd, asgd, dc = bench.run([alone, many, mended], 10)
    gap = interval_of_pairs(errors(asgd), errors(sgd))
    half = interval_of_pairs(np.add(errors(asgd), errors(sgd)) / 2, errors(dc))
    means = ", ".join(f"{np.mean(errors(results)):.2f}" for results in (sgd, asgd, dc))
    return [
        Check(
            "error of ASGD less that of SGD > 0",
            "8.65 SGD, 9.27 ASGD, 8.19 DC-ASGD-a (ResNet-20, W 4)",
            f"{gap}; SGD, ASGD, DC-ASGD-a: {means}",
            positive(gap),
        ),
        Check(
            "DC-ASGD-a closes at least half the gap: the middle less its error >= 0",
            "all of it",
            str(half),
            positive(half),
        ),
    ]


def too_high_a_rate(bench: Bench, control: bool) -> list[Check]:
    """Five asynchronous workers at the greedy rate of one, momentum .9; the control is synchronous.

    Batches of 64, as in the example that the issue runs (train_mnist.py): with batches of 4 the
    greedy rate is limited by their noise, and not by what several workers bear. Accept: an accuracy
    of at most 15 % in 8 of 10 seeds; of warm start, rate/staleness and rate/W at least one of at
    least 95 % on average.
    """
    workers = 5
    alone = Trial(
        strategy="asp:scale=1",
        rule=_MOMENTUM,
        batch=64,
        gradients=bench.pick(4000, 18_750),  # the 20 epochs
        cluster=ClusterModel(workers=1),
    )
    (rates,) = bench.tune([alone])
    cluster = ClusterModel(workers=workers)
    base = structs.replace(alone, rate=rates.greedy, cluster=cluster)
    plain = structs.replace(base, strategy="bsp" if control else "asp:scale=1")
    (failed,) = bench.run([plain], 10)
    long = structs.replace(base, gradients=bench.pick(10_000, 60_000))
    cures = {
        "warm start": "downpour:scale=1,warm_steps=1000",
        "rate/staleness": "stale_rate",
        "rate/W": "asp",
    }
    mended = bench.run(
        [structs.replace(long, strategy=text) for text in cures.values()], bench.pick(3, 10)
    )
    right = [100 - error for error in errors(failed)]
    low = sum(accuracy <= 15 for accuracy in right)
    cured = [100 - float(np.mean(errors(results))) for results in mended]
    remedies = "; ".join(
        f"{name} {'mends it' if accuracy >= 95 else 'does not'}"
        for name, accuracy in zip(cures, cured, strict=True)
    )
    return [
        Check(
            "accuracy of at most 15 % in 8 of 10 seeds",
            "10-12 %",
            f"{low} of 10, mean {np.mean(right):.1f} % at rate {rates.greedy:g}",
            judge_rule(low >= 8),
        ),
        Check(
            "one remedy reaches 95 %",
            "none given",
            f"{list_figures(cures, cured, '.2f')} %: {remedies}",
            judge_rule(max(cured) >= 95),
            Origin.OWN,
        ),
    ]


def one_update_late(bench: Bench, control: bool) -> list[Check]:
    """Two workers in turn, so that every gradient is one update late; the control has 64.

    Accept: two one-sided tests show the error within .3 points of that without delay, rates tuned
    for each. Of 40 seeds at ci: the differences of the first run scattered by .6 points, so that
    with its 20 seeds an interval was .5 points wide, and only a mean within .06 could have passed.
    """
    levels = [
        Trial(
            strategy="asp:scale=1",
            gradients=bench.pick(20_000, 60_000),
            cluster=ClusterModel(workers=workers, times=_FIXED),
        )
        for workers in (1, 64 if control else 2)
    ]
    rates = bench.tune(levels)
    tuned = [
        structs.replace(level, rate=rate.best) for level, rate in zip(levels, rates, strict=True)
    ]
    prompt, late = bench.run(tuned, bench.pick(40, 20))
    same, interval = equivalent(errors(late), errors(prompt), 0.3)
    verdict = judge_rule(same)
    if not same and abs(interval.mean) <= 0.3:
        verdict = ShapeVerdict.INCONCLUSIVE
    delay = mean_interval([result.mean_staleness for result in late])
    return [
        Check(
            "error at a delay of 1 less that at 0, within .3 points",
            "the same accuracy",
            f"{interval} at 90 %; delay {delay.mean:.2f}",
            verdict,
        )
    ]


SOFTSYNC = Shape(
    1,
    "the staleness of n-softsync is n, and rate/n mends it",
    "Zhang et al. 2016, arXiv 1511.05950",
    softsync,
)
COMPENSATION = Shape(
    6,
    "a gradient corrected for its delay",
    "Zheng et al. 2017, arXiv 1609.08326: ResNet-20, four workers",
    compensation,
)
TOO_HIGH_A_RATE = Shape(
    11,
    "a rate that one worker bears fails with five",
    "mxnet issue 5287: asynchronous training at 10 to 12 % accuracy",
    too_high_a_rate,
)
ONE_UPDATE_LATE = Shape(
    13,
    "one update late costs nothing",
    "Narayanan et al. 2021, arXiv 2006.09503 (PipeDream-2BW)",
    one_update_late,
)
