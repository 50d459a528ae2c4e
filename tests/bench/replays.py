"""Replays of long real runs: six strategies, 20,000 updates each, the weights bit for bit.

    python -m tests.bench.replays [--updates 20000]

Each run has real clients and threads and a shard on loopback; its workers train mlp in batches of 4
with steps of a millisecond. The simulator's workers then take the recorded turns and compute their
gradients again. An update is a version of the shard, so a run in rounds has four pushes for each.
The exit status is 1 if the weights of one differ.
"""

import argparse
import sys
import time

from threadpoolctl import threadpool_limits

from deploy.experiments.cluster import ClusterModel, StepTimes
from deploy.experiments.real_runs import RealRun, replay_run, run_real
from deploy.experiments.trials import Trial
from deploy.experiments.workloads import workload_of
from tests.bench.report import Goal, goals, save

WORKERS = 4

RUNS = (
    ("asp", None, "sgd"),
    ("ssp", 2, "momentum:momentum=0.9"),
    ("bsp", 0, "sgd"),
    ("easgd:tau=4", None, "sgd"),
    ("softsync:n=2", None, "adam"),
    ("dc_asgd", None, "sgd"),
)
"""Strategy, staleness bound and rule of each run."""

GRADIENTS = {"bsp": WORKERS, "easgd:tau=4": 4, "softsync:n=2": WORKERS // 2}
"""The gradients that an update takes, where it is more than one."""


def long_run(strategy: str, bound: int | None, rule: str, updates: int) -> RealRun:
    """A real run of this number of updates."""
    trial = Trial(
        strategy=strategy,
        staleness=bound,
        rule=rule,
        rate=1e-3 if rule == "adam" else 1e-2,
        gradients=updates * GRADIENTS.get(strategy, 1),
        cluster=ClusterModel(workers=WORKERS, times=StepTimes(mean_s=0.001, cv=0.3)),
    )
    return run_real(trial, workload_of(trial.workload, trial.batch, trial.tested))


def main() -> None:
    """Run and replay each, and print a row for each and one for all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, default=20_000)
    updates = parser.parse_args().updates
    workload, figures = workload_of("mlp"), {}
    with threadpool_limits(1):
        for strategy, bound, rule in RUNS:
            began = time.process_time()
            run = long_run(strategy, bound, rule, updates)
            same = replay_run(run, workload).tobytes() == run.weights.tobytes()
            figures[f"{strategy}, {rule}"] = {
                "updates": int(run.records["apply_version"].max()),
                "pushes": len(run.records),
                "staleness": float(run.records["staleness"].mean()),
                "error": workload.measure(run.weights).error,
                "same": same,
                "cpu_s": time.process_time() - began,
            }
            row = ", ".join(f"{k} {v:.4g}" for k, v in figures[f"{strategy}, {rule}"].items())
            print(f"{strategy}, {rule}: {row}", flush=True)
    save("replay", figures)
    equal = sum(bool(one["same"]) for one in figures.values())
    goals([Goal(f"replays of {updates:,} updates with the same weights", equal, 6, at_least=True)])
    sys.exit(0 if equal == len(RUNS) else 1)


if __name__ == "__main__":
    main()
