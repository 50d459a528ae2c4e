"""Applying one gradient to one shard's arena on the CPU: the twin of the update kernels.

`apply` writes new weights into another buffer than the one it reads, because a version of the
weights is immutable while somebody may be sending it, and advances the slots in place. The compiled
loops come from `update_loops.py`, imported on first use: a client that never applies an update does
not load numba. Where numba is absent, NumPy runs the same formulas block by block, with the same
result bit for bit.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

# Blocks this short keep a formula's temporaries in the first-level caches.
BLOCK = 8192


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
    What lies outside the runs is left as it was, in `out` too. `constants` are the formula's
    trailing arguments.
    """
    from cupy_kernels import update_loops

    update = update_loops.UPDATES[rule]
    if update_loops.COMPILED:
        # One compilation serves both: frames off the wire are read-only, arenas are not.
        w, g = _frozen(weights), _frozen(gradient)
        update.loop(w, g, slots, out, runs, constants)
    else:
        with np.errstate(all="ignore"):
            _apply_blocks(update.formula, weights, gradient, slots, out, runs, constants)


def engine() -> Literal["numba", "numpy"]:
    """What runs the updates here."""
    from cupy_kernels import update_loops

    return "numba" if update_loops.COMPILED else "numpy"


def squared_norm(values: Floats) -> float:
    """The sum of squares of a flat float32 array; NaN or infinite if any value is.

    Blocks are summed in float32 by BLAS and their sums in float64, in a fixed order. A block whose
    squares overflow float32 (values beyond about 1e17) also comes out infinite.
    """
    total = 0.0
    with np.errstate(all="ignore"):
        for start in range(0, values.size, BLOCK):
            block = values[start : start + BLOCK]
            total += float(np.dot(block, block))
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
