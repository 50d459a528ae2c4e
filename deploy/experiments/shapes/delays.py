"""Shape 12: delays cost deep networks and adaptive rules most (Dai et al. 2018)."""

import numpy as np
from msgspec import structs

from deploy.experiments.cluster import ClusterModel, Law, StepTimes
from deploy.experiments.shapes.base import Bench, Check, Shape, list_figures, positive, times_to
from deploy.experiments.statistics import mean_interval
from deploy.experiments.trials import Trial, TrialResult

_TARGET = 8.0  # the error in percent; the paper's is an accuracy of 92 % on MNIST
_SENSITIVE = {
    "adam": "adam",
    "momentum": "momentum:momentum=0.9",
    "rmsprop": "rmsprop:decay_rate=0.9",
}
_ROBUST = {"sgd": "sgd", "adagrad": "adagrad"}
_RULES = {**_SENSITIVE, **_ROBUST}


def judge(bench: Bench, control: bool) -> list[Check]:
    """One worker in batches of 32, with weights that are 0 to s updates old; s from 0 to 32.

    As in the paper, a rule and depth have one rate for all s, tuned at s = 0. The control has no
    delays. T(s) are the updates to an error of 8 %, at the run's end where it is missed. Accept,
    where the steepness of a level is the slope of T(s)/T(0) in s: SGD with 6 hidden layers is
    steeper than with 1; with 2 hidden layers each of Adam, momentum and RMSProp is steeper than
    both of SGD and Adagrad; all by the paired interval.
    """
    known = bench.pick([0, 8, 32], [0, 4, 8, 16, 32])
    depths = bench.pick([1, 6], [1, 2, 4, 6])
    kinds = [(depth, "sgd") for depth in depths] + [(2, name) for name in _RULES]
    kinds = list(dict.fromkeys(kinds))
    gradients = bench.pick(6000, 15_000)
    base = [
        Trial(
            workload=f"deep:{depth}",
            batch=32,
            strategy="asp:scale=1",
            rule=_RULES[name],
            gradients=gradients // 4,
            tested=bench.pick(2000, 10_000),
            cluster=ClusterModel(workers=1, times=StepTimes(law=Law.FIXED)),
        )
        for depth, name in kinds
    ]
    rates = bench.tune(base)
    levels = [
        structs.replace(
            trial,
            rate=rate.best,
            gradients=gradients,
            look_every=20,
            until_error=_TARGET,
            cluster=structs.replace(trial.cluster, delays=0 if control else delays),
        )
        for trial, rate in zip(base, rates, strict=True)
        for delays in known
    ]
    results = bench.run(levels, bench.pick(5, 10))
    by_kind = {
        kind: results[index * len(known) : (index + 1) * len(known)]
        for index, kind in enumerate(kinds)
    }
    steep = {kind: _steepness(known, results, gradients) for kind, results in by_kind.items()}
    return [_depths(depths, steep), _rules(steep)]


def _steepness(known: list[int], results: list[list[TrialResult]], end: float) -> list[float]:
    """The slope of T(s)/T(0) in s, for each seed."""
    updates = np.minimum(
        [times_to(results, _TARGET, updates=True).values for results in results], end
    )
    at = np.array(known, np.float64) - np.mean(known)
    slopes: list[float] = (at @ (updates / updates[0]) / (at @ at)).tolist()
    return slopes


def _depths(depths: list[int], steep: dict[tuple[int, str], list[float]]) -> Check:
    means = [float(np.mean(steep[depth, "sgd"])) for depth in depths]
    apart = mean_interval(np.subtract(steep[depths[-1], "sgd"], steep[depths[0], "sgd"]))
    return Check(
        "SGD: 6 hidden layers are steeper than 1",
        "deeper networks suffer more",
        f"slope of T(s)/T(0) by layers {list_figures(depths, means)}; difference {apart}",
        positive(apart),
    )


def _rules(steep: dict[tuple[int, str], list[float]]) -> Check:
    """Judged by the least of the six paired differences."""
    means = [float(np.mean(steep[2, name])) for name in _RULES]
    pairs = [
        mean_interval(np.subtract(steep[2, sensitive], steep[2, robust]))
        for sensitive in _SENSITIVE
        for robust in _ROBUST
    ]
    least = min(pairs, key=lambda pair: pair.low)
    return Check(
        "2 layers: Adam, momentum and RMSProp are steeper than SGD and Adagrad",
        "SGD and Adagrad are robust",
        f"slope of T(s)/T(0) {list_figures(_RULES, means)}; least difference {least}",
        positive(least),
    )


SHAPE = Shape(
    12,
    "delays cost deep networks and adaptive rules most",
    "Dai et al. 2019, arXiv 1810.03264",
    judge,
)
