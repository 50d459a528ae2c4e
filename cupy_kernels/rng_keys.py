"""What a random draw is keyed by, and how many words of it are dropped."""

from typing import NamedTuple

from cupy_kernels.types import AnyArray

WORD = 2**32


class RngKey(NamedTuple):
    """The numbers that decide a mask: seed and step modulo 2^64, the layer's modulo 2^32.

    For kernels `step` may be a uint64 array of one element, where they live: a captured step
    counts it there.
    """

    seed: int
    step: int | AnyArray
    layer: int


def limit(ratio: float) -> int:
    """The 32-bit words below which an element is dropped: `ratio` of them all."""
    return min(round(ratio * WORD), WORD - 1)
