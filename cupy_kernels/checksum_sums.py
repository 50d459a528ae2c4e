"""The sums of a table of 64-bit words by its columns and its rows, modulo 2**64.

Checksums are made of them (shards/checksums.py). NumPy reads the table twice. A log takes them of
every byte that a shard is pushed: there the table is read once, at the speed of memory, by a loop
that numba compiles. Both give the same bits, for sums of whole numbers may be taken in any order.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]


def plain_sums(words: Words) -> tuple[Words, Words]:
    """The sums of the columns and of the rows of `words`, uint64 (rows, columns)."""
    return np.add.reduce(words, axis=0), np.add.reduce(words, axis=1)


def table_sums(words: Words) -> tuple[Words, Words]:
    """The same by the compiled loop, where numba is; rows come by fours. It loads numba, which
    takes longer than to sum up a few gigabytes."""
    loop = _loop() if words.flags.aligned else None
    return plain_sums(words) if loop is None else loop(words)


@cache
def _loop() -> Callable[[Words], tuple[Words, Words]] | None:
    """Loaded on first use: who only reads where a log ends does not load numba. None without it."""
    from cupy_kernels.checksum_loops import summed
    from cupy_kernels.update_loops import COMPILED

    return summed if COMPILED else None
