"""Shape 14: the length of merged reports, by their mean and by radial-directional averaging."""

from collections.abc import Iterator

import numpy as np

from deploy.experiments.cluster import ClusterModel
from deploy.experiments.images import Mlp, mnist
from deploy.experiments.problem import BLOCK, Batch
from deploy.experiments.shapes.base import (
    Bench,
    Check,
    Shape,
    ShapeVerdict,
    list_figures,
    state_premise,
)
from deploy.experiments.statistics import mean_interval, slope
from deploy.experiments.training_simulation import TrainingSimulation
from deploy.experiments.trials import Trial
from deploy.experiments.tuning import TUNING_SEEDS
from shards.aggregation import Average
from worker.strategies.base import Floats

FIRST_SEED, SEEDS = 1000, 6
SECOND_SEEDS = range(2000, 2012)
MOST_COSINE = 0.03
LEARNERS = (2, 4, 8, 16)
_MOST = max(LEARNERS)
FIRST_STEPS = 4000
_WINDOW, _BATCH, _RATE = 25, 1, 0.001
_MARGIN = 0.05


class DisjointMnist(Mlp):
    """MNIST from weights that have been trained, each of 16 learners with a part of its own."""

    def __init__(self, begin: Floats) -> None:
        super().__init__(_BATCH)
        self._begin = begin

    def start(self, seed: int) -> Floats:
        return self._begin.copy()

    def batches(self, seed: int, worker: int) -> Iterator[Batch]:
        dice = np.random.default_rng((seed, worker, 2))
        rows = np.arange(worker, len(mnist().labels), _MOST)
        while True:
            yield from rows[dice.integers(len(rows), size=(BLOCK, self.batch))]


def judge(bench: Bench, control: bool) -> list[Check]:
    """MNIST after 4,000 steps of one worker; then 25 AdamW steps of M learners with disjoint data.

    Their reports, of batches of one image, are merged once by a real shard; momentum and rate of
    the outer step are 0 and 1, so the weights move by the merged report. Lengths are relative to
    the mean length of the 16 learners' own reports, by seed (6, from 1000). The control has the
    mean in place of radial averaging. Accept: by radial averaging the length is within 5 % of that
    for each M (two one-sided tests at 5 %); by the mean it shrinks as 1/sqrt(M): the slope of its
    logarithm in that of M is within -.6 and -.4 (interval).
    """
    return _judge_lengths(bench, control, FIRST_SEED)


def judge_orthogonal(bench: Bench, control: bool) -> list[Check]:
    """The set-up of the first registration, where reports are nearly orthogonal; seeds from 2000.

    Premise, on the tuning seeds: the mean cosine of two of the 16 learners' reports is at most .03.
    With the same cosine c for all pairs the mean of M reports has the length sqrt(1/M + (1 - 1/M)
    c), and at .03 that falls with the power -.42 of M from 2 to 16, which the rule still accepts.
    Accept as in the first registration.
    """
    cosines = [measure_cosine(seed) for seed in TUNING_SEEDS] if bench.measures else [0.0]
    cosine = float(np.mean(cosines))
    premise = state_premise(
        f"reports are nearly orthogonal: their mean cosine is at most {MOST_COSINE:g}",
        f"{cosine:.3f}",
        cosine <= MOST_COSINE,
    )
    if bench.ends_at([premise], control):
        return [premise]
    return [premise, *_judge_lengths(bench, control, SECOND_SEEDS.start)]


def _judge_lengths(bench: Bench, control: bool, first: int) -> list[Check]:
    radial = Average.MEAN if control else Average.RADIAL
    seeds = range(first, first + bench.pick(SEEDS, 2 * SEEDS)) if bench.measures else ()
    by_seed = [measure_lengths(seed) for seed in seeds]
    lengths = {
        average: [[run[average, count] for run in by_seed] or [1.0] for count in LEARNERS]
        for average in Average
    }
    return [
        _judge_kept(lengths[radial]),
        _judge_shrinking(lengths[Average.MEAN]),
    ]


def measure_lengths(seed: int) -> dict[tuple[Average, int], float]:
    """The length of the merged report over the learners' mean length, by average and M."""
    begin = _train_first(seed)
    merged = {
        (average, count): _merge_once(begin, average, count, seed)
        for average in Average
        for count in LEARNERS
    }
    alone = merged[Average.MEAN, _MOST][1]
    return {key: length / alone for key, (length, _) in merged.items()}


def measure_cosine(seed: int) -> float:
    """The mean cosine of two of the 16 learners' reports, from the length of their mean.

    It counts the learners' mean length for each of theirs.
    """
    length, alone = _merge_once(_train_first(seed), Average.MEAN, _MOST, seed)
    return ((length / alone) ** 2 * _MOST - 1) / (_MOST - 1)


def _train_first(seed: int) -> Floats:
    """The weights of one worker after its first steps, of AdamW."""
    text = "diloco:h=1,outer_lr=1,momentum=0"
    trial = Trial(batch=16, rate=_RATE, strategy=text, cluster=ClusterModel(workers=1), seed=seed)
    simulation = TrainingSimulation(trial.job(), trial.problem())
    simulation.advance(FIRST_STEPS)
    return simulation.weights()


def _merge_once(begin: Floats, average: Average, count: int, seed: int) -> tuple[float, float]:
    """The length of a merge of this number of learners' reports, and the mean of theirs."""
    text = f"streaming_diloco:h={_WINDOW},overlap=1,outer_lr=1,momentum=0,average={average}"
    cluster = ClusterModel(workers=count)
    trial = Trial(batch=_BATCH, rate=_RATE, strategy=text, cluster=cluster, seed=seed)
    simulation = TrainingSimulation(trial.job(), DisjointMnist(begin))
    while not simulation.shards[0].version:
        simulation.advance(simulation.gradients + 1)
    (reports,) = (shard.metrics.since(0)[1]["gradient_norm"] for shard in simulation.shards)
    return float(np.linalg.norm(simulation.weights() - begin)), float(reports[:count].mean())


def _judge_kept(lengths: list[list[float]]) -> Check:
    """Judge that the length of the merged report does not depend on the number of learners."""
    apart = [mean_interval(np.array(runs) - 1, level=0.9) for runs in lengths]
    if all(one.low > -_MARGIN and one.high < _MARGIN for one in apart):
        verdict = ShapeVerdict.REPRODUCED
    elif any(one.high < -_MARGIN or one.low > _MARGIN for one in apart):
        verdict = ShapeVerdict.NOT_REPRODUCED
    else:
        verdict = ShapeVerdict.INCONCLUSIVE
    widest = max(apart, key=lambda one: max(-one.low, one.high))
    return Check(
        "by radial averaging the merged length stays within 5 %",
        "independent of M",
        f"by M: {_list_means(lengths)}; furthest from 1 by {widest} at 90 %",
        verdict,
    )


def _judge_shrinking(lengths: list[list[float]]) -> Check:
    """Judge that the length of the mean falls with the root of the number of learners."""
    logs = [np.log(runs).tolist() for runs in lengths]
    fall = slope(np.log(LEARNERS).tolist(), logs)
    inside = fall.low >= -0.6 and fall.high <= -0.4
    outside = fall.high < -0.6 or fall.low > -0.4
    verdict = ShapeVerdict.REPRODUCED if inside else ShapeVerdict.INCONCLUSIVE
    return Check(
        "by the mean it shrinks as 1/sqrt(M)",
        "slope -.5 of the logarithms, for near-orthogonal reports",
        f"by M: {_list_means(lengths)}; slope {fall}",
        ShapeVerdict.NOT_REPRODUCED if outside else verdict,
    )


def _list_means(lengths: list[list[float]]) -> str:
    return list_figures(LEARNERS, [float(np.mean(runs)) for runs in lengths], ".3f")


SHAPE = Shape(
    14,
    "radial averaging keeps the length of merged reports",
    "Decoupled DiLoCo, arXiv 2604.21428",
    judge,
)
