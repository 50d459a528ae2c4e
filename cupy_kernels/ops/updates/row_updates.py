"""Updates the rows of a sparse table in place, each with its slots, on the host.

The compiled loops of cpu.py read and write each row once. Without numba the same formulas run on
copies of the rows, with the same result bit for bit.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.compilation import plain
from cupy_kernels.ops.updates import cpu as update_loops
from cupy_kernels.types import ROW_COUNT, ROW_SLOT, RowUpdate, freeze

Floats = NDArray[np.float32]

_LANES = 8


class RowMemory(NamedTuple):
    """The memory of a table's rows, and their weight decay, for the compiled loops.

    `slab` and the meta are flat: a row's weights and slots, `width` floats, start at a multiple of
    `stride`, its meta at one of `meta_words`. `counts` and `row_slots` are the same words of meta
    as uint32 and as float32.
    """

    slab: Floats
    counts: NDArray[np.uint32]
    row_slots: Floats
    dim: int
    width: int
    stride: int
    meta_words: int
    decay: np.float32
    l1: bool


def apply_rows(
    update: RowUpdate,
    slab: Floats,
    meta: NDArray[np.uint32],
    slots: NDArray[np.int64],
    gradient: Floats,
    width: int,
) -> None:
    """`updates.apply_rows`."""
    if update_loops.COMPILED:
        words = meta.reshape(-1)
        sizes = gradient.shape[1], width, slab.shape[1], meta.shape[1]
        rows = RowMemory(
            slab.reshape(-1), words, words.view(np.float32), *sizes, update.decay, update.l1
        )
        loop = update_loops.ROW_LOOPS[update.rule]
        loop(rows, freeze(slots), freeze(gradient), update.rate, update.constants)
        return
    with np.errstate(all="ignore"):
        apply_copies(update, slab, meta, slots, gradient, width)


def apply_copies(
    update: RowUpdate,
    slab: Floats,
    meta: NDArray[np.uint32],
    slots: NDArray[np.int64],
    gradient: Floats,
    width: int,
) -> None:
    """`updates.apply_rows` in NumPy; its caller ignores what overflows."""
    dim = gradient.shape[1]
    stored, words = slab[slots, :width], meta[slots]
    weights, *state = (stored[:, low : low + dim] for low in range(0, width, dim))
    counts, row_slots = words[:, ROW_COUNT], words.view(np.float32)[:, ROW_SLOT]
    counts += counts != update_loops.MOST_UPDATES
    gradient = plain(update_loops.add_decay)(gradient, weights, update.decay, update.l1)
    rate: Any = np.float32(update.rate)
    constants = update.constants
    if update.rule == "row_adagrad":
        new = _row_adagrad(weights, gradient, row_slots, rate, *constants)
    else:
        if update.rule == "adam":
            beta1, beta2, constants = *constants[:2], constants[2:]
            corrected = np.sqrt(1.0 - _power(beta2, counts)) / (1.0 - _power(beta1, counts))
            rate = (update.rate * corrected).astype(np.float32)[:, None]
        formula = plain(getattr(update_loops, update.rule))
        new = formula(weights, gradient, *state, rate, *constants)
    slab[slots, :width] = np.concatenate(new, axis=1) if state else new
    meta[slots] = words


def _row_adagrad(w: Floats, g: Floats, h: Floats, rate: np.float32, delta: np.float32) -> Floats:
    """The new weights; the row-wise slots `h` advance in place."""
    h += sum_squares(g) * (np.float32(1) / np.float32(g.shape[1]))
    weights: Floats = w - (rate / (np.sqrt(h) + delta))[:, None] * g
    return weights


def _power(base: float, exponents: NDArray[np.uint32]) -> NDArray[np.float64]:
    """A number to the power of each exponent, by squares, as in the loop for rows."""
    result = np.ones(len(exponents))
    while exponents.any():
        result = np.where(exponents & 1, result * base, result)
        base *= base
        exponents = exponents >> np.uint32(1)
    return result


def sum_squares(rows: Floats) -> Floats:
    """The sum of squares of each row: eight partial sums by column modulo 8, then a fixed tree."""
    count, dim = rows.shape
    whole = dim - dim % _LANES
    sums = np.zeros((count, _LANES), np.float32)
    for column in range(0, whole, _LANES):
        lanes = rows[:, column : column + _LANES]
        sums += lanes * lanes
    rest = rows[:, whole:]
    sums[:, : dim - whole] += rest * rest
    halves = sums[:, :4] + sums[:, 4:]
    quarters = halves[:, :2] + halves[:, 2:]
    return quarters[:, 0] + quarters[:, 1]
