"""Shapes 15 and 16: the exchange of fragments behind the training, and without slow learners."""

import math
from collections.abc import Sequence

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from deploy.experiments.cluster import ClusterModel, StepTimes
from deploy.experiments.shapes.base import (
    Bench,
    Check,
    Origin,
    Shape,
    ShapeVerdict,
    at_most,
    list_figures,
)
from deploy.experiments.statistics import Interval, mean_interval
from deploy.experiments.trials import Trial, TrialResult

FIRST_SEED = 1000
OVERLAPS = (1, 2, 3, 4)
_LINK = "rtt=100ms,rate=10Mbit"
_WINDOW = 24
_COST = 0.01  # of the loss
_SLOW = {"worker-0": 6.0, "worker-1": 3.0}  # speeds 1:2:6
_SPEEDS = "worker-0/1+worker-1/2+worker-2/6"

_MODEL = Trial(workload="charlm", batch=32, tested=4000, fragments=3)


def judge_overlap(bench: Bench, control: bool) -> list[Check]:
    """A character model in three fragments, four even learners on a slow link, H 24, AdamW.

    Each level computes the same number of gradients. Without overlap (T 0) a learner waits for each
    answer and takes it over; with T from 1 to 4 it mixes it in half (alpha .5, as published). Rates
    are tuned on held-out text, one for T 0 and one, at T 2, for the others. The control never mixes
    in what comes (alpha 1), so that no learner hears of another. Accept: the loss at each T is at
    most 1 % above that at T 0 (the interval's upper end, paired seeds from 1000; a run that
    diverged costs infinitely much).
    """
    alpha = 1 if control else 0.5
    texts = {0: f"streaming_diloco:h={_WINDOW},overlap=0,alpha=0"} | {
        overlap: f"streaming_diloco:h={_WINDOW},overlap={overlap},alpha={alpha}"
        for overlap in OVERLAPS
    }
    cluster = ClusterModel(workers=4, times=StepTimes(mean_s=0.1, cv=0.1), link=_LINK)
    base = structs.replace(_MODEL, cluster=cluster, gradients=bench.pick(3000, 40_000))
    levels = {t: structs.replace(base, strategy=text) for t, text in texts.items()}
    rates = bench.tune([levels[0], levels[2]])
    trials = [structs.replace(level, rate=rates[min(t, 1)].best) for t, level in levels.items()]
    by_level = dict(
        zip(levels, bench.run(trials, bench.pick(5, 10), first=FIRST_SEED), strict=True)
    )
    without = _losses(by_level[0])
    seconds = [_mean_seconds(results) for results in by_level.values()]
    times = f"virtual seconds {list_figures(levels, seconds, '.0f')}"
    return [
        _judge_cost(f"an overlap of {t}", _losses(by_level[t]) / without, f"; {times}" * (t == 1))
        for t in OVERLAPS
    ]


def judge_quorum(bench: Bench, control: bool) -> list[Check]:
    """A character model in three fragments, three learners at speeds 1:2:6 on a slow link, AdamW.

    Decoupled: K 1, grace .5, T 2, H 24 steps of the fastest and as many as fit into its time of the
    others. Synchronous: the same, with all reports in each merge, and H 24 for all. Each level
    computes the same number of gradients; rates are tuned for both on held-out text. The control
    is synchronous twice. Accept: the decoupled loss is at most 1 % above the synchronous one (the
    interval's upper end, paired seeds from 1000; a run that diverged costs infinitely much), and
    its time less than the synchronous time (interval below 1). Own: its time is at most 1.1 times
    that of learners that never wait.
    """
    late = f"streaming_diloco:h={_WINDOW},overlap=2"
    free = f"decoupled_diloco:h={_WINDOW},overlap=2,k=1,grace=0.5,speeds={_SPEEDS}"
    times = StepTimes(mean_s=0.1, cv=0.1)
    cluster = ClusterModel(workers=3, times=times, link=_LINK, stragglers=_SLOW)
    base = structs.replace(_MODEL, cluster=cluster, gradients=bench.pick(4000, 40_000))
    levels = [structs.replace(base, strategy=text) for text in (late, late if control else free)]
    rates = bench.tune(levels)
    trials = [
        structs.replace(level, rate=rate.best) for level, rate in zip(levels, rates, strict=True)
    ]
    sync, decoupled = bench.run(trials, bench.pick(6, 10), first=FIRST_SEED)
    faster = mean_interval(_seconds(decoupled) / _seconds(sync))
    speed = sum(1 / _SLOW.get(f"worker-{number}", 1.0) for number in range(3)) / times.mean_s
    time_ratio = mean_interval(_seconds(decoupled) * speed / base.gradients)
    late_reports = np.mean([result.dropped for result in decoupled])
    more = f"; {late_reports:.0f} reports were late"
    return [
        _judge_cost("K = 1 with grace", _losses(decoupled) / _losses(sync), more),
        Check(
            "K = 1 with grace takes less time for as many tokens",
            "no learner waits for another",
            f"{_mean_seconds(decoupled):.0f} s for {_mean_seconds(sync):.0f}, {faster} of it",
            _below(faster, 1.0),
        ),
        Check(
            "and at most 1.1 times the time without any wait",
            "1",
            f"{time_ratio}",
            at_most(time_ratio, 1.1),
            Origin.OWN,
        ),
    ]


def _losses(results: Sequence[TrialResult]) -> NDArray[np.float64]:
    """The losses at the end, infinite for a run that diverged."""
    losses = [result.curve[-1].loss for result in results]
    return np.array([loss if math.isfinite(loss) else math.inf for loss in losses])


def _seconds(results: Sequence[TrialResult]) -> NDArray[np.float64]:
    return np.array([result.curve[-1].seconds for result in results])


def _mean_seconds(results: Sequence[TrialResult]) -> float:
    return float(_seconds(results).mean())


def _judge_cost(name: str, ratios: NDArray[np.float64], more: str = "") -> Check:
    """Judge that a loss is at most 1 % above another one; an infinite one is above."""
    claim, published = f"{name} costs at most 1 % of the loss at equal tokens", "nothing measurable"
    if not np.isfinite(ratios).all():
        ended = int((~np.isfinite(ratios)).sum())
        measured = f"{ended} of {len(ratios)} runs diverged{more}"
        return Check(claim, published, measured, ShapeVerdict.NOT_REPRODUCED)
    cost = mean_interval(ratios - 1)
    measured = f"{cost.mean:+.2%} [{cost.low:+.2%}, {cost.high:+.2%}]{more}"
    return Check(claim, published, measured, at_most(cost, _COST))


def _below(interval: Interval, limit: float) -> ShapeVerdict:
    if interval.high < limit:
        return ShapeVerdict.REPRODUCED
    return ShapeVerdict.NOT_REPRODUCED if interval.low >= limit else ShapeVerdict.INCONCLUSIVE


OVERLAP = Shape(
    15,
    "exchanges behind the training cost nothing",
    "Douillard et al. 2025, arXiv 2501.18512",
    judge_overlap,
)
QUORUM = Shape(
    16,
    "learners that do not wait learn as much, sooner",
    "Decoupled DiLoCo, arXiv 2604.21428",
    judge_quorum,
)
