"""`downpour simulate`: plays seeds or a scenario, tells what happened, makes a failure small."""

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

Tell = Callable[[str], None]

NO_BUG = "none"  # that a scenario names
_STORY = "Found by `downpour simulate --seed {seed}`: {violation}"


class SimulateOptions(NamedTuple):
    """What the options say; of `profile` or `cluster` None is whatever each seed draws."""

    seed: int
    seeds: int
    profile: Profile | None
    cluster: ClusterConfig | None
    scenario: Path | None
    bug: str
    out: Path
    events: bool


def simulate(asked: SimulateOptions, tell: Tell) -> bool:
    """Do it, telling line by line; whether every promise was kept."""
    if asked.scenario is not None:
        scenario = scenarios.load(asked.scenario)
        bug = asked.bug or scenario.bug
        return _one(scenario, "" if bug == NO_BUG else bug, asked, tell, written=True)
    cluster = asked.cluster or (find(asked.bug).cluster if asked.bug else None)
    if asked.seeds == 1:
        scenario = swarm(asked.seed, asked.profile or Profile.WITHIN, cluster)
        return _one(scenario, asked.bug, asked, tell)
    if asked.bug:
        return _hunt(asked._replace(cluster=cluster), tell)
    return _many(asked, tell)


def _many(asked: SimulateOptions, tell: Tell) -> bool:
    began = time.monotonic()
    tallies: list[BatchTally] = []
    work = runner.batches(asked.seed, asked.seeds, asked.profile, asked.cluster)
    for tally in runner.run(work):
        tallies.append(tally)
        for seed, profile, violation in tally.violations:
            tell(f"seed {seed} ({profile}): {violation}")
    whole = runner.together(tallies)
    seconds = time.monotonic() - began
    tell(
        f"{whole.runs} seeds, {len(whole.violations)} violations:"
        f" {whole.cluster_s:.0f} s of cluster in {seconds:.0f} s and {whole.cpu_s:.0f} CPU seconds,"
        f" {whole.runs / whole.cpu_s:.0f} seeds a CPU second"
    )
    if whole.violations:
        seed, profile, _ = whole.violations[0]
        _one(swarm(seed, profile, asked.cluster), "", asked, tell)
    return not whole.violations


def _hunt(asked: SimulateOptions, tell: Tell) -> bool:
    """Seeds with a bug in the code, until one of them sees it."""
    for seed in range(asked.seed, asked.seed + asked.seeds):
        scenario = swarm(seed, asked.profile or Profile.WITHIN, asked.cluster)
        if not _plays(scenario, asked.bug).violation:
            continue
        return _one(scenario, asked.bug, asked, tell)
    tell(f"{asked.bug}: not seen by {asked.seeds} seeds")
    return True


def _plays(scenario: Scenario, bug: str) -> SimulationOutcome:
    with planted(bug):
        return play(scenario)


def _one(
    scenario: Scenario, bug: str, asked: SimulateOptions, tell: Tell, *, written: bool = False
) -> bool:
    """Play one run and tell of it; a failing seed is made small and written down."""
    outcome = _plays(scenario, bug)
    if asked.events:
        for line in outcome.noted:
            tell(line)
    counted, setting = outcome.counted, scenario.setting
    tell(
        f"seed {scenario.seed} ({scenario.profile}): {setting.cluster}, {setting.shards} shards,"
        f" {setting.workers} workers, {len(scenario.faults)} faults: {outcome.seconds:.1f} s,"
        f" {counted.delivered} messages delivered, {counted.lost} lost, {counted.doubled} doubled,"
        f" {counted.mangled} mangled, {counted.deaths} copies died"
    )
    if not outcome.violation:
        tell("every promise was kept")
        return True
    tell(f"violation: {outcome.violation}")
    if not written:
        small = shrink(scenario, lambda smaller: bool(_plays(smaller, bug).violation))
        story = _STORY.format(seed=scenario.seed, violation=_plays(small, bug).violation)
        small = msgspec.structs.replace(small, story=story, bug=bug)
        asked.out.write_text(scenarios.written(small))
        tell(f"shrunk to {len(small.faults)} faults: {asked.out}")
    return False
