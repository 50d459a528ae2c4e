"""The sums of a table of 64-bit words by its columns and its rows, modulo 2**64.

A log's checksum is made of them (shards/checks.py), for every byte that a shard is pushed. So where
numba is there the table is read once, at the speed of memory; NumPy reads it twice, with the same
result bit for bit, for sums of whole numbers may be taken in any order.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.update_loops import COMPILED, compiled

Words = NDArray[np.uint64]
Array = Any  # numba infers the loop's types, not these annotations


def table_sums(words: Words) -> tuple[Words, Words]:
    """The sums of the columns and of the rows of `words`, uint64 (rows, columns), rows by fours."""
    assert len(words) % 4 == 0
    if not (COMPILED and words.flags.aligned):
        return np.add.reduce(words, axis=0), np.add.reduce(words, axis=1)
    columns, rows = (np.zeros(size, np.uint64) for size in reversed(words.shape))
    frozen = words.view()
    frozen.flags.writeable = False  # one compilation serves both
    _add_up(frozen, columns, rows)
    return columns, rows


@compiled
def _add_up(words: Array, columns: Array, rows: Array) -> None:
    """Four rows at once, so that the sums of columns are fetched and stored a quarter as often."""
    for first in range(0, len(rows), 4):
        a, b, c, d = words[first], words[first + 1], words[first + 2], words[first + 3]
        of_a = of_b = of_c = of_d = np.uint64(0)
        for place in range(len(columns)):
            columns[place] += a[place] + b[place] + c[place] + d[place]
            of_a += a[place]
            of_b += b[place]
            of_c += c[place]
            of_d += d[place]
        rows[first], rows[first + 1] = of_a, of_b
        rows[first + 2], rows[first + 3] = of_c, of_d
