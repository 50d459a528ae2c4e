"""A mutant: a patch of the real code, the promise that it breaks, and how it is undone."""

import builtins
from collections.abc import Callable
from typing import Any, NamedTuple

from deploy.simulation.invariants import Promise
from deploy.simulation_kinds import ClusterConfig

_ABSENT = object()


class Patch:
    """Replaces attributes until `undo` restores them."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def setattr(self, target: Any, name: str, value: Any) -> None:
        """Set `target.name` to `value`."""
        # A mutant whose target was renamed would change nothing; some shadow a module's builtin.
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


class Mutant(NamedTuple):
    """The function that patches the code, the cluster in which it shows, the promise it breaks.

    `seed` is played first: one that shows a rare mutant saves the search from 0.
    """

    plant: Callable[[Patch], None]
    cluster: ClusterConfig
    promise: Promise
    seed: int = 0


class Mutants(dict[str, Mutant]):
    """The mutants of one file, by name."""

    def add(
        self, cluster: ClusterConfig, promise: Promise, seed: int = 0
    ) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
        """Register the decorated function under its name."""

        def register(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
            self[plant.__name__] = Mutant(plant, cluster, promise, seed)
            return plant

        return register
