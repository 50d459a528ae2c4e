"""Large blocks stay with the process, unless the user has configured glibc otherwise."""

import os
import platform
import subprocess
import sys

import pytest

_TOUCH = """
import ctypes, resource
from ps.transport.malloc_tuning import tune_malloc
print(int(tune_malloc()))
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def touch():
    block = libc.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

_HOLES = """
import ctypes, gc, sys
from ps.transport.malloc_tuning import HeapTrimmer, tune_malloc
tune_malloc()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def resident():
    return 4096 * int(open("/proc/self/statm").read().split()[1])
blocks = [libc.malloc(1 << 20) for _ in range(200)]
for block in blocks:
    ctypes.memset(block, 1, 1 << 20)
used = HeapTrimmer()
if "--seen" in sys.argv:
    used.received(1 << 20)
    sys.argv.remove("--seen")
for block in blocks[::2]:
    libc.free(block)
print(resident())
surplus, size, least = used, *map(int, sys.argv[1:])
for _ in range(least - 1):
    surplus.received(size)
print(resident())
surplus.received(size)
print(resident())
"""


def _run(**environment: str) -> tuple[bool, int]:
    """Whether malloc was tuned in a fresh process, and the page faults of five large blocks."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", _TOUCH], env=kept | environment, stdout=subprocess.PIPE, check=True
    )
    tuned, faults = map(int, done.stdout.split())
    return bool(tuned), faults


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library is left alone")
def test_a_large_block_is_faulted_in_once() -> None:
    """A freed block serves the next message; a returned one would cost a fault for each 4 KB."""
    tuned, faults = _run()
    assert tuned
    assert faults < 100


def test_who_sets_glibcs_variables_decides() -> None:
    """Nothing is changed then, and the system takes every block back."""
    tuned, faults = _run(MALLOC_TRIM_THRESHOLD_="131072")
    assert not tuned
    assert faults > 1000


def _resident_with_holes(*arguments: str) -> tuple[int, int, int]:
    """Resident bytes of a process with a hundred free megabytes between used ones: before it
    receives, then before and after the message that triggers the check.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", _HOLES, *arguments]
    done = subprocess.run(command, env=kept, stdout=subprocess.PIPE, check=True)
    full, before, after = map(int, done.stdout.split())
    return full, before, after


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library is left alone")
@pytest.mark.parametrize(("size", "least"), [(1 << 16, 64), (1 << 20, 1)])
def test_what_lies_free_between_others_is_given_back(size: int, least: int) -> None:
    """Room for two messages is kept; the check comes every 64 messages, or after a large one."""
    full, before, after = _resident_with_holes(str(size), str(least))
    assert before > full - (10 << 20)
    assert after < before - (80 << 20)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library is left alone")
def test_room_is_kept_for_what_was_in_use_at_once() -> None:
    """Many peers' messages come again, so their room is kept; after 64 checks it is released."""
    full, before, after = _resident_with_holes("--seen", str(1 << 20), "64")
    assert before > full - (10 << 20)
    assert after < before - (80 << 20)
