"""Checksums of written data, by which a reader detects that its bytes differ from the writer's.

They are XXH3 with 64 bits, which covers every byte at the speed of memory. They find accidents, not
malice.
"""

from collections.abc import Iterable

import xxhash

HEX_DIGITS = 16


def checksum(frames: Iterable[bytes | memoryview], seed: int = 0) -> int:
    """The checksum of consecutive frames of bytes, 64 bits; another seed gives another one."""
    return _digest(frames, seed).intdigest()


def hex_checksum(frames: Iterable[bytes | memoryview]) -> str:
    """The checksum as HEX_DIGITS hexadecimal digits, for texts: JSON has no 64-bit integers."""
    return _digest(frames, 0).hexdigest()


def _digest(frames: Iterable[bytes | memoryview], seed: int) -> xxhash.xxh3_64:
    digest = xxhash.xxh3_64(seed=seed)
    for frame in frames:
        digest.update(frame)
    return digest
