"""Planting bugs: the proof that the simulation can see what it is there to see.

A bug is a patch of the real code, named like a sentence and kept in one of the files in bugs/. With
it planted some seed must fail, and soon; a check that no bug can trip proves nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from deploy.simulation.config import ClusterConfig
from shards.errors import BadInput

_ABSENT = object()


class Patch:
    """Attributes put in the place of others, until `undo`."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def setattr(self, target: Any, name: str, value: Any) -> None:
        """Let `target.name` be `value`."""
        self._undo.append((target, name, vars(target).get(name, _ABSENT)))
        setattr(target, name, value)

    def undo(self) -> None:
        """Put back what was there."""
        for target, name, before in reversed(self._undo):
            if before is _ABSENT:
                delattr(target, name)
            else:
                setattr(target, name, before)
        self._undo.clear()


class Bug(NamedTuple):
    """What plants it, and the kind of cluster that it shows in."""

    plant: Callable[[Patch], None]
    cluster: ClusterConfig


class Bugs(dict[str, Bug]):
    """The bugs of one file, by name."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self._cluster = cluster

    def add(self, plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        """Register a bug under its function's name."""
        self[plant.__name__] = Bug(plant, self._cluster)
        return plant


def registry() -> dict[str, Bug]:
    """Every bug that can be planted."""
    from deploy.simulation.bugs import (
        compressed,
        disks,
        groups,
        moves,
        rollbacks,
        sessions,
        shards,
        slots,
    )

    kinds = [kind.BUGS for kind in (shards, sessions, rollbacks, compressed, disks, groups)]
    return {
        name: bug
        for kind in (*kinds, *moves.all_bugs(), *slots.all_bugs())
        for name, bug in kind.items()
    }


def find(name: str) -> Bug:
    """A bug by its name; raises BadInput."""
    known = registry()
    if name not in known:
        raise BadInput(f"bug {name!r}: expected one of {', '.join(known)}")
    return known[name]


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Have a bug in the code for a while; none for the empty name."""
    patch = Patch()
    try:
        if name:
            find(name).plant(patch)
        yield
    finally:
        patch.undo()
