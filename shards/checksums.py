"""Checksums of written data, by which a reader detects that its bytes differ from the writer's.

`checksum` covers every byte. Each block of 1 MiB is a table of 64-bit words, represented by the
sums of its columns and of its rows; the checksum is the crc32 of these sums. Any error within one
word, one row (a page of 8 KB) or one column of a block is found. This takes half the time of the
crc32 of every byte, or a quarter with compiled sums.

The checksums find accidents, not malice.
"""

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from cupy_kernels.checksum_sums import Words, plain_sums, table_sums

Sums = Callable[[Words], tuple[Words, Words]]

_ROWS, _WORDS = 128, 1024
_BLOCK = _ROWS * _WORDS * 8


def checksum(frames: Sequence[memoryview], sums: Sums = plain_sums) -> int:
    """The checksum of consecutive frames of bytes.

    `plain_sums` and `table_sums` give the same result; the latter are faster once numba is loaded.
    """
    check = 0
    for frame in frames:
        whole = len(frame) - len(frame) % _BLOCK
        for start in range(0, whole, _BLOCK):
            words = np.frombuffer(frame[start : start + _BLOCK], "<u8").reshape(_ROWS, _WORDS)
            for line in sums(words):
                check = zlib.crc32(line.data, check)
        check = zlib.crc32(frame[whole:], check)
    return check


def prepare() -> None:
    """Compile `table_sums` in advance; it takes a second."""
    checksum([memoryview(bytes(_BLOCK))], table_sums)
