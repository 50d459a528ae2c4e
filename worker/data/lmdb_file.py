"""LMDB databases, read only: the records of the main database in the order of their keys.

The reader walks the pages of a memory-mapped `data.mdb` itself. Many processes read one database at
once, nothing is locked, and a damaged file is an error. (The library `lmdb` trusts the numbers in
the file: of 200 copies with 4 bytes overwritten, 8 ended the process by a signal.) The library
writes databases: `write_lmdb`.

The format (of version 1, on 64-bit machines, as Caffe wrote it): pages of one size. Pages 0 and 1
are meta pages; the one with the higher transaction number counts, and names the root of a B+tree.
A page starts with its number (8 bytes), 2 unused bytes, its flags, and the ends of its free space,
or, for a large value, its number of pages. Offsets of nodes follow. A node has four numbers of 2
bytes, a key, and data: in a branch the number of a page, in a leaf a value or where it is.
"""

import mmap
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from struct import Struct
from struct import error as struct_error

import numpy as np
from numpy.typing import NDArray

from ps.closing_context import ClosingContext
from shards.errors import BadInput

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_META = Struct("<IIQQ")  # magic, version, address, size of the map
_TREE = Struct("<IHHQQQQQ")  # unused, flags, depth, branches, leaves, overflow, entries, root
_PAGE = Struct("<QHHHH")  # number, unused, flags, lower, upper
_NODE = Struct("<HHHH")  # low, high, flags, length of the key
_LAST = Struct("<QQ")  # the last page, the transaction
_HEADER = 16
_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4
_BIG = 1  # the value is in pages of its own
_NO_PAGE = 2**64 - 1
_DEEPEST = 32
_DUPLICATES = 4
_DAMAGED = (struct_error, IndexError, OverflowError)  # of a number that points nowhere


class LmdbReader(ClosingContext):
    """The records of a database in a folder, or in a file; a context manager. Raises BadInput."""

    def __init__(self, path: Path) -> None:
        self.path = path / "data.mdb" if path.is_dir() else path
        try:
            with self.path.open("rb") as file:
                size = self.path.stat().st_size
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except OSError as failure:
            raise BadInput(f"{self.path}: cannot be read: {failure.strerror}") from None
        try:
            self.rows, self._root, self._depth = self._meta()
            self._leaves, counts = self._walk()
        except _DAMAGED:
            raise self._bad("expected a whole LMDB database, got one with a damaged page") from None
        self._starts: NDArray[np.int64] = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        if self._starts[-1] != self.rows:
            raise self._bad(f"expected {self.rows} records, got {self._starts[-1]}")

    def records(self, start: int, stop: int) -> Iterator[tuple[bytes, bytes]]:
        """The keys and values of records [start, stop), counted in the order of the keys."""
        first = int(np.searchsorted(self._starts, start, "right")) - 1
        for leaf, (begin, end) in enumerate(pairwise(self._starts[first:].tolist()), first):
            if begin >= stop:
                return
            for index in range(max(start - begin, 0), min(stop, end) - begin):
                try:
                    yield self._record(self._leaves[leaf], index)
                except _DAMAGED:
                    raise self._bad(f"record {begin + index}: its page is damaged") from None

    def close(self) -> None:
        """Close the file. Idempotent."""
        if isinstance(self._map, mmap.mmap):
            self._map.close()

    def _meta(self) -> tuple[int, int, int]:
        """The entries, the root page and the depth of the main tree, by the newer meta page."""
        metas = []
        self._page_size = 4096
        for number in (0, 1):
            offset = number * self._page_size + _HEADER
            if offset + _META.size + 2 * _TREE.size + _LAST.size > len(self._map):
                break
            magic, version, _, _ = _META.unpack_from(self._map, offset)
            if magic != _MAGIC:
                raise self._bad("expected an LMDB database, got a file of another kind")
            if version != _VERSION:
                raise self._bad(f"expected LMDB of version {_VERSION}, got version {version}")
            offset += _META.size
            self._page_size, *_ = _TREE.unpack_from(self._map, offset)
            if self._page_size not in {2**power for power in range(8, 17)}:
                raise self._bad(f"expected pages of 256 to 65536 bytes, got {self._page_size}")
            tree = _TREE.unpack_from(self._map, offset + _TREE.size)
            last, transaction = _LAST.unpack_from(self._map, offset + 2 * _TREE.size)
            metas.append((transaction, last, tree))
        if not metas:
            raise self._bad(f"expected an LMDB database, got {len(self._map)} bytes")
        _, last, (_, flags, depth, _, _, _, entries, root) = max(metas)
        if (last + 1) * self._page_size > len(self._map):
            raise self._bad(
                f"expected {(last + 1) * self._page_size} bytes, got {len(self._map)}: it was cut"
                " off"
            )
        if flags & _DUPLICATES:
            raise self._bad("expected one value a key, got a database with duplicate keys")
        return (entries, root, depth) if root != _NO_PAGE else (0, root, 0)

    def _walk(self) -> tuple[list[int], list[int]]:
        """The pages of the tree's leaves in order, and their numbers of records."""
        leaves, counts = list[int](), list[int]()
        if self._root == _NO_PAGE:
            return leaves, counts
        stack, visited = [(self._root, 1)], 0
        while stack:
            page, depth = stack.pop()
            visited += 1
            if depth > min(self._depth, _DEEPEST) or visited * self._page_size > len(self._map):
                raise self._bad("expected a tree of pages, got one that is deeper than it states")
            flags, nodes = self._nodes(page)
            if flags & _BRANCH:
                children = [self._child(page, node) for node in nodes]
                stack += [(child, depth + 1) for child in reversed(children)]
            elif flags & _LEAF:
                leaves.append(page)
                counts.append(len(nodes))
            else:
                raise self._bad(f"page {page}: expected a branch or a leaf, got flags {flags}")
        return leaves, counts

    def _nodes(self, page: int) -> tuple[int, tuple[int, ...]]:
        """The flags of a page, and the offsets of its nodes."""
        _, _, flags, lower, _ = _PAGE.unpack_from(self._map, page * self._page_size)
        count = (lower - _HEADER) // 2
        if not 0 <= count <= self._page_size // 2:
            raise self._bad(f"page {page}: expected at most {self._page_size // 2} nodes")
        offsets = Struct(f"<{count}H").unpack_from(self._map, page * self._page_size + _HEADER)
        return flags, offsets

    def _child(self, page: int, node: int) -> int:
        low, high, top, _ = _NODE.unpack_from(self._map, page * self._page_size + node)
        return int(low | high << 16 | top << 32)

    def _record(self, page: int, index: int) -> tuple[bytes, bytes]:
        _, nodes = self._nodes(page)
        at = page * self._page_size + nodes[index]
        low, high, flags, length = _NODE.unpack_from(self._map, at)
        at, size = at + _NODE.size, low | high << 16
        key = self._bytes(at, length)
        if flags & ~_BIG:
            raise self._bad(f"record {key!r}: expected a plain value, got flags {flags}")
        if not flags & _BIG:
            return key, self._bytes(at + length, size)
        far = int.from_bytes(self._bytes(at + length, 8), "little")
        kind = _PAGE.unpack_from(self._map, far * self._page_size)[2]
        if not kind & _OVERFLOW:
            raise self._bad(f"record {key!r}: expected an overflow page, got flags {kind}")
        return key, self._bytes(far * self._page_size + _HEADER, size)

    def _bytes(self, start: int, size: int) -> bytes:
        if start + size > len(self._map):
            raise IndexError(start)
        return self._map[start : start + size]

    def _bad(self, message: str) -> BadInput:
        return BadInput(f"{self.path}: {message}")


def is_lmdb(path: Path) -> bool:
    """Return whether the folder, or the file, looks like a database of LMDB."""
    if not path.is_file():
        return (path / "data.mdb").is_file()
    with path.open("rb") as file:
        start = file.read(_HEADER + 4)[_HEADER:]
    return path.suffix == ".mdb" or int.from_bytes(start, "little") == _MAGIC


def write_lmdb(path: Path, records: Iterator[tuple[bytes, bytes]]) -> int:
    """Write a new database in the folder `path`, which must not exist; returns its records.

    Keys must ascend. Raises BadInput.
    """
    import lmdb

    try:
        path.mkdir(parents=True)
    except OSError as failure:
        raise BadInput(f"{path}: cannot be created: {failure.strerror}") from None
    size, count = 1 << 28, 0
    with lmdb.open(str(path), map_size=size, subdir=True, lock=False) as database:
        while part := list(islice(records, 256)):
            size = _put(database, part, size)
            count += len(part)
    return count


def _put(database: object, records: Sequence[tuple[bytes, bytes]], size: int) -> int:
    """Write records in one transaction, in a larger map if they do not fit; returns its size."""
    import lmdb

    assert isinstance(database, lmdb.Environment)
    while True:
        try:
            with database.begin(write=True) as transaction:
                for key, value in records:
                    transaction.put(key, value, append=True)
            return size
        except lmdb.MapFullError:
            size *= 2
            database.set_mapsize(size)
