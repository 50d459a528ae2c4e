"""The arithmetic of sparse tables: hashes of ids, first values, sums by id, and updates of rows.

Everything here gives the same bits wherever it runs, in NumPy or compiled, on any number of shards:
hashes and first values are integer arithmetic followed by exact conversions, and every sum of
floats has one order. A row-wise sum is eight partial sums by column modulo 8, joined by a fixed
tree; rows of one id are added in float64 in the order of the batch and rounded once.

Ids are uint64 of shape (n,), rows float32 of shape (n, dim).
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ids = NDArray[np.uint64]
Decayed = Callable[[Any, Any, Any, bool], Any]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio, SplitMix64's step
_LANES = 8


def mix(ids: Ids) -> Ids:
    """A bijection of 64-bit numbers that spreads them evenly: the finaliser of SplitMix64."""
    mixed = ids ^ (ids >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def draw_words(ids: Ids, seed: int, count: int) -> Ids:
    """`count` random words for each id, (n, count); they depend on the id and the seed alone."""
    key = mix(np.array([seed], np.uint64) + _GOLDEN)
    steps = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    return mix(mix(ids ^ key)[:, None] + steps)


def draw_uniform(ids: Ids, dim: int, seed: int) -> Floats:
    """A row of multiples of 2**-23 in [-1, 1) for each id."""
    values: Floats = (draw_words(ids, seed, dim) >> np.uint64(40)).astype(np.float32)
    values *= np.float32(2.0**-23)
    values -= np.float32(1)
    return values


def draw_normal(ids: Ids, dim: int, seed: int) -> Floats:
    """A row of nearly normal numbers for each id: the sum of twelve uniform ones of 16 bits.

    Mean 0, variance 1, no value beyond 6.
    """
    lanes = draw_words(ids, seed, 3 * dim).view(np.uint16).reshape(len(ids), dim, 12)
    # Integers below 2**20, so the sum and its conversion are exact.
    total = lanes.sum(axis=2, dtype=np.int64) - 6 * 0xFFFF
    values: Floats = total.astype(np.float32)
    values *= np.float32(2.0**-16)
    return values


class DistinctIds(NamedTuple):
    """Distinct `ids` in ascending order, and `inverse`: the index of each given id among them."""

    ids: Ids
    inverse: NDArray[np.intp]


def find_distinct(ids: Ids) -> DistinctIds:
    """The distinct ones of some ids."""
    distinct, inverse = np.unique(ids, return_inverse=True)
    return DistinctIds(distinct, inverse.reshape(-1))


def sum_rows(of: DistinctIds, rows: Floats) -> Floats:
    """The sum of the rows of each distinct id, added in their order in float64 and rounded once."""
    inverse, count = of.inverse, len(of.ids)
    summed = np.empty((count, rows.shape[1]), np.float32)
    if count == len(inverse):
        summed[inverse] = rows
        return summed
    with np.errstate(all="ignore"):  # an infinite sum is refused by the guard, as any gradient is
        # `add.reduceat` would add a long run pairwise in one column and one by one in several.
        for column in range(rows.shape[1]):
            summed[:, column] = np.bincount(inverse, rows[:, column], count)
    return summed


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


class RowState(NamedTuple):
    """Rows with their optimiser state: weights and slots (n, dim) each, a row-wise slot (n,)."""

    weights: Floats
    slots: tuple[Floats, ...]
    row_slot: Floats


def update_rows(
    rule: str,
    state: RowState,
    gradient: Floats,
    rate: np.float32,
    decay: np.float32,
    l1: bool,
    constants: tuple[np.float32, ...],
) -> RowState:
    """The state of these rows after one update by `rule`; arrays are new.

    Formulas are those of ops/updates/cpu.py, and `row_adagrad` here. The decay is L2, or `l1`.
    """
    with np.errstate(all="ignore"):
        gradient = _load_decay()(gradient, state.weights, decay, l1)
        if rule == "row_adagrad":
            weights, row_slot = row_adagrad(
                state.weights, gradient, state.row_slot, rate, *constants
            )
            return RowState(weights, (), row_slot)
        new = _load_formula(rule)(state.weights, gradient, *state.slots, rate, *constants)
    weights, *slots = new if state.slots else (new,)
    return RowState(weights, tuple(slots), state.row_slot)


def row_adagrad(
    w: Floats, g: Floats, h: Floats, rate: np.float32, delta: np.float32
) -> tuple[Floats, Floats]:
    """Adagrad with one sum of squares a row: h += mean of g^2; w -= rate / (sqrt(h) + delta) * g.

    The mean is the sum of squares times 1 / dim in float32.
    """
    h = h + sum_squares(g) * (np.float32(1) / np.float32(g.shape[1]))
    return w - (rate / (np.sqrt(h) + delta))[:, None] * g, h


@cache
def _load_decay() -> Decayed:
    # Imported on first use: a client that never applies an update does not load numba.
    from cupy_kernels.compilation import plain
    from cupy_kernels.ops.updates import cpu as update_loops

    return plain(update_loops.add_decay)


@cache
def _load_formula(rule: str) -> Callable[..., Any]:
    from cupy_kernels.ops.updates import cpu as update_loops

    return update_loops.UPDATES[rule].formula
