"""Shape 8: asynchrony acts as momentum (Mitliagkas et al. 2016)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from deploy.experiments.cluster import ClusterModel, Law, StepTimes
from deploy.experiments.shapes.base import (
    Bench,
    Check,
    Shape,
    errors,
    judge_probability,
    judge_rule,
    list_figures,
)
from deploy.experiments.statistics import draw_medians
from deploy.experiments.training_simulation import TrainingSimulation
from deploy.experiments.trials import Trial
from deploy.experiments.workloads import Quad

EXPONENTIAL = StepTimes(mean_s=1.0, law=Law.EXPONENTIAL)
_RATE = 0.2
_UPDATES = 60
_WEIGHTS = 64


def judge(bench: Bench, control: bool) -> list[Check]:
    """Exponential step times; the control trains in synchronous rounds.

    The explicit momentum is sought in batches of 64: with batches of 4 the noise of the gradients
    limits the rate, and momentum with a smaller rate is nearly the same course.

    Accept: on quad the implicit momentum, fitted to the mean course of many runs, is 1 - 1/W within
    .03; on mlp the explicit momentum of least error, rates tuned for each, never rises with W
    (bootstrap probability of .95).
    """
    strategy = "bsp" if control else "asp:scale=1"
    measured = [measure_implicit(bench, strategy)] if bench.measures else []
    return [*measured, _explicit(bench, strategy)]


def measure_implicit(bench: Bench, strategy: str) -> Check:
    """The check of the implicit momentum, on quad."""
    known = [2, 4, 8, 16]
    runs = bench.pick(200, 600)
    momenta = [fit_momentum(strategy, workers, runs) for workers in known]
    expected = [1 - 1 / workers for workers in known]
    off = max(abs(is_ - was) for is_, was in zip(momenta, expected, strict=True))
    return Check(
        "quad: implicit momentum 1 - 1/W",
        list_figures(known, expected, ".3f"),
        f"{list_figures(known, momenta, '.3f')}; at most {off:.3f} off",
        judge_rule(off <= 0.03),
    )


def fit_momentum(strategy: str, workers: int, runs: int) -> float:
    """The momentum of the mean course: v' = momentum * v - rate * slope, by least squares.

    In expectation over step times the course of a quadratic problem follows this exactly. Each
    weight has a coefficient of the slope of its own. One half of the runs is fitted against the
    other: the noise that is left in one mean would weaken a fit against itself. One worker has no
    momentum to fit, because its moves are the slope alone.
    """
    problem = Quad()
    courses = np.array([_course(problem, strategy, workers, seed) for seed in range(runs)])
    first, second = (_Moves.of(courses[half::2].mean(0)) for half in (0, 1))
    square = (first.at * second.at).sum(0)
    # Project the slope's part out of the former moves, weight by weight, and fit what is left.
    first_moves = first.former - (second.at * first.former).sum(0) / square * first.at
    second_moves = second.former - (first.at * second.former).sum(0) / square * second.at
    fitted = (first_moves * second.later).sum() + (second_moves * first.later).sum()
    return float(fitted / (2 * (first_moves * second_moves).sum()))


class _Moves(NamedTuple):
    """A course's moves, each with the one before it and the weights between the two."""

    former: NDArray[np.float64]
    later: NDArray[np.float64]
    at: NDArray[np.float64]

    @classmethod
    def of(cls, course: NDArray[np.float64]) -> "_Moves":
        moves = np.diff(course, axis=0)
        return cls(moves[:-1], moves[1:], course[1:-1])


def _course(problem: Quad, strategy: str, workers: int, seed: int) -> NDArray[np.float64]:
    """The weights after each update, an array of shape (updates + 1, 64)."""
    cluster = ClusterModel(workers=workers, times=EXPONENTIAL)
    trial = Trial(workload="quad", strategy=strategy, rate=_RATE, seed=seed, cluster=cluster)
    simulation = TrainingSimulation(trial.job(), problem)
    course = [simulation.weights()[:_WEIGHTS].astype(np.float64)]
    while len(course) <= _UPDATES:
        before = simulation.shards[0].version
        simulation.advance(simulation.gradients + 1)
        if simulation.shards[0].version > before:
            course.append(simulation.weights()[:_WEIGHTS].astype(np.float64))
    return np.array(course)


def tune_momenta(
    bench: Bench, strategy: str, known: Sequence[int], momenta: Sequence[float]
) -> list[Trial]:
    """A trial on `mlp` for each number of workers and each explicit momentum, at its best rate."""
    trials = [
        Trial(
            strategy=strategy,
            rule=f"momentum:momentum={momentum}",
            batch=64,
            gradients=bench.pick(3000, 15_000),
            cluster=ClusterModel(workers=workers, times=EXPONENTIAL),
        )
        for workers in known
        for momentum in momenta
    ]
    rates = bench.tune(trials)
    return [
        structs.replace(trial, rate=rate.best) for trial, rate in zip(trials, rates, strict=True)
    ]


def _explicit(bench: Bench, strategy: str) -> Check:
    known, levels = bench.pick([1, 4, 16], [1, 2, 4, 8, 16]), [0.0, 0.3, 0.6, 0.9]
    tuned = tune_momenta(bench, strategy, known, levels)
    by_level = [errors(level) for level in bench.run(tuned, 10)]
    medians = np.median(by_level, 1).reshape(len(known), -1)
    best = [levels[index] for index in medians.argmin(1)]
    drawn = draw_medians(by_level).reshape(len(known), len(levels), -1).argmin(1)
    share = float((np.diff(drawn, axis=0) <= 0).all(0).mean())
    return Check(
        "mlp: the best explicit momentum never rises with W",
        "falls as W grows",
        f"by W: {list_figures(known, best, '.1f')}; bootstrap probability {share:.2f}",
        judge_probability(share),
    )


SHAPE = Shape(
    8,
    "asynchrony acts as momentum 1 - 1/W",
    "Mitliagkas et al. 2016, arXiv 1605.09774",
    judge,
)
