"""Mutation testing: plants bugs, to prove that the simulation detects the faults it is meant for.

A bug is a patch of the real code in one of the files in bugs/, named like a sentence. With the bug
planted, some seed must fail soon. A check that no bug can trip proves nothing.
"""

import builtins
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from deploy.simulation.config import ClusterConfig
from shards.errors import BadInput

_ABSENT = object()


class Patch:
    """Replaces attributes until `undo` restores them."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def setattr(self, target: Any, name: str, value: Any) -> None:
        """Set `target.name` to `value`."""
        # A bug whose target was renamed would change nothing; some shadow a builtin of a module.
        assert hasattr(target, name) or hasattr(builtins, name), f"{target} has no {name}"
        self._undo.append((target, name, vars(target).get(name, _ABSENT)))
        setattr(target, name, value)

    def undo(self) -> None:
        """Restore the former attributes."""
        for target, name, before in reversed(self._undo):
            if before is _ABSENT:
                delattr(target, name)
            else:
                setattr(target, name, before)
        self._undo.clear()


class Bug(NamedTuple):
    """The function that plants a bug, and the kind of cluster in which it shows."""

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
    """All bugs that can be planted, by name."""
    from deploy.simulation.bugs import (
        compressed,
        disks,
        groups,
        moves,
        rollbacks,
        sessions,
        shards,
        slots,
        tables,
    )

    kinds = [kind.BUGS for kind in (shards, sessions, rollbacks, compressed, disks, groups)]
    return {
        name: bug
        for kind in (*kinds, *moves.all_bugs(), *slots.all_bugs(), *tables.all_bugs())
        for name, bug in kind.items()
    }


def find(name: str) -> Bug:
    """The bug of this name; raises BadInput for an unknown one."""
    known = registry()
    if name not in known:
        raise BadInput(f"bug {name!r}: expected a name that `downpour simulate --bug list` prints")
    return known[name]


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug for the duration of the context; an empty name plants none."""
    patch = Patch()
    try:
        if name:
            find(name).plant(patch)
        yield
    finally:
        patch.undo()
