"""The key of a random mask, and the limit below which a random word drops its element."""

from typing import NamedTuple

from cupy_kernels.types import AnyArray

WORD = 2**32


class RngKey(NamedTuple):
    """The numbers that determine a mask: seed and step modulo 2^64, the layer's number modulo 2^32.

    For kernels `step` may be a uint64 array of one element on their device, where a captured step
    reads it.
    """

    seed: int
    step: int | AnyArray
    layer: int


def limit(ratio: float) -> int:
    """The limit below which a 32-bit word drops its element: `ratio` of all words."""
    return min(round(ratio * WORD), WORD - 1)
