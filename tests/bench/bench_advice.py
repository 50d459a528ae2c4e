"""Compare the strategy that `downpour exp advise` names with the fastest one in real runs.

    python -m tests.bench.bench_advice [--seeds 3]

Six asynchronous workers, real clients on a link of 20 ms, run once; their records are fitted, and
the candidates are swept and ranked on the fitted cluster, as the command does it. Then every
candidate runs for real at the rate that the sweep chose, one run a seed, the candidates in turns.
Its time is the median of the seconds until the weights have the target error.
"""

import argparse
import math
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
from msgspec import structs
from threadpoolctl import threadpool_limits

from deploy.experiments.cluster import ClusterModel, StepTimes
from deploy.experiments.real_runs import measure_course, run_real
from deploy.experiments.recommendation import (
    AdviceSettings,
    Candidate,
    Recommendation,
    recommend,
)
from deploy.experiments.trials import Trial
from deploy.experiments.workloads import workload_of
from tests.bench.bench_prediction import fit_real_run
from tests.bench.report import Goal, goals, save

CASE = Trial(
    workload="mlp",
    batch=16,
    tested=2000,
    rate=0.05,
    gradients=4000,
    cluster=ClusterModel(workers=6, times=StepTimes(mean_s=0.04), link="rtt=20ms"),
)
_FITTED_GRADIENTS = 600
_LOOKS = 80
_NEAR = 1.1  # of the fastest, as the advice itself counts it


def time_candidate(candidate: Candidate, seed: int, target: float) -> float:
    """The seconds that a real run needs to an error of `target` percent; infinite without it."""
    trial = structs.replace(
        CASE,
        strategy=candidate.strategy,
        staleness=candidate.bound,
        rate=candidate.rate,
        seed=seed,
    )
    workload = workload_of(trial.workload, trial.batch, trial.tested)
    run = run_real(trial, workload)
    updates = trial.gradients // run.job.strategy.push_period
    curve = measure_course(run, workload, max(1, updates // _LOOKS))
    return next((point.seconds for point in curve if point.error <= target), math.inf)


def advise(seed: int = 100) -> Recommendation:
    """The recommendation for the cluster that one real run is fitted to."""
    first = structs.replace(CASE, gradients=_FITTED_GRADIENTS, seed=seed)
    fit = fit_real_run(first)
    print(f"# {fit.quality}\n{fit.section}", flush=True)
    settings = AdviceSettings(batch=CASE.batch, gradients=CASE.gradients)
    with tempfile.TemporaryDirectory() as folder:
        return recommend(fit.section, settings, Path(folder), note=lambda _: None)


def main() -> None:
    """Ask for advice, run every candidate, and compare the one that is advised with the fastest."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(parser.parse_args().seeds)
    with threadpool_limits(1):
        recommendation = advise()
        print(*recommendation.lines(), sep="\n", flush=True)
        times: dict[str, list[float]] = defaultdict(list)
        for seed in seeds:
            for candidate, _ in recommendation.ranked:
                seconds = time_candidate(candidate, seed, recommendation.target)
                times[candidate.name].append(seconds)
                print(f"seed {seed}, {candidate.name}: {seconds:.1f} s", flush=True)
    medians = {name: float(np.median(values)) for name, values in times.items()}
    save("advice", {name: {"seconds": seconds} for name, seconds in medians.items()})
    for name, seconds in sorted(medians.items(), key=lambda pair: pair[1]):
        print(f"{name:24}{seconds:8.1f} s")
    choice = recommendation.choice
    ratio = math.inf if choice is None else medians[choice.name] / min(medians.values())
    goals([Goal("seconds of the advised strategy, of the fastest one's", ratio, _NEAR)])


if __name__ == "__main__":
    main()
