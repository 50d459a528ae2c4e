"""`downpour simulate`: plays seeds or a scenario, prints the outcome and reduces a failure."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from deploy.simulation import runner, scenarios
from deploy.simulation.fault_generator import swarm
from deploy.simulation.runner import BatchTally
from deploy.simulation.scenarios import Scenario
from deploy.simulation.shrink import shrink
from deploy.simulation.simulation import SimulationOutcome, play
from deploy.simulation_kinds import ClusterConfig, Profile

PrintLine = Callable[[str], None]

_STORY = "Found by `{command} --seed {seed}`: {violation}"


class SimulateOptions(NamedTuple):
    """The options of the command; None for `profile` or `cluster`: drawn by each seed."""

    seed: int
    seeds: int
    profile: Profile | None
    cluster: ClusterConfig | None
    scenario: Path | None
    out: Path
    events: bool


def simulate(options: SimulateOptions, print_line: PrintLine) -> bool:
    """Run what the options ask for, printing with `print_line`; True if no promise was broken."""
    if options.scenario is not None:
        outcome = play(scenarios.load(options.scenario))
        report(outcome, print_line, events=options.events)
        return not outcome.violation
    if options.seeds == 1:
        return _one(
            swarm(options.seed, options.profile or Profile.WITHIN, options.cluster),
            options,
            print_line,
        )
    return _many(options, print_line)


def _one(scenario: Scenario, options: SimulateOptions, print_line: PrintLine) -> bool:
    outcome = play(scenario)
    report(outcome, print_line, events=options.events)
    if outcome.violation:
        reduce(scenario, options.out, print_line)
    return not outcome.violation


def _many(options: SimulateOptions, print_line: PrintLine) -> bool:
    began = time.monotonic()
    tallies: list[BatchTally] = []
    work = runner.batches(options.seed, options.seeds, options.profile, options.cluster)
    for tally in runner.run(work):
        tallies.append(tally)
        for seed, profile, violation in tally.violations:
            print_line(f"seed {seed} ({profile}): {violation}")
    whole = runner.together(tallies)
    seconds = time.monotonic() - began
    print_line(
        f"{whole.runs} seeds, {len(whole.violations)} violations:"
        f" {whole.cluster_s:.0f} s of cluster in {seconds:.0f} s and {whole.cpu_s:.0f} CPU seconds,"
        f" {whole.runs / whole.cpu_s:.0f} seeds a CPU second"
    )
    if whole.violations:
        seed, profile, _ = whole.violations[0]
        _one(swarm(seed, profile, options.cluster), options, print_line)
    return not whole.violations


def report(outcome: SimulationOutcome, print_line: PrintLine, *, events: bool) -> None:
    """Print how a run ended, with `events` after everything that happened in it."""
    if events:
        for line in outcome.noted:
            print_line(line)
    scenario, counted = outcome.scenario, outcome.counted
    setting = scenario.setting
    print_line(
        f"seed {scenario.seed} ({scenario.profile}): {setting.cluster}, {setting.shards} shards,"
        f" {setting.workers} workers, {len(scenario.faults)} faults: {outcome.seconds:.1f} s,"
        f" {counted.delivered} messages delivered, {counted.lost} lost, {counted.doubled} doubled,"
        f" {counted.mangled} mangled, {counted.deaths} copies died"
    )
    print_line(f"violation: {outcome.violation}" if outcome.violation else "every promise was kept")


def reduce(scenario: Scenario, out: Path, print_line: PrintLine, mutant: str = "") -> None:
    """Shrink a failing run and write it to the scenario file `out`.

    `mutant` is the name of the planted mutant, if one is planted.
    """
    small = shrink(scenario, lambda smaller: bool(play(smaller).violation))
    command = f"python -m tests.mutants {mutant}" if mutant else "downpour simulate"
    story = _STORY.format(command=command, seed=scenario.seed, violation=play(small).violation)
    out.write_text(
        scenarios.format_scenario(msgspec.structs.replace(small, story=story, mutant=mutant))
    )
    print_line(f"shrunk to {len(small.faults)} faults: {out}")
