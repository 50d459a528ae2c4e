"""The sums of checksum_sums.py in one compiled pass over the table; loaded only if needed."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.update_loops import compiled

Words = NDArray[np.uint64]
Array = Any  # numba infers the loop's types, not these annotations


def summed(words: Words) -> tuple[Words, Words]:
    """The sums of the columns and of the rows of aligned `words`; rows are a multiple of 4."""
    assert len(words) % 4 == 0
    columns, rows = (np.zeros(size, np.uint64) for size in reversed(words.shape))
    frozen = words.view()
    frozen.flags.writeable = False  # one compilation serves both
    _add_up(frozen, columns, rows)
    return columns, rows


@compiled
def _add_up(words: Array, columns: Array, rows: Array) -> None:
    """Sum four rows at once, to load and store the sums of columns a quarter as often."""
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
