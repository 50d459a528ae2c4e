"""Many seeds, on as many cores as there are; each by itself, so that the order is of no matter.

Collecting garbage is left to the end of a batch: a run makes many short-lived values and few
cycles, and the collector would look at all of them again and again.
"""

import gc
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from deploy.simulation.config import ClusterConfig
from deploy.simulation.fault_generator import swarm
from deploy.simulation.mutants import find, planted
from deploy.simulation.scenarios import Profile, Scenario
from deploy.simulation.simulation import SimulationOutcome, play

BATCH = 25


class Batch(NamedTuple):
    """`seeds` seeds from `first` on, of one profile; `cluster` None is drawn by each seed."""

    first: int
    seeds: int
    profile: Profile
    cluster: ClusterConfig | None


class BatchTally(NamedTuple):
    """What a batch came to: how many runs, their virtual seconds, the CPU seconds, who failed."""

    runs: int
    cluster_s: float
    cpu_s: float
    violations: list[tuple[int, Profile, str]]


def run_batch(batch: Batch) -> BatchTally:
    """Play a batch here."""
    began = time.process_time()
    cluster_s, violations = 0.0, []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for seed in range(batch.first, batch.first + batch.seeds):
            outcome = play(swarm(seed, batch.profile, batch.cluster))
            cluster_s += outcome.seconds
            if outcome.violation:
                violations.append((seed, batch.profile, outcome.violation))
    finally:
        if collecting:
            gc.enable()
        gc.collect()
    return BatchTally(batch.seeds, cluster_s, time.process_time() - began, violations)


def batches(
    first: int, seeds: int, profile: Profile | None = None, cluster: ClusterConfig | None = None
) -> list[Batch]:
    """So many seeds in batches; of no one profile, every fourth batch is beyond the budget."""
    found = []
    for number, begin in enumerate(range(first, first + seeds, BATCH)):
        mixed = Profile.BEYOND if number % 4 == 3 else Profile.WITHIN
        count = min(BATCH, first + seeds - begin)
        found.append(Batch(begin, count, profile or mixed, cluster))
    return found


def run(work: Sequence[Batch], processes: int | None = None) -> Iterator[BatchTally]:
    """Play batches on all cores, or so many, as they are done."""
    count = min(processes or os.cpu_count() or 1, len(work))
    if count < 2:
        yield from map(run_batch, work)
        return
    # Spawned, for whoever calls this may have threads, which a fork would not take along.
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        yield from pool.imap_unordered(_run_batch_there, work)


def _run_batch_there(batch: Batch) -> BatchTally:
    """In a process made for this, what outlives a batch is not looked at again by the collector."""
    tally = run_batch(batch)
    gc.freeze()  # above all modules: ten times as much as a batch leaves for it
    return tally


def together(tallies: Sequence[BatchTally]) -> BatchTally:
    """Their sum, violations by seed."""
    return BatchTally(
        sum(tally.runs for tally in tallies),
        sum(tally.cluster_s for tally in tallies),
        sum(tally.cpu_s for tally in tallies),
        sorted(one for tally in tallies for one in tally.violations),
    )


def caught(bug: str, seeds: int, first: int = 0) -> SimulationOutcome | None:
    """The first run of the bug's own kind of cluster that it spoils; None if no seed sees it."""
    cluster = find(bug).cluster
    with planted(bug):
        for seed in range(first, first + seeds):
            scenario: Scenario = swarm(seed, cluster=cluster)
            outcome = play(scenario)
            if outcome.violation:
                return outcome
    return None
