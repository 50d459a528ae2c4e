"""Maps several shards' versions as one contiguous array, without a copy.

Each shard writes its part of the weights into a segment of its own. A worker that wants them in one
piece reserves addresses for the whole, and maps the slot of each part at its place there. Mapping
works on whole pages, so every part but the last must be a multiple of a page, as the cuts of a
large table are (shards/tables.py). Slots are few and are reused, so the mapping of a combination of
slots is cached.
"""

import ctypes
import mmap
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

PAGE = mmap.PAGESIZE
_MAP_FIXED = 0x10  # on every Linux
_MOST = 64  # cached combinations; each takes addresses for the whole table, but no memory


class MappedPiece(NamedTuple):
    """`length` bytes at `offset` of the file `name`, which is open as `descriptor`."""

    name: str
    descriptor: int
    offset: int
    length: int

    @property
    def key(self) -> tuple[str, int, int]:
        return self.name, self.offset, self.length


class ContiguousMapping:
    """A cache of contiguous read-only mappings, each of a sequence of pieces."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, int, int], ...], mmap.mmap] = {}

    def lay(self, tiles: Sequence[MappedPiece]) -> mmap.mmap | None:
        """Memory in which `tiles` are contiguous; None if page sizes or the system prevent it."""
        key = tuple(tile.key for tile in tiles)
        if key not in self._known:
            if any(tile.length % PAGE for tile in tiles[:-1]):
                return None
            mapped = _mapped(tiles)
            if mapped is None:
                return None
            if len(self._known) == _MOST:
                self._known.clear()  # arrays in a mapping keep it alive
            self._known[key] = mapped
        return self._known[key]

    def forget(self, name: str) -> None:
        """Drop the mappings with a piece of this file, or its memory would not be freed."""
        for key in [key for key in self._known if any(tile[0] == name for tile in key)]:
            del self._known[key]  # arrays in a mapping keep it alive


def _mapped(tiles: Sequence[MappedPiece]) -> mmap.mmap | None:
    whole = sum(tile.length for tile in tiles)
    try:
        # Reserves addresses only; deleting the object unmaps them all, with what is mapped in them.
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
    """The C library's mmap: Python's own does not take an address."""
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_long,
    )
    return function
