"""Plays many seeds on all cores. Seeds are independent, so their order does not matter.

Garbage is collected only at the end of a batch: a run creates many short-lived values and few
cycles, and the collector would traverse all of them again and again.
"""

import gc
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from deploy.simulation.fault_generator import swarm
from deploy.simulation.simulation import play
from deploy.simulation_kinds import ClusterConfig, Profile

BATCH = 25


class Batch(NamedTuple):
    """`seeds` seeds, starting with `first`, of one profile; `cluster` None: drawn by each seed."""

    first: int
    seeds: int
    profile: Profile
    cluster: ClusterConfig | None


class BatchTally(NamedTuple):
    """The result of a batch: number of runs, virtual seconds, CPU seconds, and the violations."""

    runs: int
    cluster_s: float
    cpu_s: float
    violations: list[tuple[int, Profile, str]]


def run_batch(batch: Batch) -> BatchTally:
    """Play a batch in this process."""
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
    """Split seeds into batches; without a `profile`, every fourth batch is beyond the budget."""
    work = []
    for number, begin in enumerate(range(first, first + seeds, BATCH)):
        mixed = Profile.BEYOND if number % 4 == 3 else Profile.WITHIN
        count = min(BATCH, first + seeds - begin)
        work.append(Batch(begin, count, profile or mixed, cluster))
    return work


def run(work: Sequence[Batch], processes: int | None = None) -> Iterator[BatchTally]:
    """Play batches in `processes` processes (None: one per core); yields results as they finish."""
    count = min(processes or os.cpu_count() or 1, len(work))
    if count < 2:
        yield from map(run_batch, work)
        return
    # Spawned, because the caller may have threads, which a fork does not copy.
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        yield from pool.imap_unordered(_run_batch_there, work)


def _run_batch_there(batch: Batch) -> BatchTally:
    """Play a batch in a pool process."""
    tally = run_batch(batch)
    # Exempt what outlives a batch, mostly modules, from further collections: it is ten times as
    # much as a batch leaves behind.
    gc.freeze()
    return tally


def together(tallies: Sequence[BatchTally]) -> BatchTally:
    """The sum of the results, with the violations sorted by seed."""
    return BatchTally(
        sum(tally.runs for tally in tallies),
        sum(tally.cluster_s for tally in tallies),
        sum(tally.cpu_s for tally in tallies),
        sorted(violation for tally in tallies for violation in tally.violations),
    )
