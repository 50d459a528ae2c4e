"""Several shards' versions as one array, without a copy: their slots mapped side by side.

Each shard writes its part of the weights into a segment of its own. A worker that wants them in one
piece reserves addresses for the whole and maps each part's slot at its place there. That works on
whole pages, so every part but the last must be a multiple of a page, as the cuts of a large table
are (shards/tables.py). Slots are few and come again, so what was mapped once for a combination of
slots is kept and found again.
"""

import ctypes
import mmap
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

PAGE = mmap.PAGESIZE
_MAP_FIXED = 0x10  # on every Linux
_MOST = 64  # combinations kept, each of the whole table's addresses but of no memory of its own


class MappedPiece(NamedTuple):
    """`length` bytes from `offset` on in the file that `descriptor` is open on, named `name`."""

    name: str
    descriptor: int
    offset: int
    length: int

    @property
    def key(self) -> tuple[str, int, int]:
        return self.name, self.offset, self.length


class ContiguousMapping:
    """Mappings of tiles side by side, read-only, each kept for when the same tiles come again."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, int, int], ...], mmap.mmap] = {}

    def lay(self, tiles: Sequence[MappedPiece]) -> mmap.mmap | None:
        """Memory in which `tiles` follow one another; None where pages or the system forbid it."""
        key = tuple(tile.key for tile in tiles)
        if key not in self._known:
            if any(tile.length % PAGE for tile in tiles[:-1]):
                return None
            laid = _laid(tiles)
            if laid is None:
                return None
            if len(self._known) == _MOST:
                self._known.clear()  # arrays in them keep theirs
            self._known[key] = laid
        return self._known[key]

    def forget(self, name: str) -> None:
        """Keep no mapping with a tile of this file: each would keep its memory from being freed."""
        for key in [key for key in self._known if any(tile[0] == name for tile in key)]:
            del self._known[key]  # arrays in it keep theirs


def _laid(tiles: Sequence[MappedPiece]) -> mmap.mmap | None:
    whole = sum(tile.length for tile in tiles)
    try:
        # Addresses only; unmapped as one when the object goes, whatever lies in them by then.
        space = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError):
        return None
    start = ctypes.addressof(ctypes.c_char.from_buffer(space))
    flags = mmap.MAP_SHARED | _MAP_FIXED
    for tile in tiles:
        at = _map()(start, tile.length, mmap.PROT_READ, flags, tile.descriptor, tile.offset)
        if at != start:
            return None
        start += tile.length
    return space


@cache
def _map() -> "ctypes._NamedFuncPointer":
    """The C library's mmap, for Python's own cannot be told where."""
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_long,
    )
    return function
