"""Compiles the host's loops by numba, where it is installed.

A loop reads and writes memory once, where NumPy needs several passes. It is compiled on its first
call and cached next to its file. numba's cache checks only the file of the outermost function for
changes, so a loop calls no compiled function of another file.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

try:
    from llvmlite import ir
    from numba import njit, types
    from numba.extending import intrinsic
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


def can_store(function: Callable[..., Any]) -> bool:
    """True if numba has a folder on this machine for the code of `function`, for later processes.

    Without one each process compiles for itself.
    """
    return njit is not None and function.stats.cache_path is not None  # type: ignore[attr-defined]


def plain(function: F) -> F:
    """The Python function behind a compiled one, for use on whole arrays."""
    return getattr(function, "py_func", function)


def _make_prefetch() -> Callable[[Any, int], None]:
    """A function for compiled loops: asks for the cache line of an element of a flat array.

    The loop continues at once, and finds the line in the cache some hundred instructions later.
    """

    def declare(_context: Any, array: Any, index: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            struct = context.make_array(signature.args[0])(context, builder, arguments[0])
            byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
            address = builder.bitcast(builder.gep(struct.data, [arguments[1]]), byte)
            kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
            name = "llvm.prefetch.p0"
            function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
            # To be read, into all levels of the cache, as data.
            builder.call(function, [address, number(0), number(3), number(1)])
            return context.get_dummy_value()

        return types.void(array, index), generate

    return intrinsic(declare)  # type: ignore[no-any-return]


def _ignore(_array: Any, _index: int) -> None:
    """Stand in for `prefetch` without numba, where no loop runs."""


prefetch = _ignore if njit is None else _make_prefetch()
