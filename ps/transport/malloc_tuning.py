"""Keep large blocks: what the C library must be told before messages of megabytes are received.

ZeroMQ allocates each frame that it receives. By default glibc maps a large block freshly from the
system and gives it back when it is freed, so that every byte of every message costs a page fault:
half of all CPU time of a large update. Told otherwise, it keeps the blocks for the next message.
All threads then share one arena, because ZeroMQ allocates in its thread what ours frees.

Blocks that are kept come to lie between others, and now and then a message finds no hole that is
large enough: the process would grow for ever, slowly. So whoever receives looks now and then how
much lies free, and gives the pages back when it is more than the next messages will need: two, or
as many as were there at once lately, for what eight peers send at once comes again.

The rule kept here: whoever set one of glibc's own variables decided for themselves, and nothing is
changed; nor is it where the C library is another.
"""

import ctypes
import os
from collections import deque
from functools import cache
from pathlib import Path

# From <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LOOK_EVERY = 64  # messages, unless they are large
_LARGE = 1 << 20  # bytes of one after which it is always looked
_NEXT = 2  # messages that room is kept for
_RECENT = 64  # looks
_LITTLE = 1 << 20  # bytes that are not worth a call
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_WANTED = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, 2**31 - 1))


class _MallInfo2(ctypes.Structure):
    """As in <malloc.h>."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def tune_malloc() -> bool:
    """Tune malloc once for this process, before a ZeroMQ context starts its thread.

    Returns whether it was done: not with MALLOC_* or GLIBC_TUNABLES in the environment, and only
    with glibc. Memory that was used once is then given back by a `HeapTrimmer` alone.
    """
    return _tuned() is not None


@cache
def _tuned() -> ctypes.CDLL | None:
    """The C library, told; None where it is left alone."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return None
    try:
        libc = ctypes.CDLL(None)
        libc.mallinfo2.restype = _MallInfo2
        libc.malloc_trim.argtypes = [ctypes.c_size_t]
        told = [libc.mallopt(parameter, value) == 1 for parameter, value in _WANTED]
    except (OSError, AttributeError, TypeError):  # another C library, or one from before 2021
        return None
    return libc if all(told) else None


def resident_bytes() -> int:
    """How much memory of the machine this process takes; 0 where the system does not say."""
    try:
        return int(_STATM.read_bytes().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


class HeapTrimmer:
    """Gives back what lies free; one for each loop that receives messages, and of its thread."""

    def __init__(self) -> None:
        self._received = self._largest = 0
        self._used: deque[int] = deque(maxlen=_RECENT)

    def received(self, message_bytes: int) -> None:
        """Count a message; every so often, look what lies free.

        Room is kept for what was in use at once lately, as many peers' messages are, and for two
        as large as the largest.
        """
        self._received += 1
        self._largest = max(self._largest, message_bytes)
        if self._received % _LOOK_EVERY and message_bytes < _LARGE:
            return
        libc = _tuned()
        if libc is None:
            return
        now = libc.mallinfo2()
        self._used.append(now.uordblks)
        room = max(self._used) - now.uordblks + _NEXT * self._largest
        if now.fordblks > room + _LITTLE:
            libc.malloc_trim(room)
