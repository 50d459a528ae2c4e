"""Shape 18: asynchronous deltas corrected by the momentum, on data that differ between learners."""

import numpy as np
from msgspec import structs

from deploy.experiments.cluster import ClusterModel, StepTimes
from deploy.experiments.shapes.base import Bench, Check, Shape, ShapeVerdict
from deploy.experiments.trials import Trial, TrialResult

FIRST_SEED = 1000
_SLOW = {"worker-0": 15.0, "worker-1": 15.0, "worker-2": 2.5}  # speeds 1:1:6:15:15
_SLOWEST = 15.0
_LOOKS = 60  # in the time that is compared


def judge(bench: Bench, control: bool) -> list[Check]:
    """MNIST with two digits for each of five learners, speeds 1:1:6:15:15, windows of 20 steps.

    The steps are AdamW's. HeLoCo applies each delta when it comes; DiLoCo waits for the slowest in
    each round. Rates are tuned for both on images held out of the training data, each for the
    gradients that it computes in the same time, `seconds` of the virtual clock. The control runs
    DiLoCo twice. Accept: at the end of that time HeLoCo's loss is the lower one in at least 9 of 10
    pairs of seeds from 1000; it is not reproduced if it is in at most 1 of 10. A run that diverged
    has an infinite loss.
    """
    mean_s, seconds = 0.05, bench.pick(100.0, 400.0)
    cluster = ClusterModel(workers=5, times=StepTimes(mean_s=mean_s, cv=0.1), stragglers=_SLOW)
    steps = sum(1 / _SLOW.get(f"worker-{number}", 1.0) for number in range(5)) / mean_s
    base = Trial(workload="mlp:digits", batch=16, cluster=cluster)
    # A few gradients more than fit, so that each run reaches the time that is compared.
    rounds = round(1.05 * seconds * 5 / (_SLOWEST * mean_s))
    turns = round(1.02 * seconds * steps)
    late = _level(base, "diloco:h=20", rounds)
    free = late if control else _level(base, "heloco:h=20", turns)
    rates = bench.tune([late, free])
    trials = [
        structs.replace(level, rate=rate.best)
        for level, rate in zip((late, free), rates, strict=True)
    ]
    sync, heloco = bench.run(trials, 10, first=FIRST_SEED)
    pairs = [
        (_loss_at(a, seconds), _loss_at(b, seconds)) for a, b in zip(heloco, sync, strict=True)
    ]
    ahead, medians = sum(a < b for a, b in pairs), np.median(np.array(pairs), 0)
    few = len(pairs) // 10
    verdict = ShapeVerdict.INCONCLUSIVE
    if ahead >= len(pairs) - few:
        verdict = ShapeVerdict.REPRODUCED
    elif ahead <= few:
        verdict = ShapeVerdict.NOT_REPRODUCED
    return [
        Check(
            "HeLoCo is ahead of synchronous training at equal time",
            "22.1 % better under severe heterogeneity",
            f"ahead in {ahead} of {len(pairs)} after {seconds:.0f} s; median loss"
            f" {medians[0]:.3g} for {medians[1]:.3g}",
            verdict,
        )
    ]


def _level(base: Trial, strategy: str, gradients: int) -> Trial:
    looks = max(1, gradients // _LOOKS)
    return structs.replace(base, strategy=strategy, gradients=gradients, look_every=looks)


def _loss_at(result: TrialResult, seconds: float) -> float:
    """The loss at the last measurement up to this time; infinite for a run that diverged."""
    if result.diverged_at is not None:
        return float("inf")
    return [point.loss for point in result.curve if point.seconds <= seconds][-1]


SHAPE = Shape(
    18,
    "corrected deltas are ahead where data and speeds differ",
    "HeLoCo, arXiv 2606.00271",
    judge,
)
