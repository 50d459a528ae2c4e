"""The sums of a table of 64-bit words by its columns and its rows, modulo 2**64.

Checksums are computed from them (shards/checksums.py). NumPy reads the table twice. A log computes
them for every byte that is pushed to a shard: there a loop compiled by numba reads the table once,
at the speed of memory. Both give the same bits, because integers may be summed in any order.
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
    """`plain_sums` by the compiled loop, if numba is installed; rows must be a multiple of 4.

    The first call loads numba, which takes longer than summing a few gigabytes."""
    loop = _loop() if words.flags.aligned else None
    return plain_sums(words) if loop is None else loop(words)


@cache
def _loop() -> Callable[[Words], tuple[Words, Words]] | None:
    """The compiled loop, or None without numba.

    It is loaded on first use, so that a process that only finds a log's end does not load numba."""
    from cupy_kernels.checksum_loops import summed
    from cupy_kernels.update_loops import COMPILED

    return summed if COMPILED else None
