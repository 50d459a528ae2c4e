"""What the simulator predicts of real runs that it has not seen, for six shapes.

    python -m tests.bench.bench_prediction [--seeds 3]

For each shape, four asynchronous workers run for real on a link of 10 ms, and `exp fit` fits step
times and round trips to their records. With these the simulator predicts the shape's own strategy
with six workers on a link of 20 ms, which then run for real. Rates are such that the runs do not
oscillate. Staleness, throughput and waits are those of the records. Errors on the way are those of
the run's replay, which has the same weights bit for bit. The target is 1.5 times the error that the
prediction ends with, and updates to it are those of the mean curve over the seeds.
"""

import argparse
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from msgspec import structs
from threadpoolctl import threadpool_limits

from deploy.experiments.agreement import Agreement, agreement
from deploy.experiments.calibration import ClusterFit, fit_rows
from deploy.experiments.cluster import ClusterModel, StepTimes
from deploy.experiments.real_runs import measure_course, run_real
from deploy.experiments.shapes.real_trials import LINK_MS, REAL_TRIALS
from deploy.experiments.training_simulation import TrainingSimulation
from deploy.experiments.trials import Trial
from deploy.experiments.workloads import workload_of
from tests.bench.report import Goal, goals, save

FITTED_LINK_MS = 10.0
LOOKS = 40
TARGET = 1.5
FITTED_STEPS = 100
COLUMNS = ("time", "steps", "wall_age_s", "wait_s", "rtt_s", "bytes", "dropped")
CASES = {number: REAL_TRIALS[number] for number in (1, 2, 3, 4, 7, 11)}
"""A run for each shape that the design asks it of, by the shape's number."""


Point = tuple[float, float]


class Prediction(NamedTuple):
    """A prediction against its real run: measurements as (updates, error in percent), and the
    error of the real run's own weights."""

    records: Agreement
    real: list[Point]
    simulated: list[Point]
    real_error: float
    overruns: float


def fitted(case: Trial, seed: int) -> ClusterFit:
    """The fit to four asynchronous workers that train the same problem."""
    cluster = structs.replace(case.cluster, workers=4, link=f"rtt={FITTED_LINK_MS:g}ms")
    first = structs.replace(
        case, strategy="asp", staleness=None, cluster=cluster, seed=seed, gradients=4 * FITTED_STEPS
    )
    return fit_real_run(first)


def fit_real_run(trial: Trial) -> ClusterFit:
    """Run a trial for real, and fit step times and links to its records."""
    rows = run_real(trial, workload_of(trial.workload, trial.batch, trial.tested)).records
    columns = {name: rows[name].astype(np.float64) for name in COLUMNS}
    names = np.array([name.decode() for name in rows["worker"]])
    return fit_rows("the first run", names, columns | {"shard": np.zeros(len(rows))})


def predicted_cluster(case: Trial, fit: ClusterFit) -> ClusterModel:
    """The case's workers and link, with the fit's step times and what it adds to a round trip."""
    extra_ms = float(fit.link.removeprefix("rtt=").removesuffix("ms")) - FITTED_LINK_MS
    times = StepTimes(mean_s=fit.mean_s, cv=fit.cv)
    return structs.replace(case.cluster, times=times, link=f"rtt={LINK_MS + extra_ms:.4g}ms")


def predict(case: Trial, fit: ClusterFit, seed: int) -> Prediction:
    """Predict a run, then run it for real."""
    one = structs.replace(case, seed=seed)
    workload = workload_of(one.workload, one.batch, one.tested)
    guess = structs.replace(one, cluster=predicted_cluster(one, fit)).job()
    pushes = one.gradients // guess.strategy.push_period
    every = max(1, pushes // LOOKS)
    course = TrainingSimulation(guess, workload).run(
        one.gradients, look_every=every * guess.strategy.push_period
    )
    real = run_real(one, workload)
    looks = measure_course(real, workload, every)
    return Prediction(
        agreement(real.records, course.records),
        [(one.updates, one.error) for one in looks],
        [(one.updates, one.error) for one in course.curve],
        workload.measure(real.weights).error,
        real.overruns,
    )


def mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean over seeds of curves that are measured about as often."""
    return [tuple(np.mean(points, 0)) for points in zip(*curves, strict=False)]


def updates_to(target: float, curve: Sequence[Point]) -> float:
    """The updates to an error, between two measurements in proportion."""
    for (former, above), (later, below) in pairwise(curve):
        if below <= target:
            return former + (above - target) / max(1e-9, above - below) * (later - former)
    return math.inf


def means(found: Sequence[Prediction]) -> dict[str, float]:
    """A case's figures over its seeds: means of differences, and the largest share of overruns."""
    real, simulated = (
        mean_curve([getattr(one, name) for one in found]) for name in ("real", "simulated")
    )
    target = TARGET * simulated[-1][1]
    records = np.mean([one.records for one in found], 0)
    real_error = float(np.mean([one.real_error for one in found]))
    return dict(zip(Agreement._fields, records.tolist(), strict=True)) | {
        "updates": updates_to(target, simulated) / updates_to(target, real) - 1,
        "error": float(np.mean([one.simulated[-1][1] for one in found])) - real_error,
        "real_error": real_error,
        "overruns": max(one.overruns for one in found),
    }


GOALS = {
    "distance": ("staleness, KS", 0.05),
    "wasserstein": ("staleness, Wasserstein", 0.25),
    "throughput": ("throughput", 0.05),
    "wait_share": ("wait share", 0.05),
    "updates": ("updates to the target", 0.1),
    "error": ("error, points", 0.5),
}
"""What each figure is called, and what its size is to be at most."""


def main() -> None:
    """Predict, run, and print a row for each figure: how many cases keep the goal."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    with threadpool_limits(1):
        for number, case in CASES.items():
            fit = fitted(case, 100)
            figures[f"shape {number}"] = means([predict(case, fit, k) for k in range(given.seeds)])
            row = ", ".join(f"{k} {v:.3f}" for k, v in figures[f"shape {number}"].items())
            print(f"shape {number}, {case.strategy}: {row}", flush=True)
    save("prediction", figures)
    goals(
        Goal(
            f"{name} within {limit:g}, of {len(CASES)}",
            sum(bool(abs(case[key]) <= limit) for case in figures.values()),
            len(CASES),
            at_least=True,
        )
        for key, (name, limit) in GOALS.items()
    )


if __name__ == "__main__":
    main()
