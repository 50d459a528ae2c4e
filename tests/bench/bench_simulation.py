"""How many seeds of simulated clusters a CPU second plays, and what they find.

    python tests/bench/bench_simulation.py [--seeds 5000]

On all cores, as CI does. The ratio to real time is of virtual seconds of cluster to CPU seconds;
every mutant is looked for, too.
"""

import argparse
import os
import time

from deploy.simulation import runner
from tests.bench.report import Goal, goals, save
from tests.mutants.catalogue import MUTANTS, caught

IN_CI = 5000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=IN_CI)
    seeds = parser.parse_args().seeds

    began = time.monotonic()
    whole = runner.together(list(runner.run(runner.batches(0, seeds))))
    wall_s = time.monotonic() - began
    for seed, profile, violation in whole.violations:
        print(f"seed {seed} ({profile}): {violation}")

    began_cpu = time.process_time()
    missed = [name for name in MUTANTS if caught(name) is None]
    mutants_s = time.process_time() - began_cpu

    figures = {
        "seeds": whole.runs,
        "cores": os.cpu_count() or 1,
        "wall_s": wall_s,
        "cpu_s": whole.cpu_s,
        "seeds_a_cpu_s": whole.runs / whole.cpu_s,
        "cluster_s": whole.cluster_s,
        "times_real_time": whole.cluster_s / whole.cpu_s,
        "violations": len(whole.violations),
        "mutants": len(MUTANTS),
        "mutants_missed": len(missed),
        "mutants_cpu_s": mutants_s,
    }
    print("\n".join(f"{name:20} {value:.6g}" for name, value in figures.items()))
    save("simulation", figures)
    goals(
        [
            Goal("seeds played", whole.runs, IN_CI, "", at_least=True),
            Goal("wall time of 5,000 seeds", wall_s * IN_CI / whole.runs, 480, "s"),
            Goal("seeds a CPU second", figures["seeds_a_cpu_s"], 20, "/s", at_least=True),
            Goal("times real time", figures["times_real_time"], 100, "x", at_least=True),
            Goal("violations", len(whole.violations), 0),
            Goal("mutants not detected", len(missed), 0),
        ]
    )


if __name__ == "__main__":
    main()
