"""Applies one gradient to one shard's arena, on the arena's device.

On the host this is the CPU version of the update kernels; on a device it runs the kernels
(gpu.py).

`apply` writes the new weights into a different buffer, because a version of the weights is
immutable while it may still be being sent, and advances the slots in place. The compiled loops are
in `cpu.py`, imported on first use: a client that never applies an update does not load
numba. Without numba, NumPy runs the same formulas block by block, with the same result bit for bit.
"""

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.backends import Backend, backend_of
from cupy_kernels.types import BLOCK, RowUpdate, freeze

Floats = NDArray[np.float32]

_FEW = 8


class Runs(NamedTuple):
    """The runs of an arena that are updated, each with its own multipliers.

    `bounds`: int64 (runs, 2), ascending and disjoint intervals [start, stop).
    `rates`, `decays`: float32 (runs,), the rate and the decay, each times its multiplier.
    `l1`: whether the decay is constant towards zero (L1), or proportional to the weight (L2).
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
    Floats outside the runs are not changed, nor written in `out`; for a device see
    gpu.py. `constants` are the formula's trailing arguments.
    """
    if backend_of(weights).runs_kernels:
        from cupy_kernels.ops.updates import gpu as update_kernels

        update_kernels.apply(rule, weights, gradient, slots, out, runs, constants)
        return
    loops = _loops()
    update = loops.UPDATES[rule]
    if loops.COMPILED:
        # Received frames are read-only and arenas are not; views let numba compile only once.
        w, g = freeze(weights), freeze(gradient)
        update.loop(w, g, slots, out, runs, constants)
    else:
        with np.errstate(all="ignore"):
            _apply_blocks(update.formula, weights, gradient, slots, out, runs, constants)


def apply_heloco(
    weights: Floats,
    gradient: Floats,
    momentum: Floats,
    out: Floats,
    runs: Runs,
    constants: tuple[np.float32, ...],
    correction: tuple[float, float, float, float, float],
) -> None:
    """`apply` for HeLoCo, where each run is a tensor with a correction of its own (heloco.py)."""
    from cupy_kernels.ops.updates import heloco

    shares_of = heloco.Correction(*correction).shares
    for run, (start, stop) in enumerate(runs.bounds.tolist()):
        keys, here = slice(start, stop), slice(run, run + 1)
        w, g, m = weights[keys], gradient[keys], momentum[keys]
        shares = shares_of(*heloco.dot_products(w, g, m, runs.decays[run], l1=runs.l1))
        bounds = np.array([[0, stop - start]], np.int64)
        tensor = Runs(bounds, runs.rates[here], runs.decays[here], runs.l1)
        apply("heloco", w, g, (m,), out[keys], tensor, (*constants, *map(np.float32, shares)))


def apply_rows(
    update: RowUpdate,
    slab: Floats,
    meta: NDArray[np.uint32],
    slots: NDArray[np.int64],
    gradient: Floats,
    width: int,
) -> None:
    """Update the rows of a sparse table in distinct `slots` by their gradient, (n, dim), in place.

    `slab` is float32 (rows, stride), in each row `width` floats of weights and slots, and `meta`
    (rows, words). On the host only.
    """
    _row_updates().apply_rows(update, slab, meta, slots, gradient, width)


@cache
def _loops() -> ModuleType:
    """The compiled loops, cached: an import inside a function costs as much as a small update."""
    from cupy_kernels.ops.updates import cpu as update_loops

    return update_loops


@cache
def _row_updates() -> ModuleType:
    from cupy_kernels.ops.updates import row_updates

    return row_updates


def runs_on(backend: Backend, rule: str) -> bool:
    """Return whether `apply` supports the rule on this backend: a device needs a kernel for it."""
    from cupy_kernels.ops.updates import cpu as update_loops
    from cupy_kernels.ops.updates import gpu as update_kernels

    return update_kernels.has_kernel(rule) if backend.runs_kernels else rule in update_loops.UPDATES


def engine() -> Literal["numba", "numpy"]:
    """The library that runs the updates on the host."""
    from cupy_kernels.ops.updates import cpu as update_loops

    return "numba" if update_loops.COMPILED else "numpy"


def compiles_first(*, net: bool, rows: bool = False) -> bool:
    """True if the first update on this host, of `rows`, too, or the first step of a `net` waits for
    the compiler.

    Later processes read the compiled loops from numba's cache.
    """
    from cupy_kernels import compilation
    from cupy_kernels.ops.convolution import loops
    from cupy_kernels.ops.rows import loops as row_loops
    from cupy_kernels.ops.updates import cpu as update_loops

    return not (
        compilation.is_cached(update_loops.add_decay)
        and (not net or compilation.is_cached(loops.finish))
        and (not rows or row_loops.are_cached())
    )


def stores_loops() -> bool:
    """Return whether what one process compiles of a net's loops spares others on this machine."""
    from cupy_kernels import compilation
    from cupy_kernels.ops.convolution import loops

    return compilation.can_store(loops.finish)


def squared_norm(values: Floats) -> float:
    """The sum of squares of a flat float32 array; NaN or infinite if any value is.

    BLAS sums blocks in float32, and their sums are added in float64, in a fixed order. A block with
    squares that overflow float32 (values beyond about 1e17) gives infinity, too. A device uses
    different blocks, so the last bits differ there.
    """
    if backend_of(values).runs_kernels:
        from cupy_kernels.ops.updates import gpu as update_kernels

        return update_kernels.squared_norm(values)
    if values.size <= _FEW * BLOCK:  # for few blocks the calls below cost more than the sums
        parts = [values[low : low + BLOCK] for low in range(0, values.size, BLOCK)]
        with np.errstate(all="ignore"):  # an overflow gives infinity, as documented
            return sum([float(np.dot(part, part)) for part in parts])
    whole = values.size - values.size % BLOCK
    blocks, rest = values[:whole].reshape(-1, BLOCK), values[whole:]
    with np.errstate(all="ignore"):
        return float(np.vecdot(blocks, blocks).sum(dtype=np.float64) + np.dot(rest, rest))


def sgd_measured(weights: Floats, gradient: Floats, out: Floats, runs: Runs) -> float:
    """Apply SGD without decay, and return the gradient's `squared_norm` within the runs.

    The compiled loop reads the gradient once for both. On the host only.
    """
    loops = _loops()
    if loops.COMPILED:
        if gradient.flags.writeable:  # the loop is compiled for arrays that are not
            gradient = gradient.view()  # `freeze` would be one more call of every push
            gradient.flags.writeable = False
        # `runs` is passed as arrays: unpacking the struct costs as much as a small update.
        return float(loops.sgd_measured(weights, gradient, out, runs.bounds, runs.rates))
    apply("sgd", weights, gradient, (), out, runs, ())
    return sum([squared_norm(gradient[start:stop]) for start, stop in runs.bounds.tolist()])


def mean(arrays: Sequence[Floats]) -> Floats:
    """The mean, a new array: the arrays are added one by one in float32, then divided."""
    if backend_of(arrays[0]).runs_kernels:
        from cupy_kernels.ops.updates import gpu as update_kernels

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
    from cupy_kernels import compilation
    from cupy_kernels.ops.updates import cpu as update_loops

    decayed = compilation.plain(update_loops.add_decay)
    for (start, stop), rate, decay in zip(*runs[:3], strict=True):
        for low in range(start, stop, BLOCK):
            part = slice(low, min(low + BLOCK, stop))
            grad = decayed(gradient[part], weights[part], decay, runs.l1)
            new = formula(weights[part], grad, *(slot[part] for slot in slots), rate, *constants)
            if not slots:
                new = (new,)
            for array, values in zip((out, *slots), new, strict=True):
                array[part] = values
