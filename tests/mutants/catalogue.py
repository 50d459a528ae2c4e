"""All mutants by name, and the search for a run that detects one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.simulation import scenarios
from deploy.simulation.fault_generator import swarm
from deploy.simulation.simulation import SimulationOutcome, play
from shards.errors import BadInput
from tests.mutants import (
    compression,
    logs,
    replication,
    resharding,
    rollbacks,
    sessions,
    shards,
    slots,
)
from tests.mutants.patching import Mutant, Patch

_FILES = (shards, sessions, rollbacks, compression, logs, replication, resharding, slots)
MUTANTS: dict[str, Mutant] = {
    name: mutant for file in _FILES for name, mutant in file.MUTANTS.items()
}
SCENARIOS = sorted((Path(__file__).parents[1] / "deploy/simulation/scenarios").glob("*.toml"))
SEEDS = 200
"""Seeds within which a mutant without a scenario must be detected."""


def find(name: str) -> Mutant:
    """The mutant of this name; raises BadInput for an unknown one."""
    if name not in MUTANTS:
        raise BadInput(f"mutant {name!r}: expected a name that `python -m tests.mutants` prints")
    return MUTANTS[name]


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a mutant for the duration of the context."""
    patch = Patch()
    try:
        find(name).plant(patch)
        yield
    finally:
        patch.undo()


def caught(name: str, seeds: int = SEEDS) -> SimulationOutcome | None:
    """The first failing run with this mutant; None if no run fails.

    A mutant that has scenarios of its own is played in those, another one in `seeds` seeds of its
    kind of cluster.
    """
    own = [one for one in map(scenarios.load, SCENARIOS) if one.mutant == name]
    runs = iter(own) if own else (swarm(n, cluster=find(name).cluster) for n in range(seeds))
    with planted(name):
        return next((end for end in map(play, runs) if end.violation), None)
