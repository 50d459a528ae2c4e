"""The arithmetic of sparse tables in NumPy: hashes of ids, first values, sums by id, and an index.

Everything here gives the same bits wherever it runs, in NumPy or compiled, on any number of shards:
hashes and first values are integer arithmetic followed by exact conversions, and rows of one id are
added in float64 in the order of the batch and rounded once.

Ids are uint64 of shape (n,), rows float32 of shape (n, dim). An index is a hash table with linear
probing. A cell holds an id and its slot plus one; zero is an empty cell.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ids = NDArray[np.uint64]
Slots = NDArray[np.int64]
"""The slot of each id, or -1 for an id without a row."""

_LEVELS, _LEAST_NORMAL = np.float32(127), np.float32(2.0**-126)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio, SplitMix64's step


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


def are_ordered(ids: Ids, low: int, high: int) -> bool:
    """Return whether ids ascend strictly, and their mixed values are from `low` up to `high`."""
    mixed = mix(ids)
    inside = (mixed >= np.uint64(low)) & (mixed <= np.uint64(high))
    return bool(inside.all() and (ids[1:] > ids[:-1]).all())


def quantise_rows(rows: Floats, codes: NDArray[np.int8], scales: Floats) -> None:
    """Round finite rows to whole multiples of their `scales`, the largest magnitudes over 127.

    A row with a scale below the least normal number becomes zeros.
    """
    np.divide(np.abs(rows).max(axis=1), _LEVELS, out=scales)
    scales[scales < _LEAST_NORMAL] = 0
    steps = np.where(scales > 0, scales, np.float32(1))[:, None]
    codes[...] = np.clip(np.rint(rows / steps), -_LEVELS, _LEVELS)


def dequantise_rows(codes: NDArray[np.int8], scales: Floats, rows: Floats) -> None:
    """Write the codes times the scales of their rows."""
    with np.errstate(over="ignore"):  # the guard refuses infinity
        np.multiply(codes, scales[:, None], out=rows, dtype=np.float32)


class Cells(NamedTuple):
    """The cells of an index: `ids` uint64 and `entries` uint32 (slot + 1), both of shape (size,).

    The home cell of an id is (mix(id) - `base`) >> `shift`; after the last cell comes the first.
    """

    ids: Ids
    entries: NDArray[np.uint32]
    base: np.uint64
    shift: np.uint64


def find_slots(cells: Cells, ids: Ids) -> Slots:
    """The slot of each id, a new array; -1 where there is none."""
    homes = _homes(cells, ids)
    entries = cells.entries[homes]
    same = cells.ids[homes] == ids
    slots = np.where(same, entries, 0).astype(np.int64) - 1
    # An empty cell ends the search, and so does the id itself.
    (searching,) = np.nonzero(~same & (entries != 0))
    at = homes[searching]
    while searching.size:
        at = _next(cells, at)
        entries = cells.entries[at]
        same = cells.ids[at] == ids[searching]
        slots[searching[same]] = entries[same].astype(np.int64) - 1
        more = ~same & (entries != 0)
        searching, at = searching[more], at[more]
    return slots


def insert_slots(cells: Cells, ids: Ids, slots: Slots) -> None:
    """Enter distinct ids that are in no cell yet, with their slots; there must be room."""
    at, entries = _homes(cells, ids), (slots + 1).astype(np.uint32)
    while ids.size:
        (free,) = np.nonzero(cells.entries[at] == 0)
        # Several may want one cell. One of them gets it, whichever NumPy writes last, and the
        # others look further, as they do from an occupied cell.
        cells.entries[at[free]] = entries[free]
        won = free[cells.entries[at[free]] == entries[free]]
        cells.ids[at[won]] = ids[won]
        more = np.ones(ids.size, np.bool_)
        more[won] = False
        ids, entries, at = ids[more], entries[more], _next(cells, at[more])


def gather_rows(slab: Floats, slots: Slots, dim: int) -> Floats:
    """The first `dim` floats of each slot of `slab` (rows, stride), a new array (n, dim).

    A row of slot -1 has any values.
    """
    rows: Floats = slab[np.maximum(slots, 0), :dim]  # `take` would first copy all of the slab
    return rows


def _homes(cells: Cells, ids: Ids) -> NDArray[np.int64]:
    return ((mix(ids) - cells.base) >> cells.shift).view(np.int64)


def _next(cells: Cells, at: NDArray[np.int64]) -> NDArray[np.int64]:
    at = at + 1
    at[at == len(cells.ids)] = 0
    return at
