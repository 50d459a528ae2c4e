"""Second registrations of shapes 4, 8, 10 and 12, and a third of 12.

They have one rate for all, and optima with intervals.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from deploy.experiments.cluster import ClusterModel, Law, StepTimes
from deploy.experiments.shapes.base import (
    Bench,
    Check,
    Origin,
    ShapeVerdict,
    judge_rule,
    list_figures,
    positive,
    state_premise,
    times_to,
)
from deploy.experiments.shapes.delays import DelayTimes, judge_depths, judge_rules
from deploy.experiments.shapes.momentum import EXPONENTIAL, measure_implicit, tune_momenta
from deploy.experiments.shapes.speed import WORKERS, speeds
from deploy.experiments.shapes.windows import judge_best_tau, measure_rounds
from deploy.experiments.statistics import (
    RESAMPLES,
    Interval,
    TargetTimes,
    interval_of_pairs,
    mean_interval,
)
from deploy.experiments.trials import Trial, TrialResult

SEEDS, THIRD_SEEDS = range(1000, 1010), range(2000, 2010)

# --- 4.2 ------------------------------------------------------------------------------------------

_STEP_S, _LINK = 2.0, "rtt=20s"
_STEADY = StepTimes(mean_s=_STEP_S, law=Law.FIXED)
PUBLISHED = {3: 2.4, 5: 3.8, 10: 4.4}
"""The speed-ups over one worker, by the number of workers."""
_TAU, _RATE = 50, 0.008
SHARES = (0.5, 0.7, 0.9)
"""Shares of one worker's run: its errors at their ends are the targets."""
_SMOOTHED = 7  # looks


def sparknet(bench: Bench, control: bool) -> list[Check]:
    """K workers, tau 50 steps of 2 s, 20 s to exchange; batch 4, momentum .9, rate .008 for all K.

    One worker takes 6,000 steps, K workers 2,000 each; ten seeds. Targets are the errors, in a
    running mean of 7 looks, that one worker has on average after 50, 70 and 90 % of its steps.
    Premise: one worker is limited by noise, so that batches five times as large need at most half
    of the steps to the target at 70 %. The control exchanges at each step. Accept: the geometric
    mean over the targets of the speed-up is at least that published at K 3, 5 and 10, and its 95 %
    lower end at least .75 of it; at K 5 the best tau of 1, 10 and 50 is larger with 20 s to
    exchange than with none (bootstrap probability of .95). Own: a round takes tau C + S within 2 %;
    asynchronous averaging without a discount takes at most 1.1 times as long as rounds.
    """
    alone = Trial(
        strategy="asp:scale=1",
        rule="momentum:momentum=0.9",
        rate=_RATE,
        gradients=6000,
        look_every=50,
        cluster=ClusterModel(workers=1, times=_STEADY),
    )
    probed = bench.probe([alone, structs.replace(alone, batch=20)])
    (middle,) = find_targets(probed[0], (0.7,))
    steps = [np.median(_smooth_times(results, middle)) / _STEP_S for results in probed]
    premise = state_premise(
        "batches five times as large need at most half of the steps",
        f"{steps[1]:.0f} for {steps[0]:.0f}",
        bool(np.isfinite(steps[1]) and steps[1] <= steps[0] / 2),
    )
    if bench.ends_at([premise], control):
        return [premise]
    taus = [1] if control else [1, 10, _TAU]
    last = taus[-1]
    near = [_together(alone, 5, f"sparknet:tau={tau}", "") for tau in taus]
    far = [_together(alone, 5, f"sparknet:tau={tau}", _LINK) for tau in taus]
    many = [_together(alone, workers, f"sparknet:tau={last}", _LINK) for workers in PUBLISHED]
    pair = [
        structs.replace(
            level,
            rule="sgd",
            cluster=structs.replace(level.cluster, times=StepTimes(mean_s=_STEP_S)),
        )
        for level in (
            _together(alone, 5, f"local_sgd:h={last}", _LINK),
            _together(alone, 5, f"downpour:n_push={last},n_fetch={last},scale=0.2", _LINK),
        )
    ]
    serial, *others = bench.run([alone, *near, *far, *many, *pair], len(SEEDS))
    targets = find_targets(serial, SHARES)
    by_tau = [
        TargetTimes(tuple(_smooth_times(results, targets[1])))
        for results in others[: 2 * len(taus)]
    ]
    gains = [measure_speedups(serial, results, targets) for results in others[2 * len(taus) : -2]]
    rounds, late = (np.median(_smooth_times(results, targets[0])) for results in others[-2:])
    return [
        premise,
        *([measure_rounds(taus)] if bench.measures else []),
        judge_best_tau(taus, by_tau[: len(taus)], by_tau[len(taus) :]),
        Check(
            f"speed-up over one worker at tau {last}, S 20 s, one rate for all K",
            list_figures(PUBLISHED, PUBLISHED.values()),
            ", ".join(f"{workers}: {gain}" for workers, gain in zip(PUBLISHED, gains, strict=True)),
            judge_rule(
                all(
                    gain.mean >= was and gain.low >= 0.75 * was
                    for gain, was in zip(gains, PUBLISHED.values(), strict=True)
                )
            ),
        ),
        Check(
            "asynchronous averaging takes at most 1.1 times as long as rounds, K 5",
            "not slower",
            f"seconds {late:.0f} asynchronous, {rounds:.0f} in rounds",
            judge_times(float(late), 1.1 * float(rounds)),
            Origin.OWN,
        ),
    ]


def judge_times(seconds: float, limit: float) -> ShapeVerdict:
    """The verdict of the rule that a time is at most a limit: none if neither target was reached,
    for then both are infinite."""
    if np.isinf(seconds) and np.isinf(limit):
        return ShapeVerdict.INCONCLUSIVE
    return judge_rule(seconds <= limit)


def _together(alone: Trial, workers: int, strategy: str, link: str) -> Trial:
    return structs.replace(
        alone,
        strategy=strategy,
        gradients=2000 * workers,
        look_every=50 * workers,
        cluster=ClusterModel(workers=workers, times=_STEADY, link=link),
    )


def _smooth(result: TrialResult) -> NDArray[np.float64]:
    """The errors of a curve, each the mean of it and up to six looks before it."""
    found = np.array([point.error for point in result.curve])
    return np.array([found[max(0, at - _SMOOTHED + 1) : at + 1].mean() for at in range(len(found))])


def find_targets(results: Sequence[TrialResult], shares: Sequence[float]) -> list[float]:
    """The mean smoothed errors of runs at these shares of their looks."""
    mean = np.mean([_smooth(result) for result in results], 0)
    return [float(mean[round(share * (len(mean) - 1))]) for share in shares]


def _smooth_times(results: Sequence[TrialResult], target: float) -> list[float]:
    """The seconds at which the smoothed error of each run reaches the target, infinite if never."""
    out = []
    for result in results:
        below = np.flatnonzero(_smooth(result) <= target)
        out.append(result.curve[below[0]].seconds if len(below) else np.inf)
    return out


def measure_speedups(
    serial: Sequence[TrialResult], results: Sequence[TrialResult], targets: Sequence[float]
) -> Interval:
    """The geometric mean over targets of the speed-up by seed; a run that missed one has 0.

    It is over the median time of one worker.
    """
    by_target = []
    for target in targets:
        one = np.median(_smooth_times(serial, target))
        by_target.append(one / np.array(_smooth_times(results, target)))
    return mean_interval(np.prod(by_target, 0) ** (1 / len(targets)))


# --- 8.2 ------------------------------------------------------------------------------------------

MOMENTA = [0.0, 0.15, 0.3, 0.45, 0.6, 0.9]
"""The explicit momenta that are tried."""


def momentum(bench: Bench, control: bool) -> list[Check]:
    """Exponential step times, batch 64; the control trains in synchronous rounds.

    Rates are tuned for each momentum and W of 1, 4 and 16; ten seeds. Accept: on quad the implicit
    momentum is 1 - 1/W within .03; on mlp the best explicit momentum, by a parabola through the
    errors at six momenta, falls with W: the slope in log2 W has an interval below 0.
    """
    strategy, known = "bsp" if control else "asp:scale=1", [1, 4, 16]
    tuned = tune_momenta(bench, strategy, known, MOMENTA)
    found = [[result.error for result in results] for results in bench.run(tuned, len(SEEDS))]
    shaped = np.array(found).reshape(len(known), len(MOMENTA), -1)
    best = [_optimum(level.mean(-1)) for level in shaped]
    fall = _bootstrap_slope(np.log2(known), shaped)
    return [
        *([measure_implicit(bench, strategy)] if bench.measures else []),
        Check(
            "mlp: the best explicit momentum falls with W",
            "falls as W grows",
            f"by W: {list_figures(known, best, '.2f')}; slope in log2 W {fall}",
            positive(Interval(-fall.mean, -fall.high, -fall.low)),
        ),
    ]


def _optimum(found: NDArray[np.float64]) -> float:
    """Where the parabola through these errors is least, within the momenta tried."""
    square, linear, _ = np.polyfit(MOMENTA, found, 2)
    if square <= 0:
        return MOMENTA[int(np.argmin(found))]
    return float(np.clip(-linear / (2 * square), MOMENTA[0], MOMENTA[-1]))


def _bootstrap_slope(at: NDArray[np.float64], found: NDArray[np.float64]) -> Interval:
    """The slope of the optimum in `at`, with its percentile interval over draws of the seeds."""
    dice, n = np.random.default_rng(0), found.shape[-1]
    at = (at - at.mean()) / ((at - at.mean()) ** 2).sum()
    drawn = [found[..., dice.integers(n, size=n)].mean(-1) for _ in range(RESAMPLES // 5)]
    slopes = [float(at @ [_optimum(level) for level in levels]) for levels in drawn]
    low, high = np.quantile(slopes, (0.025, 0.975))
    whole = float(at @ [_optimum(level) for level in found.mean(-1)])
    return Interval(whole, float(low), float(high))


# --- 10.2 -----------------------------------------------------------------------------------------


def speed(bench: Bench, control: bool) -> list[Check]:
    """Quad with noise of constant variance, eight workers, exponential times, rate .1 for both.

    5,000 s with a look each 50 s; ten seeds. Premise: asynchronous training is at its floor, so
    that its last two quarters differ by at most 5 %. The control has fixed times. Accept:
    asynchronous is better after 100 s, synchronous in the last tenth, by intervals. Own: the mean
    steps per update of sync, K-sync and K-batch-async within 2 % of H_W, H_W - H_(W-K) and K/W.
    """
    seconds, look_s = 5000, 50
    times = StepTimes(law=Law.FIXED) if control else EXPONENTIAL
    cluster = ClusterModel(workers=WORKERS, times=times)
    per_update = 1.0 if control else sum(1 / k for k in range(1, WORKERS + 1))
    counts = [round(WORKERS * seconds / per_update), WORKERS * seconds]
    levels = [
        Trial(
            workload="quad",
            strategy=strategy,
            rate=0.1,
            gradients=count,
            look_every=round(count * look_s / seconds),
            cluster=cluster,
        )
        for strategy, count in zip(("bsp", "asp:scale=1"), counts, strict=True)
    ]
    (probed,) = bench.probe([levels[1]])
    quarters = [
        np.mean([_mean_error(one, a, b) for one in probed]) for a, b in ((0.5, 0.75), (0.75, 1))
    ]
    premise = state_premise(
        "the last two quarters of asynchronous training differ by at most 5 %",
        f"{quarters[0]:.3g} and {quarters[1]:.3g}",
        bool(abs(quarters[1] / quarters[0] - 1) <= 0.05),
    )
    if bench.ends_at([premise], control):
        return [premise]
    slow, fast = bench.run(levels, len(SEEDS))
    early = interval_of_pairs(
        *([one.error_at(0.02 * seconds) for one in way] for way in (slow, fast))
    )
    late = interval_of_pairs(*([_mean_error(one, 0.9, 1) for one in way] for way in (fast, slow)))
    published = "async is best early, sync at the end"
    return [
        premise,
        *(speeds(cluster, bench.pick(10_000, 50_000)) if bench.measures else []),
        Check("after 100 s: error of sync less async > 0", published, str(early), positive(early)),
        Check(
            "in the last tenth: error of async less sync > 0",
            published,
            f"{late}; the mean curves cross {_crossing(slow, fast, seconds)}",
            positive(late),
        ),
    ]


def _mean_error(result: TrialResult, begin: float, end: float) -> float:
    """The mean error of the looks in a part of the run."""
    last = result.curve[-1].seconds
    errors = [point.error for point in result.curve if begin <= point.seconds / last <= end]
    return float(np.mean(errors or [result.error]))


def _crossing(slow: Sequence[TrialResult], fast: Sequence[TrialResult], seconds: float) -> str:
    """When the mean error of the slow way is first below that of the fast way for good."""
    at = np.linspace(0.02, 0.98, 97) * seconds
    ahead = [
        np.mean([one.error_at(t) for one in slow]) < np.mean([one.error_at(t) for one in fast])
        for t in at
    ]
    behind = np.flatnonzero(~np.array(ahead))
    if not ahead[-1]:
        return "not at all"
    return f"after {at[behind[-1] + 1] if len(behind) else at[0]:.0f} s"


# --- 12.2 and 12.3 --------------------------------------------------------------------------------

_USUAL = {
    "sgd": ("sgd", 0.01),
    "momentum": ("momentum:momentum=0.9", 0.01),
    "adam": ("adam", 0.001),
    "rmsprop": ("rmsprop:decay_rate=0.9", 0.001),
    "adagrad": ("adagrad", 0.01),
}
"""Rules and their usual rates; the rate of RMSProp is that of Keras, not checked in the paper."""


def delays(bench: Bench, control: bool) -> list[Check]:
    """One worker in batches of 32, weights 0 to s updates old, at usual rates that are not tuned.

    Depths 1, 2, 4 and 6 with SGD, five rules with 2 layers; s 0, 4, 8, 16 and 32; up to 40,000
    updates to an error of 8 %, ten seeds. Premises, on the tuning seeds: T(0) is at least 500
    updates of each, and no run at s = 8 is censored. The control has no delays. Accept by the slope
    of log T(s)/T(0) in s, with missed and diverged runs infinite: 6 layers are steeper than 1;
    Adam, momentum and RMSProp each steeper than SGD and Adagrad.
    """
    return _judge_delays(bench, control, 8.0)


def longer_delays(bench: Bench, control: bool) -> list[Check]:
    """The second set-up, to an error of 5 %, so that no T(0) is below 500; seeds from 2000.

    At 8 % the rules with a rate for each weight are done after 300 updates, ten times the largest
    delay. Premises and rules are as in the second registration.
    """
    return _judge_delays(bench, control, 5.0)


def _judge_delays(bench: Bench, control: bool, target: float) -> list[Check]:
    """Judge delays by the updates to an error of `target` percent."""
    known, depths = [0, 4, 8, 16, 32], [1, 2, 4, 6]
    kinds = list(
        dict.fromkeys([*((depth, "sgd") for depth in depths), *((2, rule) for rule in _USUAL)])
    )
    levels = [
        Trial(
            workload=f"deep:{depth}",
            batch=32,
            strategy="asp:scale=1",
            rule=_USUAL[name][0],
            rate=_USUAL[name][1],
            gradients=40_000,
            look_every=50,
            until_error=target,
            cluster=ClusterModel(
                workers=1, times=StepTimes(law=Law.FIXED), delays=0 if control else s
            ),
        )
        for depth, name in kinds
        for s in known
    ]
    size = len(known)
    probed = [
        times_to(results, target, updates=True)
        for results in bench.probe([*levels[::size], *levels[2::size]])
    ]
    least = min(min(times.values) for times in probed[: len(kinds)])
    missed = sum(times.misses for times in probed[len(kinds) :])
    premises = [
        state_premise("T(0) is at least 500 updates", f"{least:.0f} or more", least >= 500),
        state_premise("no run at s = 8 is censored", f"{missed} are", missed == 0),
    ]
    if bench.ends_at(premises, control):
        return premises
    times = [times_to(results, target, updates=True) for results in bench.run(levels, len(SEEDS))]
    by_kind = {
        kind: DelayTimes(known, times[at * size : (at + 1) * size]) for at, kind in enumerate(kinds)
    }
    return [*premises, judge_depths(by_kind, depths), judge_rules(by_kind)]
