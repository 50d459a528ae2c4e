"""Applying one gradient to one shard's arena, where the arena lives.

On the host this is the twin of the update kernels; on a device it runs them (update_kernels.py).

`apply` writes new weights into another buffer than the one it reads, because a version of the
weights is immutable while somebody may be sending it, and advances the slots in place. The compiled
loops come from `update_loops.py`, imported on first use: a client that never applies an update does
not load numba. Where numba is absent, NumPy runs the same formulas block by block, with the same
result bit for bit.
"""

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.backends import Backend, backend_of

Floats = NDArray[np.float32]

# Blocks this short keep a formula's temporaries in the first-level caches.
BLOCK = 8192
_FEW = 8


class Runs(NamedTuple):
    """The runs of an arena that are updated, each with its own multipliers.

    `bounds`: int64 (runs, 2), ascending and disjoint intervals [start, stop).
    `rates`, `decays`: float32 (runs,), the rate and the decay weight with the multipliers in them.
    `l1`: whether the decay is towards zero at a constant pace (L1) or in proportion (L2).
    """

    bounds: NDArray[np.int64]
    rates: Floats
    decays: Floats
    l1: bool


def apply(
    rule: str,
    weights: Floats,
    gradient: Floats,
    slots: tuple[Floats, ...],
    out: Floats,
    runs: Runs,
    constants: tuple[np.float32, ...],
) -> None:
    """Write `weights` updated by `gradient` into `out`; advance `slots` in place.

    All arrays are flat, contiguous, float32 and of one size; `out` overlaps none of the others.
    What lies outside the runs is left as it was, in `out` too; on a device, see update_kernels.py.
    `constants` are the formula's trailing arguments.
    """
    if backend_of(weights).runs_kernels:
        from cupy_kernels import update_kernels

        update_kernels.apply(rule, weights, gradient, slots, out, runs, constants)
        return
    loops = _loops()
    update = loops.UPDATES[rule]
    if loops.COMPILED:
        # One compilation serves both: frames off the wire are read-only, arenas are not.
        w, g = _frozen(weights), _frozen(gradient)
        update.loop(w, g, slots, out, runs, constants)
    else:
        with np.errstate(all="ignore"):
            _apply_blocks(update.formula, weights, gradient, slots, out, runs, constants)


@cache
def _loops() -> ModuleType:
    """The compiled loops; found once, for an import inside a function costs as much as a loop."""
    from cupy_kernels import update_loops

    return update_loops


def runs_on(place: Backend, rule: str) -> bool:
    """Whether `apply` knows the rule there: a device needs a kernel for it."""
    from cupy_kernels import update_kernels, update_loops

    return update_kernels.has_kernel(rule) if place.runs_kernels else rule in update_loops.UPDATES


def engine() -> Literal["numba", "numpy"]:
    """What runs the updates here."""
    from cupy_kernels import update_loops

    return "numba" if update_loops.COMPILED else "numpy"


def squared_norm(values: Floats) -> float:
    """The sum of squares of a flat float32 array; NaN or infinite if any value is.

    Blocks are summed in float32 by BLAS and their sums in float64, in a fixed order. A block whose
    squares overflow float32 (values beyond about 1e17) also comes out infinite. On a device the
    blocks are others, and so the last bits.
    """
    if backend_of(values).runs_kernels:
        from cupy_kernels import update_kernels

        return update_kernels.squared_norm(values)
    if values.size <= _FEW * BLOCK:  # where calls cost more than sums
        parts = [values[low : low + BLOCK] for low in range(0, values.size, BLOCK)]
        with np.errstate(all="ignore"):  # infinite is what comes out where it is beyond float32
            return sum([float(np.dot(part, part)) for part in parts])
    whole = values.size - values.size % BLOCK
    blocks, rest = values[:whole].reshape(-1, BLOCK), values[whole:]
    with np.errstate(all="ignore"):
        return float(np.vecdot(blocks, blocks).sum(dtype=np.float64) + np.dot(rest, rest))


def sgd_measured(weights: Floats, gradient: Floats, out: Floats, runs: Runs) -> float:
    """What `apply` does by SGD without decay; returns the gradient's `squared_norm` in the runs.

    Both read the gradient; where there are compiled loops it is read once. On the host only.
    """
    loops = _loops()
    if loops.COMPILED:
        # For a small update, a struct that the compiled code must take apart costs as much as it.
        return float(loops.sgd_measured(weights, _frozen(gradient), out, runs.bounds, runs.rates))
    apply("sgd", weights, gradient, (), out, runs, ())
    return sum([squared_norm(gradient[start:stop]) for start, stop in runs.bounds.tolist()])


def mean(arrays: Sequence[Floats]) -> Floats:
    """A new array: theirs added one by one in float32, then divided by how many they are."""
    if backend_of(arrays[0]).runs_kernels:
        from cupy_kernels import update_kernels

        return update_kernels.mean(arrays)
    total = arrays[0].copy()
    for other in arrays[1:]:
        total += other
    total /= np.float32(len(arrays))
    return total


def _apply_blocks(
    formula: Any,
    weights: Floats,
    gradient: Floats,
    slots: tuple[Floats, ...],
    out: Floats,
    runs: Runs,
    constants: tuple[np.float32, ...],
) -> None:
    from cupy_kernels import update_loops

    decayed = update_loops.plain(update_loops.decayed)
    for (start, stop), rate, decay in zip(*runs[:3], strict=True):
        for low in range(start, stop, BLOCK):
            part = slice(low, min(low + BLOCK, stop))
            grad = decayed(gradient[part], weights[part], decay, runs.l1)
            new = formula(weights[part], grad, *(slot[part] for slot in slots), rate, *constants)
            if not slots:
                new = (new,)
            for array, values in zip((out, *slots), new, strict=True):
                array[part] = values


def _frozen(array: Floats) -> Floats:
    view = array.view()
    view.flags.writeable = False
    return view
