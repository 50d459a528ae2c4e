"""What each kernel is tried on: one file a subject, used by the emulator's tests and on a GPU.

A case is a kernel's arguments as NumPy arrays and numbers. Sizes are small and odd: an emulated
thread costs about a microsecond. Every file here has a function `cases`, and `every_case` finds
them all. No pytest in here: the GPU script runs without it.
"""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.kernel_check import Case


def every_case() -> "Iterator[Case]":
    """All cases of all subjects, in the order of the files' names."""
    for found in sorted(iter_modules(__path__), key=lambda module: module.name):
        yield from import_module(f"{__name__}.{found.name}").cases()
