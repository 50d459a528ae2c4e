"""Configures malloc to keep large blocks; call it before receiving messages of megabytes.

ZeroMQ allocates each frame that it receives. By default glibc maps each large block freshly from
the system and returns it when it is freed, so every page of every message costs a page fault: half
of all CPU time of a large update. With the settings here, glibc keeps the blocks for the next
message. All threads then share one arena, because ZeroMQ's thread allocates what our threads free.

Kept blocks become fragmented, and now and then no hole is large enough for a message: the process
would grow slowly without limit. So the receiving loop regularly checks how much memory is free, and
returns pages to the system when there is more than the next messages need: room for two of them, or
for as many as were in use at once recently, because peers that sent at once will do so again.

Nothing is changed if the user has set one of glibc's own variables, or with another C library.
"""

import ctypes
import os
from collections import deque
from functools import cache
from pathlib import Path

# From <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LOOK_EVERY = 64  # messages between checks, unless they are large
_LOOK_BYTES = 16 << 20  # and the bytes of messages: a check takes some 30 us
_NEXT = 2  # messages for which room is kept
_RECENT = 64  # checks over which the highest use counts
# Free bytes that are not worth a call. Some 4 MB are free between a process's own small blocks when
# it has compiled its modules, and malloc_trim cannot return those. With a smaller value, each
# message would be followed by a call that returns the pages that the next message needs.
_LITTLE = 8 << 20
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_WANTED = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, 2**31 - 1))


class _MallInfo2(ctypes.Structure):
    """`struct mallinfo2` of <malloc.h>."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def tune_malloc() -> bool:
    """Tune malloc once for this process, before a ZeroMQ context starts its thread.

    Returns whether it was tuned: not with MALLOC_* or GLIBC_TUNABLES in the environment, and only
    with glibc. Memory that was used once is then given back only by a `HeapTrimmer`.
    """
    return _tune() is not None


@cache
def _tune() -> ctypes.CDLL | None:
    """The C library after tuning; None where it is left alone."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return None
    try:
        libc = ctypes.CDLL(None)
        libc.mallinfo2.restype = _MallInfo2
        libc.malloc_trim.argtypes = [ctypes.c_size_t]
        accepted = [libc.mallopt(parameter, value) == 1 for parameter, value in _WANTED]
    except (OSError, AttributeError, TypeError):  # another C library, or one from before 2021
        return None
    return libc if all(accepted) else None


def resident_bytes() -> int:
    """The memory that this process occupies, in bytes; 0 where the system does not report it."""
    try:
        return int(_STATM.read_bytes().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


class HeapTrimmer:
    """Gives free memory back; use one in each loop that receives messages, from its own thread."""

    def __init__(self) -> None:
        self._received = self._bytes = self._largest = 0
        self._used: deque[int] = deque(maxlen=_RECENT)

    def count_message(self, message_bytes: int) -> None:
        """Count a message; every `_LOOK_EVERY` messages or `_LOOK_BYTES`, check the free memory.

        Room is kept for the highest recent use, such as many peers' messages at once, and for two
        messages as large as the largest.
        """
        self._received += 1
        self._bytes += message_bytes
        self._largest = max(self._largest, message_bytes)
        if self._received < _LOOK_EVERY and self._bytes < _LOOK_BYTES:
            return
        self._received = self._bytes = 0
        libc = _tune()
        if libc is None:
            return
        now = libc.mallinfo2()
        self._used.append(now.uordblks)
        room = max(self._used) - now.uordblks + _NEXT * self._largest
        if now.fordblks > room + _LITTLE:
            libc.malloc_trim(room)
