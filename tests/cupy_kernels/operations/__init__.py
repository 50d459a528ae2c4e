"""Every operation that has two bodies, with inputs and what float64 makes of them.

An `Operation` runs on arrays of any place, which `there` brings its inputs to, with as many
workspaces as it has layers, and returns what it gave by name. Expected values come from
`reference`, or from the references of the kernels' rows. Every file here has a function
`operations`, and `every_operation` finds them all.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import numpy as np

from cupy_kernels.types import AnyArray
from cupy_kernels.workspace import Workspace

There = Callable[[AnyArray], Any]
Works = defaultdict[str, Workspace]
Results = dict[str, Any]


@dataclass(frozen=True)
class Operation:
    """`run(there, works)` and what it should give, within relative and absolute tolerances."""

    name: str
    run: Callable[[There, Works], Results]
    expected: Results
    relative: float = 1e-5
    absolute: float = 1e-5


def every_operation() -> list[Operation]:
    """All of them, several times each, over odd sizes."""
    names = sorted(module.name for module in iter_modules(__path__))
    found: list[Operation] = []
    for name in names:
        found += import_module(f"{__name__}.{name}").operations(np.random.default_rng(83))
    return found


def draw(dice: np.random.Generator, *shape: int) -> AnyArray:
    """Normal float32."""
    return dice.standard_normal(shape, np.float32)


def wide(array: AnyArray) -> Any:
    """In float64."""
    return array.astype(np.float64)


def unwritten(like: AnyArray) -> AnyArray:
    """Memory that an operation must fill."""
    return np.full_like(like, np.nan)


def last(images: AnyArray) -> AnyArray:
    """(n, c, h, w) seen channels-last."""
    return images.transpose(0, 2, 3, 1)


def first(images: AnyArray) -> AnyArray:
    """(n, h, w, c) seen channels-first."""
    return images.transpose(0, 3, 1, 2)
