"""Compiles the host's loops by numba, where it is installed.

A loop reads and writes memory once, where NumPy needs several passes. It is compiled on its first
call and cached next to its file. numba's cache checks only the file of the outermost function for
changes, so a loop calls no compiled function of another file.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

try:
    from numba import njit
except ImportError:  # the base install, as Spark executors have it
    njit = None

F = TypeVar("F", bound=Callable[..., Any])

COMPILED = njit is not None


def compile_loop(function: F, **fastmath: set[str]) -> F:
    """`function` compiled by numba, with no fastmath flags but the given ones.

    Without numba it is returned unchanged.
    """
    if njit is None:
        return function
    options = {"nogil": True, "error_model": "numpy", **fastmath}
    try:
        return njit(cache=True, **options)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # no folder that could hold the cache, as in a zip run by another user
        return njit(**options)(function)  # type: ignore[no-any-return]


def is_cached(function: Callable[..., Any]) -> bool:
    """True if no call of a function of `function`'s file need compile all of the file first.

    That is so without numba, and if numba's cache on this machine has a function of that file which
    is newer than the file. A file without such a folder compiles in every process.
    """
    if njit is None:
        return True
    source = Path(plain(function).__code__.co_filename)
    folder = function.stats.cache_path  # type: ignore[attr-defined]
    if folder is None or not source.is_file():
        return False
    changed_at = source.stat().st_mtime
    indexes = Path(folder).glob(f"{source.stem}.*.nbi")
    return any(index.stat().st_mtime >= changed_at for index in indexes)


def plain(function: F) -> F:
    """The Python function behind a compiled one, for use on whole arrays."""
    return getattr(function, "py_func", function)
