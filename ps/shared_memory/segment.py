"""Shared memory: arrays that another process on this host reads without a copy.

A segment is a file in /dev/shm (shm_files.py): a page of header, then slots of one size, each
starting on a page of its own. Only the owner writes; others map it read-only. A slot's memory is
reserved when the slot is first used. So a full /dev/shm is noticed there, where ordinary memory is
used instead, and never as a signal in the middle of an apply.

Rows of sparse tables differ in number from message to message. A job with rows has slots for them
behind the others. Each is as long as the largest message that shared memory carries, but memory is
reserved for what it has held, rounded up to a power of two: the rest of the file is a hole.

A `Reference` is sent instead of an array: slot, offset, length, and the slot's generation, which
rises whenever the slot is about to be overwritten. A window makes a view of it only if it is inside
one slot and of the current generation. That is a second line of defence: the ledger (gradients) and
the loans (versions) know what is still being read.

The header holds a random number. A process that knows the number sees this very segment, unlike a
container with a /dev/shm of its own. The two sides are processes of one user, so they need no
protection from each other; strangers can neither open the file nor name a place outside a slot.

Several shards' versions are mapped as one contiguous array, without a copy. Each shard writes its
part of the weights into a segment of its own. A worker that wants them in one piece reserves
addresses for the whole, and maps the slot of each part at its place there. Mapping works on whole
pages, so every part but the last must be a multiple of a page, as the cuts of a large table are
(shards/tables.py). Slots are few and are reused, so the mapping of a combination of slots is
cached.
"""

import ctypes
import mmap
import os
import secrets
import stat
import struct
import sys
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ps.shared_memory import shm_files
from shards.buffer_pool import UNSHARED, Buffers, heap_allocator
from shards.errors import BadMessage

_MAGIC = b"downpour"
_HEADER = struct.Struct("<8s32sQQQQ")
_GENERATIONS = 128  # the offset of the generations in the header
_REFERENCE = struct.Struct("<QQQQ")
REFERENCE_BYTES = _REFERENCE.size
MAX_SLOTS = 256
ROW_SLOTS = 64
ROW_SLOT_BYTES = 16 << 20
"""The most bytes of rows and ids that a message has in shared memory; more use the socket."""
_LEAST_ROW_BYTES = 64 << 10
PAGE = mmap.PAGESIZE
_MAP_FIXED = 0x10  # on every Linux
_MAX_CACHED = 64  # cached combinations; each takes addresses for the whole table, but no memory


class Reference(NamedTuple):
    """`length` bytes at `offset` of a slot, valid while the slot has this generation."""

    slot: int
    offset: int
    length: int
    generation: int

    def pack(self) -> bytes:
        return _REFERENCE.pack(*self)

    @staticmethod
    def unpack(frame: bytes | bytearray | memoryview) -> "Reference":
        """Decode the result of `pack`; raises BadMessage."""
        size = memoryview(frame).nbytes
        if size != REFERENCE_BYTES:
            raise BadMessage(f"reference: expected {REFERENCE_BYTES} bytes, got {size}")
        return Reference(*_REFERENCE.unpack(frame))


class _Area(NamedTuple):
    """Equal slots one after another: their number, and the bytes of each."""

    slots: int
    stride: int

    @property
    def size(self) -> int:
        return self.slots * self.stride


class ShmSegment:
    """A segment that this process owns: slots of `floats` float32 each, and slots for rows."""

    def __init__(self, job: str, floats: int, slots: int, *, rows: bool = False) -> None:
        """Raises OSError when there is no shared memory, or no room in it."""
        assert 0 <= slots <= MAX_SLOTS
        shm_files.sweep()
        self.floats = floats
        self.stride = -(-4 * floats // PAGE) * PAGE
        self.nonce = secrets.token_hex(16)
        self._slots = slots if floats else 0
        self._used = 0
        self._rows = _Area(ROW_SLOTS if rows else 0, ROW_SLOT_BYTES)
        self._row_slots: list[NDArray[np.uint8]] = []
        self._reserved: list[int] = []  # bytes, of each slot for rows
        self._row_start = PAGE + self._slots * self.stride
        self._claim = shm_files.Claim(shm_files.memory_path(job))
        try:
            os.posix_fallocate(self._claim.fd, 0, PAGE)
            os.ftruncate(self._claim.fd, self._row_start + self._rows.size)
            memory = _map_file(self._claim.path, self._row_start + self._rows.size)
        except OSError:
            self._claim.release()
            raise
        self._memory = memory
        areas = self.stride, self._slots, self._rows.stride, self._rows.slots
        _HEADER.pack_into(memory, 0, _MAGIC, self.nonce.encode(), *areas)
        self._generations = _generations(memory, self._slots + self._rows.slots)
        self._start = _address(np.frombuffer(memory, np.uint8)) + PAGE

    @property
    def name(self) -> str:
        """The file name by which a peer finds the segment."""
        return self._claim.path.name

    def allocate(self, floats: int) -> NDArray[np.float32]:
        """A new zeroed array of `floats`: in the next slot, or on the heap when none is left."""
        assert floats <= self.floats
        offset = PAGE + self._used * self.stride
        try:
            if self._used == self._slots or not self._claim.is_held:
                return heap_allocator(floats)
            # Reserved before it is used: a write to a full /dev/shm would end the process with
            # SIGBUS.
            os.posix_fallocate(self._claim.fd, offset, self.stride)
        except OSError:  # full
            return heap_allocator(floats)
        self._used += 1
        return np.frombuffer(self._memory, np.float32, floats, offset)

    def take_rows(self, size: int) -> NDArray[np.uint8] | None:
        """Memory for `size` bytes of rows; dropping it recycles it.

        None if they exceed a slot, or if there is no room.
        """
        if not 0 < size <= self._rows.stride or not self._claim.is_held:
            return None
        free, number = [], 0
        for slot in self._row_slots:  # no `enumerate`: its pair would be one more reference
            if sys.getrefcount(slot) == UNSHARED:
                free.append(number)
            number += 1  # noqa: SIM113
        fitting = [slot for slot in free if self._reserved[slot] >= size]
        if fitting:
            number = min(fitting, key=self._reserved.__getitem__)
        elif free:
            number = max(free, key=self._reserved.__getitem__)
        if not self._reserve_rows(number, size):
            return None
        self.renew(self._slots + number)
        return self._row_slots[number][:size]

    def _reserve_rows(self, number: int, size: int) -> bool:
        """Reserve memory for `size` bytes in a slot for rows; returns whether there was room."""
        if number == self._rows.slots:
            return False
        start = self._row_start + number * self._rows.stride
        if number == len(self._row_slots):
            slot = np.frombuffer(self._memory, np.uint8, self._rows.stride, start)
            self._row_slots.append(slot)
            self._reserved.append(0)
        reserved = self._reserved[number]
        if reserved < size:
            # Powers of two, so that a slot for steps of nearly one size stops growing.
            grown = min(max(_LEAST_ROW_BYTES, 1 << (size - 1).bit_length()), self._rows.stride)
            try:
                os.posix_fallocate(self._claim.fd, start + reserved, grown - reserved)
            except OSError:  # full
                return False
            self._reserved[number] = grown
        return True

    def slot(self, array: NDArray[np.float32]) -> int | None:
        """The slot that holds `array`, if any."""
        return self._slot(_address(array))

    def renew(self, slot: int) -> None:
        """Invalidate old references to a slot that is about to be overwritten."""
        self._generations[slot] += 1

    def refer(self, frame: object) -> Reference | None:
        """A reference to a frame; None if it is not in a slot here, or empty."""
        if not isinstance(frame, np.ndarray) or not frame.nbytes:
            return None
        address = _address(frame)
        slot = self._slot(address)
        if slot is None:
            return None
        offset = address - self._start
        if slot < self._slots:
            offset -= slot * self.stride
        else:
            offset -= self._slots * self.stride + (slot - self._slots) * self._rows.stride
        return Reference(slot, offset, frame.nbytes, self._generations[slot])

    def __contains__(self, array: NDArray[np.float32]) -> bool:
        return self.slot(array) is not None

    def close(self) -> None:
        """Remove the file's name. Arrays in it, here and in peers, stay valid until dropped."""
        self._claim.release()

    def _slot(self, address: int) -> int | None:
        offset = address - self._start
        if 0 <= offset < self._used * self.stride:
            return offset // self.stride
        offset -= self._slots * self.stride
        if 0 <= offset < len(self._row_slots) * self._rows.stride:
            return self._slots + offset // self._rows.stride
        return None


def _map_file(path: Path, size: int) -> mmap.mmap:
    """Map a segment's file through a new descriptor.

    A mapping keeps a copy of its descriptor, which forked children inherit; a copy of the claim's
    own descriptor would hold its lock after the owner's death.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


class SharedBuffers(Buffers):
    """Recycled arrays in a segment, to which references may be sent."""

    def __init__(self, size: int, segment: ShmSegment) -> None:
        super().__init__(size, segment.allocate)
        self._segment = segment
        self._slots: dict[int, int | None] = {}  # by id: finding an array's address is slow

    def take(self) -> NDArray[np.float32]:
        buffer = super().take()
        if id(buffer) not in self._slots:
            self._slots[id(buffer)] = self._segment.slot(buffer)
        slot = self._slots[id(buffer)]
        if slot is not None:
            # Before the caller writes: from now on a peer's old reference shows that it is
            # outdated.
            self._segment.renew(slot)
        return buffer

    def _shrink(self, free: list[NDArray[np.float32]]) -> None:
        """Do nothing: a slot stays a buffer for ever, as a peer may have a reference to it."""


class Window:
    """A read-only view of a peer's segment, one slot at a time."""

    def __init__(self, job: str, name: str) -> None:
        """Map the segment; raises BadMessage if `name` is not one of this job and this user."""
        self.name = name
        self.path = _check_path(job, name)
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise BadMessage(f"segment {name}: {error.strerror}") from None
        self._release = weakref.finalize(
            self, os.close, self._fd
        )  # in case `close` is never called
        try:
            self._map()
        except (OSError, ValueError) as error:
            self.close()
            raise BadMessage(f"segment {name}: {error}") from None
        except BadMessage:
            self.close()
            raise

    def _map(self) -> None:
        status = os.fstat(self._fd)
        is_private = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o600
        if not (is_private and stat.S_ISREG(status.st_mode)):
            raise BadMessage(f"segment {self.name}: expected this user's own file of mode 0600")
        self._memory = mmap.mmap(self._fd, status.st_size, prot=mmap.PROT_READ)
        magic, nonce, self.stride, self.slots, *rows = _HEADER.unpack_from(self._memory)
        row_stride, row_slots = rows
        self._rows = _Area(row_slots, row_stride)
        whole = PAGE + self.slots * self.stride + self._rows.size
        too_many = self.slots > MAX_SLOTS or row_slots > ROW_SLOTS
        if magic != _MAGIC or too_many or status.st_size != whole:
            raise BadMessage(f"segment {self.name}: expected one of {whole} bytes with our header")
        self.nonce = nonce.decode("ascii")
        self._generations = _generations(self._memory, self.slots + row_slots)
        self._start = _address(np.frombuffer(self._memory, np.uint8)) + PAGE

    def view(self, reference: Reference) -> NDArray[np.uint8] | None:
        """The bytes of a reference, as an array that owns its views; None if they are outdated.

        Raises BadMessage for a place that is not inside a slot.
        """
        slot, offset, length, generation = reference
        start, stride = PAGE + slot * self.stride, self.stride
        if slot >= self.slots:
            start, stride = self._row_slot(slot - self.slots)
        inside = offset <= stride and length <= stride - offset
        if not inside or not length or offset % 4:
            raise BadMessage(
                f"reference to {length} bytes at {offset} of slot {slot}: segment {self.name} has"
                f" {self.slots} slots of {self.stride} bytes, and {self._rows.slots} for rows"
            )
        current = self._generations[slot]
        # A reference can only be of the past; one of the future is invented or damaged.
        if generation > current:
            raise BadMessage(f"reference to generation {generation} of slot {slot}, at {current}")
        if generation < current:
            return None
        return np.frombuffer(self._memory, np.uint8, length, start + offset)

    def _row_slot(self, number: int) -> tuple[int, int]:
        """The offset and the bytes of a slot for rows; of one that there is not, none."""
        if number >= self._rows.slots:
            return 0, 0
        return PAGE + self.slots * self.stride + number * self._rows.stride, self._rows.stride

    def tile(self, frames: Sequence[NDArray[np.uint8]]) -> "MappedPiece | None":
        """The piece of the file that holds `frames`, for a contiguous mapping.

        None if they are not one after another from the beginning of a slot.
        """
        if not frames:
            return None
        start = reached = _address(frames[0]) - self._start
        if self._fd < 0 or not 0 <= start < self.slots * self.stride or start % self.stride:
            return None
        for frame in frames:
            if _address(frame) - self._start != reached:
                return None
            reached += frame.nbytes
        return MappedPiece(self.name, self._fd, PAGE + start, reached - start)

    def owner_is_gone(self) -> bool:
        """Return whether the process that owns the segment has ended."""
        return shm_files.owner_is_gone(self._fd)

    def close(self) -> None:
        """Close the file; views stay valid until they are dropped. May be called twice."""
        self._release()
        self._fd = -1


def _check_path(job: str, name: str) -> Path:
    if not shm_files.is_memory(job, name):
        raise BadMessage(f"segment {name[:80]!r}: expected a name of this job's")
    return shm_files.ROOT / name


def _generations(memory: mmap.mmap, slots: int) -> memoryview:
    """The generations of all slots, as a memoryview: reading an array's element is slower."""
    return memoryview(memory)[_GENERATIONS : _GENERATIONS + 8 * slots].cast("Q")


def _address(array: NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])


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
            mapped = _map_together(tiles)
            if mapped is None:
                return None
            if len(self._known) == _MAX_CACHED:
                self._known.clear()  # arrays in a mapping keep it alive
            self._known[key] = mapped
        return self._known[key]

    def forget(self, name: str) -> None:
        """Drop the mappings with a piece of this file, or its memory would not be freed."""
        for key in [key for key in self._known if any(tile[0] == name for tile in key)]:
            del self._known[key]  # arrays in a mapping keep it alive


def _map_together(tiles: Sequence[MappedPiece]) -> mmap.mmap | None:
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
