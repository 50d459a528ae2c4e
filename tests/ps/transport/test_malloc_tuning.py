"""Large blocks stay with the process, unless the user has configured glibc otherwise."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from ps.transport import malloc_tuning

# The module is imported alone: what other modules allocate is no part of these figures.
_START = """
import ctypes, resource, sys
sys.path.append(sys.argv.pop(1))
from malloc_tuning import HeapTrimmer, resident_bytes, tune_malloc
tuned = tune_malloc()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def used(size):
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    return block
"""

_TOUCH = """
print(int(tuned))
libc.free(used(64 << 20))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    libc.free(used(64 << 20))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

_HOLES = """
seen, size, least = map(int, sys.argv[1:])
own = [used(1 << 16) for _ in range(128)]
for block in own[::2]:
    libc.free(block)
blocks = [used(1 << 20) for _ in range(200)]
surplus = HeapTrimmer()
for _ in range(seen):
    surplus.count_message(size)
for block in blocks[::2]:
    libc.free(block)
print(resident_bytes())
for _ in range(least - 1):
    surplus.count_message(size)
print(resident_bytes())
surplus.count_message(size)
print(resident_bytes())
"""


def _printed(script: str, *arguments: int, **environment: str) -> list[int]:
    """The numbers that a script prints in a fresh process."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", _START + script, str(Path(malloc_tuning.__file__).parent)]
    done = subprocess.run(
        [*command, *map(str, arguments)],
        env=kept | environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library is left alone")
def test_a_large_block_is_faulted_in_once() -> None:
    """A freed block serves the next message; a returned one would cost a fault for each 4 KB."""
    tuned, faults = _printed(_TOUCH)
    assert tuned
    assert faults < 100


def test_who_sets_glibcs_variables_decides() -> None:
    """Nothing is changed then, and the system takes every block back."""
    tuned, faults = _printed(_TOUCH, MALLOC_TRIM_THRESHOLD_="131072")
    assert not tuned
    assert faults > 100  # far more, but for pages of 2 MB


def _resident_with_holes(*, seen: int, size: int, least: int) -> list[int]:
    """Resident bytes of a process with a hundred free megabytes between used ones: before it
    receives `least` messages of `size` bytes, then before and after the last of them.

    `seen` messages came when all were in use. 4 MB more are free, between the process's own
    blocks.
    """
    return _printed(_HOLES, seen, size, least)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library is left alone")
@pytest.mark.parametrize(("size", "least"), [(1 << 16, 64), (1 << 20, 16), (16 << 20, 1)])
def test_what_lies_free_between_others_is_given_back(size: int, least: int) -> None:
    """Room for two messages is kept; the check comes every 64 messages, or every 16 MB of them."""
    full, before, after = _resident_with_holes(seen=0, size=size, least=least)
    assert before > full - (10 << 20)
    assert after < before - (80 << 20)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library is left alone")
def test_room_is_kept_for_what_was_in_use_at_once() -> None:
    """Many peers' messages come again, so their room is kept; after 64 checks it is released."""
    full, before, after = _resident_with_holes(seen=16, size=1 << 20, least=64 * 16)
    assert before > full - (10 << 20)
    assert after < before - (80 << 20)
