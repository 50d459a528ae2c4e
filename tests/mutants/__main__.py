"""Detects mutants by simulation.

    python -m tests.mutants                      list all mutants: cluster, promise, name
    python -m tests.mutants --all                look for every one; status 1 if one is not detected
    python -m tests.mutants NAME [--events]      show the run that detects it
    python -m tests.mutants --scenario FILE      play a scenario with its mutant planted

A run that detects a mutant breaks a promise. With --out FILE, the first such run is reduced and
written to a scenario file.
"""

import argparse
import sys
from pathlib import Path

from deploy.cli.simulation_play import reduce, report
from deploy.simulation import scenarios
from deploy.simulation.simulation import SimulationOutcome, play
from tests.mutants.catalogue import MUTANTS, SEEDS, caught, planted


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", choices=MUTANTS, metavar="NAME")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--scenario", type=Path, metavar="FILE")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--events", action="store_true", help="print every event with its time")
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.all:
        return 1 if _missed(options.seeds) else 0
    if options.scenario is not None:
        scenario = scenarios.load(options.scenario)
        with planted(scenario.mutant):
            outcome: SimulationOutcome | None = play(scenario)
    elif options.name is not None:
        outcome = caught(options.name, options.seeds)
    else:
        for name, mutant in MUTANTS.items():
            print(f"{mutant.cluster:10}  {mutant.promise.name:12}  {name}")
        return 0
    if outcome is None or not outcome.violation:
        print("no run broke a promise")
        return 1
    report(outcome, print, events=options.events)
    if options.out is not None:
        name = options.name or outcome.scenario.mutant
        with planted(name):
            reduce(outcome.scenario, options.out, print, name)
    return 0


def _missed(seeds: int) -> list[str]:
    """Look for every mutant; returns those that no run detects."""
    missed = []
    for name in MUTANTS:
        outcome = caught(name, seeds)
        missed += [] if outcome else [name]
        print(f"{name}: {outcome.violation[:100] if outcome else 'NOT DETECTED'}")
    print(f"{len(MUTANTS)} mutants, {len(missed)} not detected")
    return missed


if __name__ == "__main__":
    sys.exit(main())
