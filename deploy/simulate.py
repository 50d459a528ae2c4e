"""`downpour simulate`: plays seeds or a scenario, prints the outcome and reduces a failure."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from deploy.simulation import runner, scenarios
from deploy.simulation.config import ClusterConfig
from deploy.simulation.fault_generator import swarm
from deploy.simulation.mutants import find, planted
from deploy.simulation.runner import BatchTally
from deploy.simulation.scenarios import Profile, Scenario
from deploy.simulation.shrink import shrink
from deploy.simulation.simulation import SimulationOutcome, play

PrintLine = Callable[[str], None]

NO_BUG = "none"  # as --bug: do not plant the bug that a scenario names
_STORY = "Found by `downpour simulate --seed {seed}`: {violation}"


class SimulateOptions(NamedTuple):
    """The options of the command; None for `profile` or `cluster`: drawn by each seed."""

    seed: int
    seeds: int
    profile: Profile | None
    cluster: ClusterConfig | None
    scenario: Path | None
    bug: str
    out: Path
    events: bool


def simulate(options: SimulateOptions, print_line: PrintLine) -> bool:
    """Run what the options ask for, printing with `print_line`; True if no promise was broken."""
    if options.scenario is not None:
        scenario = scenarios.load(options.scenario)
        bug = options.bug or scenario.bug
        return _one(scenario, "" if bug == NO_BUG else bug, options, print_line, written=True)
    cluster = options.cluster or (find(options.bug).cluster if options.bug else None)
    if options.seeds == 1:
        scenario = swarm(options.seed, options.profile or Profile.WITHIN, cluster)
        return _one(scenario, options.bug, options, print_line)
    if options.bug:
        return _hunt(options._replace(cluster=cluster), print_line)
    return _many(options, print_line)


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
        _one(swarm(seed, profile, options.cluster), "", options, print_line)
    return not whole.violations


def _hunt(options: SimulateOptions, print_line: PrintLine) -> bool:
    """Play seeds with a bug planted in the code, until one of them fails."""
    for seed in range(options.seed, options.seed + options.seeds):
        scenario = swarm(seed, options.profile or Profile.WITHIN, options.cluster)
        if not _plays(scenario, options.bug).violation:
            continue
        return _one(scenario, options.bug, options, print_line)
    print_line(f"{options.bug}: not caught by {options.seeds} seeds")
    return True


def _plays(scenario: Scenario, bug: str) -> SimulationOutcome:
    with planted(bug):
        return play(scenario)


def _one(
    scenario: Scenario,
    bug: str,
    options: SimulateOptions,
    print_line: PrintLine,
    *,
    written: bool = False,
) -> bool:
    """Play one run and print its outcome; reduce a failing seed and write it to a scenario file."""
    outcome = _plays(scenario, bug)
    if options.events:
        for line in outcome.noted:
            print_line(line)
    counted, setting = outcome.counted, scenario.setting
    print_line(
        f"seed {scenario.seed} ({scenario.profile}): {setting.cluster}, {setting.shards} shards,"
        f" {setting.workers} workers, {len(scenario.faults)} faults: {outcome.seconds:.1f} s,"
        f" {counted.delivered} messages delivered, {counted.lost} lost, {counted.doubled} doubled,"
        f" {counted.mangled} mangled, {counted.deaths} copies died"
    )
    if not outcome.violation:
        print_line("every promise was kept")
        return True
    print_line(f"violation: {outcome.violation}")
    if not written:
        small = shrink(scenario, lambda smaller: bool(_plays(smaller, bug).violation))
        story = _STORY.format(seed=scenario.seed, violation=_plays(small, bug).violation)
        small = msgspec.structs.replace(small, story=story, bug=bug)
        options.out.write_text(scenarios.written(small))
        print_line(f"shrunk to {len(small.faults)} faults: {options.out}")
    return False
