"""The experiments' own figures: simulated updates a second, the simulator's share of a gradient,
the runner's overhead, the report over 500 trials.

    python tests/bench/bench_experiments.py [--updates 1000000]

Times are of the CPU, so that another program on the machine counts little.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
from msgspec import structs
from threadpoolctl import threadpool_limits

from deploy.experiments.cluster import ClusterModel
from deploy.experiments.report import write_report
from deploy.experiments.runner import Folder, run_sweep
from deploy.experiments.sweeps import read_sweep
from deploy.experiments.timing_simulation import TimingSimulation
from deploy.experiments.trace_training import TraceTraining
from deploy.experiments.training_simulation import TrainingSimulation
from deploy.experiments.trials import Trial, run_trial
from deploy.experiments.workloads import workload_of
from tests.bench.report import Goal, goals

GRADIENTS = (("mlp", 4, 3000), ("mlp", 64, 1000), ("charlm", 32, 500), ("lenet", 64, 60))
"""The gradients that are timed: workload, batch and number."""

SWEEP = """
name = "bench"
seeds = [0, 49]
workload = "quad"
gradients = 2
strategy = "asp"
[grid]
rate = [0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.1]
"""


def updates_a_second(workers: int, updates: int) -> float:
    """Timing mode, asynchronous workers without a link."""
    job = Trial(cluster=ClusterModel(workers=workers)).job()
    began = time.process_time()
    TimingSimulation(job).run(updates)
    return updates / (time.process_time() - began)


def gradient_share(name: str, batch: int, gradients: int, traces: int = 0) -> float:
    """The bare loop of gradients over the simulator's time for as many; or over that of runs along
    this number of traces."""
    trial = Trial(rate=0.01, cluster=ClusterModel(workers=8))
    jobs = [structs.replace(trial, seed=seed).job() for seed in range(traces)]
    workload = workload_of(name, batch)
    weights, batches, out = workload.start(0), workload.batches(0, 0), workload.table.empty()
    took = []
    for _ in range(3):
        simulation = TrainingSimulation(trial.job(), workload)
        traced = TraceTraining(jobs, workload) if jobs else None
        began = time.process_time()
        for _ in range(gradients):
            workload.gradient(weights, next(batches), out)
        between = time.process_time()
        if traced is None:
            simulation.advance(gradients)
        else:
            traced.advance(gradients)
        took.append((between - began) * max(1, traces) / (time.process_time() - between))
    return float(np.median(took))


def sweep_figures(folder: Path) -> tuple[float, float]:
    """The runner's overhead a trial, and the seconds of a report over 500 trials."""
    file = folder / "sweep.toml"
    file.write_text(SWEEP)
    sweep = read_sweep(file)
    run_trial(structs.replace(sweep.trials[0], seed=99))
    began = time.process_time()
    for trial in sweep.trials[:50]:
        run_trial(trial)
    bare = (time.process_time() - began) / 50
    began = time.process_time()
    run_sweep(sweep, folder / "out", note=lambda _: None)
    overhead = (time.process_time() - began) / len(sweep.trials) - bare
    began = time.process_time()
    write_report(folder / "out", folder / "report.html")
    assert Folder(folder / "out").status(sweep).done == 500
    return overhead, time.process_time() - began


def main() -> None:
    """Measure, and print a row a goal."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, default=1_000_000)
    given = parser.parse_args()
    with threadpool_limits(1), tempfile.TemporaryDirectory() as folder:
        few = updates_a_second(30, given.updates // 4)
        many = given.updates / updates_a_second(1000, given.updates)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        shares = {one: gradient_share(*one) for one in GRADIENTS}
        traced = {count: gradient_share(*GRADIENTS[0], traces=count) for count in (1, 12)}
        overhead, report = sweep_figures(Path(folder))
    goals(
        [
            Goal("timing mode, 30 workers", few, 100_000, "updates/s", at_least=True),
            Goal(f"{given.updates:,} updates of 1,000 workers", many, 15, "s"),
            Goal("memory of that", memory, 500, "MB"),
            *(
                Goal(f"share of bare gradients, {name}, batch {batch}", 100 * share, 80, "%", True)
                for (name, batch, _), share in shares.items()
            ),
            *(
                Goal(f"the same along {count} traces, mlp, batch 4", 100 * share, 80, "%", True)
                for count, share in traced.items()
            ),
            Goal("runner's overhead a trial", overhead, 0.3, "s"),
            Goal("report over 500 trials", report, 20, "s"),
        ]
    )


if __name__ == "__main__":
    main()
